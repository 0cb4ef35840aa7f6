"""Faults of Keras workers: all processes end, and the right worker is named.

How soon they end is measured by benchmarks/faults.py.
"""

import json
import os
import re
import signal
import sys

import pytest
from jobs import SCRIPTS, campaign, run

from lbbsp_core.launch.cluster import free_ports

# The first one for workers that are silent, and not only slow.
SILENCE, NO_SILENCE = "silence_seconds=4", "silence_seconds=300"


@pytest.fixture(autouse=True)
def mark(tmp_path, monkeypatch):
    """The file by which a worker tells that it meets with its fault."""
    monkeypatch.setenv("FAULT_MARK", str(tmp_path / "fault"))


@pytest.fixture
def by_hand(popen):
    """Returns a function that starts two workers, or some of them, without the launcher."""

    def start(*arguments, started=(0, 1)):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        workers = []
        for rank in started:
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            own = {"TF_CONFIG": json.dumps(task), "TF_CPP_MIN_LOG_LEVEL": "2"}
            command = [sys.executable, SCRIPTS / "faults.py", *arguments]
            workers.append(popen(command, env={**os.environ, **own}))
        return workers

    return start


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("exit_0_in_step", 1, r"has left \(at the end of its script, before step 1"),
        *campaign(
            ("stop", None, "has given no sign of life for 4 s; with its last one it was"),
            ("exit_3_in_step", 3, "has failed: see its output"),
            ("raise_with_hook", 1, "has failed: see its output"),
            ("exit_0_at_strategy", 1, r"has left \(at the end of its script, before step 0"),
        ),
    ],
)
def test_the_others_end_and_name_the_worker(by_hand, fault, status, says):
    other, victim = by_hand(fault, "1", SILENCE if fault == "stop" else NO_SILENCE)
    said, _ = other.communicate()
    if status is None:
        victim.kill()
    assert (other.returncode, victim.wait()) == (1, status or -signal.SIGKILL)
    assert re.search(rf"worker 1 \(.*\) {says}", said)


@pytest.mark.parametrize("victim", [1, *campaign(0)])
def test_a_worker_that_dies_with_a_part_of_a_step_ends_the_job(capfd, victim):
    job = run("faults", "kill_in_part", str(victim), "share_work=0.5", workers=2)
    assert job.status == 128 + signal.SIGKILL
    assert f"worker {victim} was ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.campaign
def test_a_short_stop_is_survived():
    job = run("faults", "stop_for_5_s", "1", NO_SILENCE, workers=2)
    assert job.status == 0
    assert "TRAINED" in job.lines[0]


@pytest.mark.campaign
def test_a_late_worker_is_ended_only_by_a_limit():
    job = run("faults", "endless_wait", "1", "limit_seconds=3", workers=2)
    assert job.status == 1
    assert re.search(r"others have waited for worker 1 \(.*\), which is .* step 1\d, for", job.text)


def test_the_launcher_names_a_frozen_worker_and_leaves_no_folder(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = run("faults", "endless_wait_in_c_checkpoint", "1", SILENCE, workers=2)
    assert job.status == 1
    (line,) = (each for each in capfd.readouterr().err.splitlines() if "lbbsp launch" in each)
    assert re.match(r"lbbsp launch: worker 1 \(.*\) has given no sign of life for 4 s", line)
    assert not list(tmp_path.glob("lbbsp-*"))


@pytest.mark.campaign
def test_a_worker_that_never_starts_is_named(by_hand):
    (worker,) = by_hand("none", "0", started=[1])
    for line in worker.stdout:
        if "lbbsp:" in line:
            break
    assert re.search(r"worker 1 \(.*\) is waiting for worker 0 \(.*\), which has not started", line)


@pytest.mark.campaign
def test_a_worker_that_leaves_before_the_start_is_named(capfd):
    job = run("faults", "exit_0_at_import", "1", workers=2)
    assert job.status == 1
    assert "worker 1 ended with status 0 before training, and worker 0" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fault", "victim"),
    [
        ("stop_at_import", 1),
        *campaign(
            *(("raise_at_import", 0), ("_exit_0_at_import", 1), ("exit_0_at_import", 1)),
            *(("kill_at_strategy", 1), ("stop_at_strategy", 0), ("kill_at_balancer", 0)),
        ),
    ],
)
def test_a_worker_that_ends_before_the_start_by_hand_ends_the_other(by_hand, fault, victim):
    survivor = by_hand(fault, victim)[1 - victim]
    said, _ = survivor.communicate()
    how = "ended before all workers had started"
    if fault.endswith(("at_strategy", "at_balancer")) and survivor.returncode == 1:
        # Both may be behind their strategies: TensorFlow or the heartbeat may be first to notice.
        how = "(cannot be reached any more|has given no sign of life)"
    else:
        assert survivor.returncode == -signal.SIGKILL
    assert re.search(rf"worker {victim} \(.*\) {how}", said)


@pytest.mark.campaign
def test_a_chief_that_is_lost_before_its_first_variable_is_no_difference_of_models(by_hand):
    other = by_hand("kill_behind_the_other_at_balancer", "0", NO_SILENCE)[1]
    said, _ = other.communicate()
    assert other.returncode == 1
    assert re.search(r"worker 0 \(.*\) cannot be reached any more: see its output", said)


@pytest.mark.parametrize(
    ("fault", "victim"),
    [("sigterm_at_balancer", 1), *campaign(("sigterm_in_evaluation", 0), ("sigterm_twice", 1))],
)
def test_workers_leave_together_with_one_that_got_sigterm(by_hand, fault, victim):
    workers = by_hand(fault, victim)
    said = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [143, 143]
    for text in said:
        assert re.search(rf"worker {victim} \(.*\) got SIGTERM \(.*so that all workers leave", text)


@pytest.mark.campaign
@pytest.mark.parametrize("fault", ["kill_after_fit", "kill_after_training"])
def test_a_chief_that_is_lost_after_its_fit_is_named(by_hand, fault):
    other = by_hand(fault, "0", NO_SILENCE)[1]
    said = other.communicate()[0]
    assert other.returncode == 1
    assert re.search(r"worker 0 \(.*\) cannot be reached any more: see its output", said)
