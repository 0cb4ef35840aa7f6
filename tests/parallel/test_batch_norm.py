"""Batch normalisation over the global batch is exact on any split."""

import pytest
from jobs import campaign, chosen, on

CASES = ["masked", "from_file", "accumulation"]
TOLERANCE = 1e-5
ROUNDED = {"mixed_float16": 2e-2}  # the parts of a batch are rounded differently from the whole


@pytest.mark.parametrize(
    ("workers", "cases"),
    [*on(2, CASES, campaign=[["all-but", *CASES]]), *on(3, campaign=[["convolution", "masked"]])],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_weights_and_moving_statistics_are_those_of_whole_batches(clusters, workers, cases):
    job = clusters.run("batch_norm", *cases, workers=workers)
    assert job.status == 0
    for case, found in job.results(0).items():
        assert "error" not in found, f"{case}: {found['error']}"
        assert found["moved"] > 0.1, case
        assert found["difference"] <= ROUNDED.get(case, TOLERANCE) * found["moved"], case
        for rank in range(workers):
            assert job.results(rank)[case]["state"] == found["state"], case


INNER = ["GradientPenalty", "DividedSum", *campaign("PenaltyAlone", "ZeroCentred", "Sign", "Raw",
         "MeanAndSum", "Twice", "Saliency", "Penalised")]  # fmt: skip
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
