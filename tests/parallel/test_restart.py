"""Restarts by the launcher with real processes, which are small: none imports a framework."""

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from lbbsp_core.launch import launch
from lbbsp_core.launch import restart as restarts

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(60)

PREAMBLE = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank, workers = config["task"]["index"], len(config["cluster"]["worker"])
restart = int(os.environ["LBBSP_RESTART"])
folder = os.path.dirname(__file__)
def touch(name): open(f"{folder}/{name}-{restart}-{rank}", "w").close()
def wait_for(name, rank):
    while not os.path.exists(f"{folder}/{name}-{restart}-{rank}"): time.sleep(0.01)
print("started", workers, config["cluster"]["worker"][0])
"""
# As a training does: a worker that gets SIGTERM tells all, who write and leave at the same step.
LEAVES_IN_ORDER = """
def asked(*_):
    open(os.environ["LBBSP_MARKS"] + "/preempted", "w").close()  # as lbbsp's own handler does
    touch("stop")
signal.signal(signal.SIGTERM, asked)
touch("ready")
for other in range(workers): wait_for("ready", other)
if rank == 1 and restart == 0 and sys.argv[1:] == ["preempted"]: os.kill(os.getpid(), 15)
while not any(os.path.exists(f"{folder}/stop-{restart}-{r}") for r in range(workers)):
    time.sleep(0.01)
    if restart: sys.exit()
if rank == 0: time.sleep(1.5)  # the chief writes the checkpoint
print("written", rank)
touch("written")
sys.exit(143)
"""


@pytest.fixture
def script(tmp_path):
    """Returns a function that writes the script of a worker."""

    def write(body: str) -> str:
        (tmp_path / "worker.py").write_text(PREAMBLE + body)
        return str(tmp_path / "worker.py")

    yield write
    left = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(tmp_path) in word for word in process.info["cmdline"] or [])
    ]
    assert not left


def run(script: str, *args: str, workers: int, **options: object) -> tuple[int, dict, list[str]]:
    """Returns the status, the output by rank, and the clusters' first addresses."""
    lines: dict[int, list[str]] = defaultdict(list)
    status = launch(
        [script, *args],
        workers=workers,
        output=lambda rank, line: lines[rank].append(line),
        **options,
    )
    addresses = [line.split()[-1] for line in lines[0] if line.startswith("started")]
    return status, lines, addresses


def messages(capfd) -> list[str]:
    error = capfd.readouterr().err.splitlines()
    return [line.removeprefix("lbbsp launch: ") for line in error if line.startswith("lbbsp")]


def test_all_workers_start_again_on_new_ports(script, capfd, monkeypatch):
    monkeypatch.setattr(restarts, "QUICK_SECONDS", 0.0)
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher kills it, before the next attempt
touch("pid")
if restart: sys.exit()
if rank == 1:
    for other in 0, 2: wait_for("pid", other)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    status, lines, addresses = run(script(body), workers=3, max_restarts=2)
    assert status == 0
    assert len(set(addresses)) == 2, "two attempts, two clusters"
    assert all(len(lines[rank]) == 2 for rank in range(3))
    assert messages(capfd) == [
        "worker 1 was ended by SIGKILL",
        "restart 1 of 2 with 3 workers",
    ]


def test_survivors_continue_with_their_own_speeds(script, capfd):
    body = """
touch("ready")
for other in range(workers): wait_for("ready", other)
print("workers", workers)
if restart == 0 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
if restart == 1 and rank == 1: sys.exit(5)
if restart < 2: time.sleep(60)
"""
    status, lines, addresses = run(
        script(body),
        workers=3,
        max_restarts=2,
        elastic=1,
        speeds=[1, 0.5, 0.25],
        speeds_at=[(1.0, [0.5, 0.5, 0.5])],
    )
    assert status == 0
    assert [line for line in lines[0] if "workers" in line] == [f"workers {n}" for n in (3, 2, 1)]
    assert len(set(addresses)) == 3
    said = messages(capfd)
    assert "restart 1 of 2 with 2 workers, without worker 1 in 1 s" in said
    assert (
        "restart 2 of 2 with 1 worker, without worker 1 (worker 2 of the first attempt) in 2 s"
        in said
    )


def test_a_job_that_always_fails_ends_after_its_restarts(script, capfd):
    started = time.monotonic()
    status, lines, _ = run(script("sys.exit(3 + restart)"), workers=1, max_restarts=2)
    assert status == 5
    assert len(lines[0]) == 3
    assert time.monotonic() - started >= 1 + 2, "the pauses grow"
    assert messages(capfd)[-1].startswith("attempt 3 of 3 has failed, and no restart is left")


@pytest.mark.parametrize("elastic", [None, 1])
def test_a_preempted_job_writes_its_checkpoint_then_starts_again(script, capfd, elastic):
    status, lines, _ = run(
        script(LEAVES_IN_ORDER), "preempted", workers=2, max_restarts=1, elastic=elastic
    )
    assert status == 0
    assert [line for line in lines[0] if "written" in line] == ["written 0"]
    assert lines[1].count("written 1") == 1
    assert sum(line.startswith("started") for line in lines[1]) == (2 if elastic is None else 1)
    said = messages(capfd)
    assert said[0] == "worker 1 left with status 143, as the workers do after a SIGTERM; " + (
        "waiting up to 30 s until the script has ended (Ctrl-C ends it at once)"
    )
    with_whom = "2 workers" if elastic is None else "1 worker, without worker 1"
    assert said[-1].startswith(f"restart 1 of 1 with {with_whom} in")


def test_a_preempted_job_without_restarts_has_the_status_of_its_workers(script):
    status, lines, _ = run(script(LEAVES_IN_ORDER), "preempted", workers=2)
    assert status == 143
    assert "written 0" in lines[0]


def start(script: str, options: str, tmp_path: Path) -> subprocess.Popen:
    """Starts a launcher process of two workers, and waits until both are ready."""
    code = f"""
import sys
from lbbsp_core.launch import launch, supervise
supervise.TERM_SECONDS = 0.1  # the grace alone lets workers write
sys.exit(launch([{script!r}], workers=2, **{options}))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    end = time.monotonic() + 40
    while not all((tmp_path / f"ready-0-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    return process


def signalled(
    process: subprocess.Popen, *signals: int, timeout: float = 40
) -> tuple[int, list[str]]:
    """Sends signals to a launcher, one after the other; returns its status and its output."""
    for count, signum in enumerate(signals):
        if count:
            time.sleep(0.4)
        process.send_signal(signum)
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output.splitlines()


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([signal.SIGTERM, signal.SIGTERM], 143),  # a scheduler may repeat it
        ([signal.SIGINT], 130),
    ],
)
def test_a_signal_to_the_launcher_lets_all_workers_write_and_restarts_none(
    script, tmp_path, signals, status
):
    process = start(script(LEAVES_IN_ORDER), "{'max_restarts': 3}", tmp_path)
    ended, lines = signalled(process, *signals)
    assert ended == status
    assert sum("written" in line for line in lines) == 2
    assert not any("restart" in line for line in lines)
    assert lines[-1] == f"lbbsp launch: ended by {signals[0].name}"


def test_a_script_that_fails_while_it_leaves_is_named(script, capfd):
    body = LEAVES_IN_ORDER.replace("time.sleep(1.5)", "time.sleep(2), sys.exit(7)")
    status, _, _ = run(script(body), "preempted", workers=2)
    assert status == 143
    said = messages(capfd)[-1]
    assert said.endswith("after a SIGTERM (worker 0 failed with exit status 7)")


IGNORES = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
touch("ready")
time.sleep(60)
"""


def test_the_grace_is_limited_and_its_end_is_said(script, tmp_path):
    process = start(script(IGNORES), "{'grace': 1.5, 'max_restarts': 1}", tmp_path)
    status, lines = signalled(process, signal.SIGTERM)
    assert status == 143
    assert "(still running after 1.5 s, and now killed: 0, 1; raise --grace" in lines[-1]


def test_a_second_interrupt_ends_the_grace(script, tmp_path):
    process = start(script(IGNORES), "{'grace': 50}", tmp_path)
    status, _ = signalled(process, signal.SIGINT, signal.SIGINT, timeout=20)
    assert status == 130


WAITS_FOR_THE_START = """
if rank == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as TensorFlow does meanwhile
touch("ready")
time.sleep(2)
open(os.environ["LBBSP_MARKS"] + "/waiting", "w").close()
time.sleep(60)
"""


def test_a_script_that_waits_for_the_start_of_others_gets_no_grace(script, tmp_path):
    process = start(script(WAITS_FOR_THE_START), "{'grace': 50}", tmp_path)
    status, lines = signalled(process, signal.SIGINT, timeout=25)
    assert status == 130
    assert not any("still running" in line for line in lines)


def test_a_signal_during_the_pause_ends_the_job(script, tmp_path, monkeypatch):
    body = "touch('ready')\nfor other in range(2): wait_for('ready', other)\nsys.exit(1)"
    process = start(script(body), "{'max_restarts': 5}", tmp_path)
    for line in process.stdout:
        if "restart 3 of 5" in line:  # in 4 s
            break
    status, lines = signalled(process, signal.SIGTERM, timeout=20)
    assert status == 143
    assert not lines, "no attempt follows"
