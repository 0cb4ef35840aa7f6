"""Neighbours of real workers: where they run, what they use, and that they end with the job.

What a neighbour gets of a busy machine is not known. Each test therefore waits until it has used
some CPU time, and checks that it has not used more than its schedule permits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from waits import until

from lbbsp_core.launch import Phase, launch, throttle
from lbbsp_core.launch.contention import own_cores

# Waits until its neighbours have used some CPU seconds each, and reports them. The first half may
# include their start.
WATCH = """
import json, os, sys, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def read(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as stream:
        return stream.read()
def mine(pid):
    try:
        return f"{os.environ['LBBSP_JOB']}/neighbour-{rank}-".encode() in read(pid, "cmdline")
    except OSError:
        return False
def used(pid):
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
def wait_for(seconds):
    found = []
    while len(found) < int(sys.argv[1]) or min(map(used, found)) < seconds:
        found = [pid for pid in os.listdir("/proc") if pid.isdigit() and mine(pid)]
        time.sleep(0.05)
    return found
found = wait_for(float(sys.argv[2]) / 2)
before, half = time.monotonic(), sum(map(used, found))
wait_for(float(sys.argv[2]))
print(json.dumps({
    "used": sum(map(used, found)) - half,
    "elapsed": time.monotonic() - before,
    "cores": [sorted(os.sched_getaffinity(int(pid))) for pid in ("0", *found)],
    "cgroups": [read(pid, "cgroup").decode() for pid in ("self", *found)],
    "threads": os.environ["OMP_NUM_THREADS"],
}), flush=True)
if len(sys.argv) > 3: os.kill(int(found[0]), 9)
while len(sys.argv) > 3: time.sleep(60)
"""
DRIVER = """
import sys
from lbbsp_core.launch import Phase, launch
launch([sys.argv[1], "2", "0.05", "wait"], workers=1, contention=[[Phase(1.0, (0.5, 0.5))]])
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Returns the script of a worker; folders of jobs are created below ``tmp_path``."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "watch.py").write_text(WATCH)
    return str(tmp_path / "watch.py")


def neighbours(folder: Path) -> list[int]:
    """Returns the neighbours whose schedules are in a folder."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in w and "neighbour-" in w for w in process.info["cmdline"] or [])
    ]


def reports_of(script: str, expected: int, seconds: float, **options) -> dict[int, dict]:
    lines: dict[int, str] = {}
    options = {"workers": 1, "output": lines.__setitem__, **options}
    assert launch([script, str(expected), str(seconds)], **options) == 0, lines
    return {rank: json.loads(line) for rank, line in lines.items()}


def test_a_neighbour_uses_what_is_asked_on_the_core_of_its_worker(script, tmp_path):
    schedules = [[Phase(0.05, (0.6,)), Phase(0.05, (0.2,))]]
    (report,) = reports_of(script, 1, 1.0, contention=schedules).values()
    core = own_cores(1) or sorted(os.sched_getaffinity(0))  # there is none in a quota below a core
    assert report["cores"] == [core, core]
    assert report["threads"] == "1"
    assert report["used"] <= 0.4 * report["elapsed"] + 0.15  # for a cycle and parts of phases
    assert not neighbours(tmp_path)


def test_neighbours_share_the_quota_of_their_worker(script, tmp_path):
    groups = throttle.open_quotas([min(0.5, throttle.available_cores())], 10_000)
    if groups is None:
        pytest.skip("the cpu cgroup controller is not writable here: CPU quotas cannot be tested")
    groups.close()
    workers = len(os.sched_getaffinity(0)) + 1
    reports = reports_of(script, 2, 0.05, workers=workers, contention=[[Phase(1.0, (0.5, 0.5))]])
    own = [report["cgroups"][0] for report in reports.values()]
    assert len(set(own)) == workers  # and equal quotas: speeds of 1 are implied
    assert [set(report["cgroups"]) for report in reports.values()] == [{group} for group in own]
    assert not neighbours(tmp_path)


def test_without_its_neighbour_the_job_ends(script, tmp_path, capfd):
    options = {"workers": 1, "contention": [[Phase(1.0, (0.5,))]]}
    assert launch([script, "1", "0.05", "kill"], **options) == 137
    assert "neighbour of worker 0 was ended by SIGKILL" in capfd.readouterr().err
    assert not neighbours(tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_neighbours_end_with_the_launcher(script, tmp_path, popen, signum):
    (tmp_path / "watch.py").write_text(WATCH.replace("os.kill(", "print("))
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    command = [sys.executable, tmp_path / "driver.py", script]
    launcher = popen(command, env={**os.environ, **environment})
    assert "used" in launcher.stdout.readline()
    assert len(neighbours(tmp_path)) == 2
    launcher.send_signal(signum)
    until(lambda: not neighbours(tmp_path))
