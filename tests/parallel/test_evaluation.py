"""Evaluation and prediction on replicas equal those of one process, whatever the rows."""

import pytest
from jobs import run

CASES = [
    "scalar_loss",
    "recurrent",
    "convolution",
    "sample_weight",
    "two_outputs",
    "nested_inputs",
    "ctc",
    "own_test_step",
    "own_tracker",
    "sum",
    "added_loss",
    "masked",
    "auc",
]
MIRRORED_CASES = ["scalar_loss", "recurrent", "own_test_step", "sum", "masked"]
SOURCES = ["tf_data", "unknown_length", "py_dataset", "generator"]
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def seen():
    """What each rank reported."""
    job = run("evaluation", "workers", *CASES, workers=2)
    assert job.status == 0
    return [job.results(rank) for rank in range(2)]


@pytest.fixture(scope="module")
def mirrored():
    """What a worker with two devices reported."""
    job = run("evaluation", "mirrored", *MIRRORED_CASES, workers=1)
    assert job.status == 0
    return [job.results(0)]


def check_like_one_process(seen, name):
    """Checks the results of all ranks against those of one process, which rank 0 reports."""
    chief, *others = (each[name] for each in seen)
    assert chief["logs"] == pytest.approx(chief["expected"], rel=TOLERANCE, abs=TOLERANCE)
    assert chief["same_shapes"]
    assert chief["predictions"] <= TOLERANCE
    for other in others:
        assert other["logs"] == chief["logs"]
        assert other["sum_of_predictions"] == chief["sum_of_predictions"]


@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_one_row_gives_what_one_process_gives(seen, case):
    check_like_one_process(seen, case)


@pytest.mark.parametrize("source", SOURCES)
def test_each_kind_of_data_is_evaluated_whole(seen, source):
    check_like_one_process(seen, source)


def test_steps_are_steps_of_the_job(seen):
    assert seen[0]["steps"] <= TOLERANCE


def test_validation_may_have_fewer_rows_than_workers(seen):
    expected = pytest.approx(seen[0]["expected_validation"], abs=TOLERANCE)
    assert seen[0]["validation"] == seen[1]["validation"] == expected


def test_arrays_of_different_lengths_are_an_error(seen):
    for each in seen:
        assert "all arrays of a batch must have the same length" in each["different_lengths"]


@pytest.mark.parametrize("case", [*MIRRORED_CASES, *SOURCES])
def test_devices_of_one_worker_give_what_one_process_gives(mirrored, case):
    check_like_one_process(mirrored, case)


def test_validation_may_have_fewer_rows_than_devices(mirrored):
    (found,) = mirrored
    assert found["validation"] == pytest.approx(found["expected_validation"], abs=TOLERANCE)
