"""Evaluation and prediction on two workers equal those of one process, whatever the rows."""

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
SOURCES = ["tf_data", "unknown_length", "py_dataset", "generator"]
TOLERANCE = 2e-6

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def seen():
    """What each rank reported."""
    job = run("evaluation", *CASES, workers=2, timeout=360)
    assert job.status == 0
    return [job.results(rank) for rank in range(2)]


def check_like_one_process(seen, name):
    """Checks the results of all ranks against those of one process, which rank 0 reports."""
    chief = seen[0][name]
    assert chief["logs"] == pytest.approx(chief["expected"], rel=TOLERANCE, abs=TOLERANCE)
    assert chief["same_shapes"]
    assert chief["predictions"] <= TOLERANCE
    for key in ("logs", "sum_of_predictions"):
        assert seen[1][name][key] == chief[key]


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
