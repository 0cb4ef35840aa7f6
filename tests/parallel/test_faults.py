"""Faults of Keras workers: all processes end soon, and the right worker is named.

The figures of an idle machine are in docs/reliability.md.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from jobs import BOUND_SECONDS, SCRIPTS, campaign, run

from lbbsp_core.launch.cluster import free_ports

SILENCE = "silence_seconds=4"


def by_hand(*arguments: str, started=(0, 1)) -> list[subprocess.Popen]:
    """Starts two workers as a user does, without the launcher, or only some of them."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = []
    for rank in started:
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        worker = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "faults.py"), *arguments],
            env={**os.environ, "TF_CONFIG": json.dumps(task), "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        workers.append(worker)
    return workers


def fault_time(text: str) -> float:
    return float(re.search(r"FAULT ([\d.]+)", text)[1])


@pytest.fixture
def workers():
    """Ends what a test leaves."""
    started = []
    yield started
    for worker in started:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("stop", None, "has given no sign of life for 4 s; with its last one it was"),
        ("exit_0_in_step", 1, r"has left \(at the end of its script, before step 1"),
        *campaign(
            ("exit_3_in_step", 3, "has failed: see its output"),
            ("raise_with_hook", 1, "has failed: see its output"),
            ("exit_0_at_strategy", 1, r"has left \(at the end of its script, before step 0"),
        ),
    ],
)
def test_the_others_end_and_name_the_worker(workers, fault, status, says):
    workers += by_hand(fault, "1", SILENCE)
    said, _ = workers[0].communicate(timeout=120)
    if status is None:
        ended = time.time()
        workers[1].kill()
    own, _ = workers[1].communicate(timeout=60)
    if status is not None:
        ended = time.time()
    seconds = ended - fault_time(own)
    print(f"{fault}: {seconds:.1f} s")
    assert seconds < BOUND_SECONDS
    assert (workers[0].returncode, workers[1].returncode) == (1, status or -signal.SIGKILL)
    assert re.search(rf"worker 1 \(.*\) {says}", said)


@pytest.mark.parametrize("victim", [1, *campaign(0)])
def test_a_worker_that_dies_with_a_part_of_a_step_ends_the_job(capfd, victim):
    job = run("faults", "kill_in_part", str(victim), SILENCE, "share_work=0.5", workers=2)
    assert time.time() - fault_time(job.text) < BOUND_SECONDS
    assert job.status == 128 + signal.SIGKILL
    assert f"worker {victim} was ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.campaign
def test_a_short_stop_is_survived():
    job = run("faults", "stop_for_5_s", "1", workers=2)
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
    assert time.time() - fault_time(job.text) < BOUND_SECONDS
    assert job.status == 1
    (line,) = (each for each in capfd.readouterr().err.splitlines() if "lbbsp launch" in each)
    assert re.match(r"lbbsp launch: worker 1 \(.*\) has given no sign of life for 4 s", line)
    assert not list(tmp_path.glob("lbbsp-*"))


def test_a_worker_that_never_starts_is_named(workers):
    workers += by_hand("none", "0", started=[1])
    for line in workers[0].stdout:
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
def test_a_worker_that_ends_before_the_start_by_hand_ends_the_other(workers, fault, victim):
    workers += by_hand(fault, str(victim))
    survivor = workers[1 - victim]
    said, _ = survivor.communicate(timeout=120)
    how = "ended before all workers had started"
    if fault.endswith(("at_strategy", "at_balancer")) and survivor.returncode == 1:
        # Both may be behind their strategies: TensorFlow or the heartbeat may be first to notice.
        how = "(cannot be reached any more|has given no sign of life)"
    else:
        assert survivor.returncode == -signal.SIGKILL
    assert re.search(rf"worker {victim} \(.*\) {how}", said)
    own, _ = workers[victim].communicate(timeout=60)
    print(f"{fault}: {time.time() - fault_time(own):.1f} s")


@pytest.mark.campaign
def test_a_chief_that_is_lost_before_its_first_variable_is_no_difference_of_models(workers):
    workers += by_hand("kill_behind_the_other_at_balancer", "0", "silence_seconds=60")
    said, _ = workers[1].communicate(timeout=120)
    assert workers[1].returncode == 1
    assert re.search(r"worker 0 \(.*\) cannot be reached any more: see its output", said)


@pytest.mark.parametrize(
    ("fault", "victim"),
    [("sigterm_at_balancer", 1), *campaign(("sigterm_in_evaluation", 0), ("sigterm_twice", 1))],
)
def test_workers_leave_together_with_one_that_got_sigterm(workers, fault, victim):
    workers += by_hand(fault, str(victim))
    said = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [143, 143]
    for text in said:
        assert re.search(rf"worker {victim} \(.*\) got SIGTERM \(.*so that all workers leave", text)


@pytest.mark.campaign
@pytest.mark.parametrize("fault", ["kill_after_fit", "kill_after_training"])
def test_a_chief_that_is_lost_after_its_fit_is_named(workers, fault):
    workers += by_hand(fault, "0")
    said = workers[1].communicate(timeout=120)[0]
    assert workers[1].returncode == 1
    assert re.search(r"worker 0 \(.*\) cannot be reached any more: see its output", said)
