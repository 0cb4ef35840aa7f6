"""Evaluation and prediction on three workers equal those of one process, whatever the rows."""

import pytest
from jobs import run

CASES = [
    "dense",
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
ROWS = ["1", "2", "13", "40"]  # a last batch with no row on two workers, and with one on one
SOURCES = ["tf_data", "unknown_length", "py_dataset", "generator"]
TOLERANCE = 2e-6

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def seen():
    """What each rank reported."""
    job = run("evaluation", *CASES, workers=3, timeout=350)
    assert job.status == 0
    return [job.results(rank) for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows_gives_what_one_process_gives(seen, case, rows):
    for rank in range(3):
        found = seen[rank][case][rows]
        assert found["same_names"]
        assert found["shapes"]
        assert found["logs"] <= TOLERANCE * max(1, *map(abs, found["values"].values()))
        assert found["predictions"] <= TOLERANCE
        assert found["values"] == seen[0][case][rows]["values"]


@pytest.mark.parametrize("source", SOURCES)
def test_each_kind_of_data_is_evaluated_whole(seen, source):
    for rank in range(3):
        assert seen[rank][source]["logs"] <= TOLERANCE
        assert seen[rank][source]["predictions"] <= TOLERANCE


def test_steps_are_steps_of_the_job(seen):
    assert max(seen[rank]["steps"] for rank in range(3)) <= TOLERANCE


def test_validation_may_have_fewer_rows_than_workers(seen):
    for rank in range(3):
        found = seen[rank]["validation"]
        assert found["ours"] == pytest.approx(found["expected"], abs=TOLERANCE)
