"""Estimators on two workers stop at the same epoch, whatever the metrics of one worker are."""

import json
import subprocess
import sys

import pytest
from jobs import RESULT, SCRIPTS, needs_mxnet

pytestmark = needs_mxnet
TOLERANCE = 2e-6
STEPS = 4  # of an epoch


@pytest.fixture(scope="module")
def seen(clusters):
    """What both workers reported."""
    job = clusters.run("mx_early_stopping", workers=2, framework="mxnet")
    assert job.status == 0
    return [job.results(rank) for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    """What one process reports that trains and validates on all data."""
    command = [sys.executable, str(SCRIPTS / "mx_early_stopping.py"), "alone"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    (line,) = (each for each in said.splitlines() if each.startswith(RESULT))
    return json.loads(line.removeprefix(f"{RESULT}early "))


def test_handlers_read_the_metrics_of_all_data(seen, alone):
    assert seen[0]["early"] == seen[1]["early"], "to the last bit"
    values, steps = seen[0]["early"]
    assert steps == alone[1]
    assert values == [pytest.approx(each, rel=TOLERANCE) for each in alone[0]]


def test_the_fit_stops_early(alone):
    assert len(alone[0]) < 12, "a fit that makes all epochs would prove nothing"


def test_a_validation_by_one_worker_hangs_nobody(seen):
    assert seen[0]["validated_by_one"] == seen[1]["validated_by_one"]
    assert seen[0]["validated_by_one"][1] == 2 * STEPS


def test_the_record_has_the_steps_that_an_estimator_plans(seen):
    assert seen[0]["planned"] == [["planned", 2 * STEPS]]


def test_a_handler_that_ends_one_worker_ends_all(seen):
    assert [each["ended_by_one"] for each in seen] == [3 * STEPS] * 2


def test_a_requested_stop_ends_the_fit_and_not_only_its_epoch(seen):
    assert [each["requested"] for each in seen] == [3] * 2
