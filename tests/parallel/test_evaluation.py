"""Evaluation and prediction on replicas equal those of one process, whatever the rows."""

import pytest
from jobs import chosen

CASES = [
    "own_test_step",
    "only_metrics",
    "sum",
    "masked",
    "auc",
    "summed_compute_loss",
    "two_kinds_of_sums",
    "metrics_by_hand",
    "unknown_length",
]
MIRRORED = ["own_test_step", "scalar_loss", "recurrent", "sum", "masked", "metrics_by_hand",
            "tf_data", "unknown_length", "py_dataset", "generator"]  # fmt: skip
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def seen(request, clusters):
    """What each rank reported."""
    job = clusters.run("evaluation", "workers", *chosen(request, "case"), workers=2)
    assert job.status == 0
    return [job.results(rank) for rank in range(2)]


def check_like_one_process(seen, name):
    """Checks the results of all ranks against those of one process, which rank 0 reports."""
    chief, *others = (each[name] for each in seen)
    expected = pytest.approx(chief["expected"], rel=TOLERANCE, abs=TOLERANCE)
    assert chief["logs"] == expected, name
    assert chief["same_shapes"], name
    assert chief["predictions"] <= TOLERANCE, name
    for other in others:
        assert other["logs"] == chief["logs"], name
        assert other["sum_of_predictions"] == chief["sum_of_predictions"], name


@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_one_row_gives_what_one_process_gives(seen, case):
    check_like_one_process(seen, case)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "workers", "names"),
    [("workers", 2, ["all-but", *CASES]), ("mirrored", 1, MIRRORED)],
    ids=["workers", "devices of one worker"],
)
def test_all_other_cases_give_what_one_process_gives(clusters, kind, workers, names):
    job = clusters.run("evaluation", kind, *names, workers=workers, devices=3 - workers)
    assert job.status == 0
    seen = [job.results(rank) for rank in range(workers)]
    found = {name: each for name, each in seen[0].items() if isinstance(each, dict)}
    compared = [name for name, each in found.items() if "predictions" in each]
    assert len(compared) >= len(MIRRORED)
    for name in compared:
        check_like_one_process(seen, name)
    expected = pytest.approx(seen[0]["expected_validation"], abs=TOLERANCE)
    assert seen[0]["validation"] == expected, "with fewer rows than replicas"


def test_steps_are_steps_of_the_job(seen):
    assert seen[0]["steps"] <= TOLERANCE


def test_validation_may_have_fewer_rows_than_workers(seen):
    expected = pytest.approx(seen[0]["expected_validation"], abs=TOLERANCE)
    assert seen[0]["validation"] == seen[1]["validation"] == expected


def test_no_step_asks_all_workers_for_another_batch(seen):
    # Keras 3.16 does so in each step on TensorFlow's distributed iterators.
    for each in seen:
        assert each["collective_draws"] == []


OTHER_SAMPLES = (
    "workers disagree on the data of evaluate, predict or validation: samples of worker 1 differ "
    "from those of worker 0"
)


OTHER_BATCHES = "number of batches of evaluate, predict or validation: worker 0 has 2, worker 1"


@pytest.mark.parametrize(
    ("wrong_data", "message"),
    [
        ("lengths", "all arrays of a batch must have the same length"),
        ("evaluated", OTHER_SAMPLES),
        ("predicted", OTHER_SAMPLES),
        ("validation", OTHER_SAMPLES),
        ("batches", OTHER_BATCHES),
    ],
)
def test_data_that_differ_are_refused(seen, wrong_data, message):
    for each in seen:
        assert message in each[f"different_{wrong_data}"]


def test_each_worker_gets_the_rows_of_its_own_batch(seen):
    for each in seen:
        assert each["on_batch"]["rows"] == 5
        assert each["on_batch"]["logs"] == pytest.approx(seen[0]["on_batch"]["expected"], TOLERANCE)
    assert seen[0]["on_batch"]["difference"] <= TOLERANCE
    assert seen[0]["on_batch"]["alone"] <= TOLERANCE


def test_a_worker_that_predicts_alone_is_told_to_call_it_on_all(seen):
    told = seen[0]["evaluated_alone"]
    assert "RuntimeError: worker 0 has called evaluate or predict, and worker 1 is" in told
    assert "waiting for the others: call it on all workers" in told
