"""Restarts by the launcher with real processes, which are small: none imports a framework."""

import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from signal import SIGINT, SIGTERM

import psutil
import pytest
from waits import until

import lbbsp_core.launch
from lbbsp_core.launch import launch, restart, supervise

ROOT = Path(__file__).parents[2]
GRACE = 300.0  # only ends what hangs

PREAMBLE = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank, workers = config["task"]["index"], len(config["cluster"]["worker"])
restart = int(os.environ["LBBSP_RESTART"])
folder = os.path.dirname(__file__)
def touch(name): open(f"{folder}/{name}-{restart}-{rank}", "w").close()
def wait_for(name, rank):
    while not os.path.exists(f"{folder}/{name}-{restart}-{rank}"): time.sleep(0.01)
def meet():
    touch("ready")
    for other in range(workers): wait_for("ready", other)
def hang(): time.sleep(300)
print("started", workers, config["cluster"]["worker"][0])
"""
# As a training does: a worker that gets SIGTERM tells all, who write and leave at the same step.
LEAVES_IN_ORDER = """
def asked(*_):
    open(os.environ["LBBSP_MARKS"] + "/preempted", "w").close()  # as lbbsp's own handler does
    touch("stop")
signal.signal(signal.SIGTERM, asked)
meet()
if rank == 1 and restart == 0 and sys.argv[1:] == ["preempted"]: os.kill(os.getpid(), 15)
while not any(os.path.exists(f"{folder}/stop-{restart}-{r}") for r in range(workers)):
    time.sleep(0.01)
    if restart: sys.exit()
if rank == 0:  # the chief writes the checkpoint
    while not os.path.exists(f"{folder}/may-end"): time.sleep(0.01)
print("written", rank)
sys.exit(143)
"""
IGNORES = """
signal.signal(signal.SIGTERM, lambda *_: touch("stop"))
touch("ready")
hang()
"""
WAITS_FOR_THE_START = """
if rank == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as TensorFlow does meanwhile
open(os.environ["LBBSP_MARKS"] + "/waiting", "w").close()
touch("ready")
hang()
"""


@pytest.fixture
def script(tmp_path):
    """Returns a function that writes the script of a worker."""

    def write(body: str) -> str:
        (tmp_path / "worker.py").write_text(PREAMBLE + body)
        return str(tmp_path / "worker.py")

    yield write
    until(lambda: not left_over(tmp_path))


def left_over(tmp_path: Path) -> list[int]:
    """Returns the processes whose command lines name the folder of a test."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(tmp_path) in word for word in process.info["cmdline"] or [])
    ]


@pytest.fixture
def said(monkeypatch, tmp_path):
    """Messages of the launcher; attempts follow at once, and processes are killed early."""
    messages = []

    def notify(message):
        messages.append(message)
        if "waiting up to" in message:
            (tmp_path / "may-end").touch()

    monkeypatch.setattr(lbbsp_core.launch, "notify", notify)
    monkeypatch.setattr(restart, "MAX_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(supervise, "TERM_SECONDS", 0.1)
    monkeypatch.setattr(supervise, "NOTICE_SECONDS", 0.05)
    return messages


def run(script: str, *args: str, workers: int, **options: object) -> tuple[int, dict, list[str]]:
    """Returns the status, the output by rank, and the clusters' first addresses."""
    lines: dict[int, list[str]] = defaultdict(list)
    status = launch(
        [script, *args],
        workers=workers,
        grace=GRACE,
        output=lambda rank, line: lines[rank].append(line),
        **options,
    )
    addresses = [line.split()[-1] for line in lines[0] if line.startswith("started")]
    return status, lines, addresses


def test_all_workers_start_again_on_new_ports(script, said):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher kills it, before the next attempt
meet()
if restart: sys.exit()
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
hang()
"""
    status, lines, addresses = run(script(body), workers=3, max_restarts=2)
    assert status == 0
    assert len(set(addresses)) == 2, "two attempts, two clusters"
    assert all(len(lines[rank]) == 2 for rank in range(3))
    assert said == ["worker 1 was ended by SIGKILL", "restart 1 of 2 with 3 workers"]


def test_survivors_continue_with_their_own_speeds(script, said):
    body = """
print("workers", workers)
meet()
if restart == 0 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
if restart == 1 and rank == 1: sys.exit(5)
if restart < 2: hang()
"""
    status, lines, addresses = run(
        script(body),
        workers=3,
        max_restarts=2,
        elastic=1,
        speeds=[1, 0.5, 0.25],
        speeds_at=[(0.1, [0.5, 0.5, 0.5])],
    )
    assert status == 0
    assert [line for line in lines[0] if "workers" in line] == [f"workers {n}" for n in (3, 2, 1)]
    assert len(set(addresses)) == 3
    assert [line for line in said if "restart" in line] == [
        "restart 1 of 2 with 2 workers, without worker 1",
        "restart 2 of 2 with 1 worker, without worker 1 (worker 2 of the first attempt)",
    ]


def test_a_job_that_always_fails_ends_after_its_restarts(script, said):
    status, lines, _ = run(script("sys.exit(3 + restart)"), workers=1, max_restarts=2)
    assert status == 5
    assert len(lines[0]) == 3
    assert said[-1].startswith("attempt 3 of 3 has failed, and no restart is left")


@pytest.mark.parametrize("elastic", [None, 1])
def test_a_preempted_job_writes_its_checkpoint_then_starts_again(script, said, elastic):
    status, lines, _ = run(
        script(LEAVES_IN_ORDER), "preempted", workers=2, max_restarts=1, elastic=elastic
    )
    assert status == 0
    assert [line for line in lines[0] if "written" in line] == ["written 0"]
    assert lines[1].count("written 1") == 1
    assert sum(line.startswith("started") for line in lines[1]) == (2 if elastic is None else 1)
    assert said[0] == "worker 1 left with status 143, as the workers do after a SIGTERM; " + (
        "waiting up to 300 s until the script has ended (Ctrl-C ends it at once)"
    )
    with_whom = "2 workers" if elastic is None else "1 worker, without worker 1"
    assert said[-1] == f"restart 1 of 1 with {with_whom}"


def test_a_script_that_fails_while_it_leaves_is_named(script, said):
    body = LEAVES_IN_ORDER.replace("sys.exit(143)", "sys.exit(143 if rank else 7)")
    status, lines, _ = run(script(body), "preempted", workers=2)
    assert status == 143
    assert "written 0" in lines[0]
    assert said[-1].endswith("after a SIGTERM (worker 0 failed with exit status 7)")


@pytest.fixture
def start(script, tmp_path, popen):
    """Returns a function that starts a launcher of two workers, and waits until both are ready."""

    def start(body: str, **options: object) -> subprocess.Popen:
        code = f"""
import sys
from lbbsp_core.launch import launch, restart, supervise
supervise.TERM_SECONDS, supervise.NOTICE_SECONDS = 0.1, 0.05  # the grace alone lets workers write
restart.Attempt.pause_seconds = {GRACE}
sys.exit(launch([{script(body)!r}], workers=2, **{options}))
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = popen([sys.executable, "-c", code], env=environment)
        until(lambda: both_have(tmp_path, "ready") or process.poll() is not None)
        assert process.poll() is None
        return process

    return start


def both_have(tmp_path: Path, mark: str) -> bool:
    return all((tmp_path / f"{mark}-0-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize(
    ("body", "options", "signals", "says"),
    [
        # A scheduler may repeat a SIGTERM.
        (LEAVES_IN_ORDER, {"grace": GRACE, "max_restarts": 3}, [SIGTERM, SIGTERM], ""),
        (LEAVES_IN_ORDER, {"grace": GRACE, "max_restarts": 3}, [SIGINT], ""),
        (
            IGNORES,
            {"grace": 0.2, "max_restarts": 1},
            [SIGTERM],
            " (still running after 0.2 s, and now killed: 0, 1; raise --grace if a checkpoint needs"
            " more time)",
        ),
        (IGNORES, {"grace": GRACE}, [SIGINT, SIGINT], ""),
        (WAITS_FOR_THE_START, {"grace": GRACE}, [SIGINT], ""),
    ],
    ids=["repeated", "Ctrl-C", "the grace is limited", "a second Ctrl-C", "no grace at the start"],
)
def test_a_signal_to_the_launcher_lets_workers_write_and_restarts_none(
    start, tmp_path, body, options, signals, says
):
    process = start(body, **options)
    for number, signum in enumerate(signals):
        if number:
            # The first one has been handled. A worker may leave because the other one was asked.
            until(lambda: any(tmp_path.glob("stop-0-*")))
        process.send_signal(signum)
    if len(signals) > 1:
        time.sleep(0.5)  # a launcher that wrongly ends its workers does so before they may end
    (tmp_path / "may-end").touch()
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 128 + signals[0]
    assert sum("written" in line for line in lines) == (2 if body == LEAVES_IN_ORDER else 0)
    assert not any("restart" in line for line in lines)
    assert lines[-1] == f"lbbsp launch: ended by {signals[0].name}{says}"


def test_a_signal_during_the_pause_ends_the_job(start):
    process = start("meet()\nsys.exit(1)", max_restarts=5)
    for line in process.stdout:
        if line == f"lbbsp launch: restart 1 of 5 with 2 workers in {GRACE:g} s\n":
            break
    process.send_signal(SIGTERM)
    assert process.communicate()[0] == "", "no attempt follows"
    assert process.returncode == 143
