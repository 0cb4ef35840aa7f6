"""Batch normalisation over the global batch is exact on any split."""

import pytest
from jobs import campaign, chosen, on

CASES = [
    *on(
        2,
        "masked",
        "from_file",
        "accumulation",
        campaign=[
            "convolution",
            "fine_tuned",
            "channels_first",
            "subclassed",
            "over_time",
            "unrolled_cell",
            "mixed_float16",
            "run_eagerly",
        ],
    ),
    *on(3, "convolution", campaign=["masked"]),
]
TOLERANCE = 1e-5
ROUNDED = {"mixed_float16": 2e-2}  # the parts of a batch are rounded differently from the whole


@pytest.fixture(scope="module")
def results(request, clusters):
    """Results of both jobs: by number of workers, by rank, then by case."""
    jobs = clusters.run_chosen(request, "batch_norm")
    return {n: [job.results(rank) for rank in range(n)] for n, job in jobs.items()}


@pytest.mark.parametrize(("workers", "case"), CASES)
def test_weights_and_moving_statistics_are_those_of_whole_batches(results, workers, case):
    found = results[workers][0][case]
    assert "error" not in found, found["error"]
    assert found["moved"] > 0.1
    assert found["difference"] <= ROUNDED.get(case, TOLERANCE) * found["moved"]
    assert all(of_rank[case]["state"] == found["state"] for of_rank in results[workers])


INNER = ["GradientPenalty", "ZeroCentred", "Sign", "DividedSum", "MeanAndSum",
         *campaign("Twice", "Raw", "Saliency", "Penalised")]  # fmt: skip
UNKNOWN = ["Jacobian", *campaign("Symbolic")]


@pytest.fixture(scope="module")
def inner(request, clusters):
    cases = chosen(request, "inner_case")
    job = clusters.run("inner_gradients", *cases, workers=1, devices=2)
    assert job.status == 0
    return job.results(0)


@pytest.mark.parametrize("inner_case", INNER)
def test_gradients_inside_the_step_are_those_of_one_process(inner, inner_case):
    assert inner[inner_case] <= 1e-12


@pytest.mark.parametrize("inner_case", UNKNOWN)
def test_a_gradient_of_unknown_kind_through_synchronised_layers_is_refused(inner, inner_case):
    assert "a gradient through synchronised batch normalisation is taken of" in inner[inner_case]
