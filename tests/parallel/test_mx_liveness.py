"""Faults in MXNet jobs, by hand and launched: all processes end, and the cause is named."""

import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import pytest
from jobs import BOUND_SECONDS, campaign, chosen, run
from mx_cluster import WAIT_SECONDS, by_hand

from lbbsp_core.launch.cluster import HOST

pytestmark = pytest.mark.skipif(
    find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'"
)
AT_ONCE = 3  # jobs, which mostly wait
SILENCE_SECONDS = 5
PAUSE_SECONDS = 5
GONE = "has ended without leaving the job"
SILENT = f"has given no sign of life for {SILENCE_SECONDS} s"
SCHEDULER = "the scheduler at 127.0.0.1:{port} "
UNHEARD = "worker 1 had not been heard of lately; it was {place} step"

OWN = {  # faults of worker 1 itself: what the scheduler, and worker 0, must say
    "raise": (f"worker 1 {GONE}", UNHEARD),
    "exit0": (GONE, "worker 1 has left (at the end of its script, before step 20)"),
    "exit0_at_start": (GONE, "worker 1 has left (at the end of its script, before step 0)"),
    "hang": (GONE, "others have waited for worker 1, which is in step 20, for 3 s"),
}
SENT = {  # signals from outside, and to whom
    "stop worker": (signal.SIGSTOP, "worker", f"worker 1 {SILENT}", UNHEARD),
    "kill server": (signal.SIGKILL, "server", f"server 0 {GONE}", "a parameter server has not"),
    "stop scheduler": (
        signal.SIGSTOP,
        "scheduler",
        "",
        SCHEDULER + SILENT,
    ),
    "async stop server": (signal.SIGSTOP, "server", f"server 0 {SILENT}", SCHEDULER),
    # After the clock of the machine has been set back by an hour.
    "set back, stop worker": (signal.SIGSTOP, "worker", f"worker 1 {SILENT}", UNHEARD),
    "set back, kill worker": (signal.SIGKILL, "worker", f"worker 1 {GONE}", UNHEARD),
    "set back, async stop scheduler": (signal.SIGSTOP, "scheduler", "", SCHEDULER + SILENT),
}
CLOCK = """
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (access(getenv("SET_BACK"), F_OK) == 0) now.tv_sec -= 3600;
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
"""


def own_fault(name):
    with by_hand("mx_liveness.py", "sync", name, "1") as cluster:
        cluster.wait_for_ranks()
        said = cluster.workers[1].wait_for("FAULT")
        limit = 3 if name == "hang" else 0
        return cluster, cluster.wait_for_ends() - float(said.split()[1]) - limit


def sent_fault(name):
    signum, role, *_ = SENT[name]
    mode = "async" if "async" in name else "sync"
    with TemporaryDirectory() as folder, by_hand(
        "mx_liveness.py", mode, "none", "-1", LBBSP_SILENCE_SECONDS=str(SILENCE_SECONDS),
        **(clock_of(folder) if "set back" in name else {}),
    ) as cluster:  # fmt: skip
        cluster.wait_for_ranks()
        cluster.workers[0].wait_for("AT")
        Path(folder, "set back").touch()
        target = cluster.first(role)
        sent = time.time()
        target.send(signum)
        return cluster, cluster.wait_for_ends(target) - sent


def clock_of(folder):
    """Returns variables of processes whose clock the file "set back" sets back."""
    source, library = Path(folder, "clock.c"), Path(folder, "clock.so")
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library), "SET_BACK": str(Path(folder, "set back"))}


def pauses():
    """Suspends one process after the other; they are on two servers."""
    with by_hand("mx_liveness.py", "sync", "none", "-1", servers=2) as cluster:
        cluster.wait_for_ranks()
        for role in ("worker", "server", "scheduler"):
            cluster.workers[0].wait_for("MORE")
            target = cluster.first(role)
            target.send(signal.SIGSTOP)
            time.sleep(PAUSE_SECONDS)
            target.send(signal.SIGCONT)
        cluster.wait_for_ends()
        return cluster


def waits_for_absent():
    """Starts without a worker; then another one is killed."""
    with by_hand("mx_liveness.py", "sync", "none", "-1", workers=3, absent=1) as cluster:
        for each in cluster.processes:
            each.wait_for("lbbsp: ")
        cluster.workers[1].kill()
        killed = time.time()
        return cluster, cluster.wait_for_ends() - killed


def stranger(cluster, text):
    """Connects to the scheduler as soon as it listens, says something, and stays for 3 s."""
    until = time.time() + WAIT_SECONDS
    with socket.socket() as connection:
        while connection.connect_ex((HOST, cluster.port)):
            assert time.time() < until, "the scheduler does not listen"
            time.sleep(0.02)
        connection.sendall(text)
        time.sleep(3)


def launched(fault):
    """Returns the status of a job whose worker 1 fails, and all that was printed."""
    job = run("mx_liveness", "sync", fault, "1", workers=2, framework="mxnet")
    ended = time.time()
    said = next(line for line in job.lines[1] if line.startswith("FAULT"))
    return job, ended - float(said.split()[1])


@pytest.fixture(scope="module")
def jobs(request):
    """Results of the jobs, a few of which run at a time."""
    kinds = {**dict.fromkeys(OWN, own_fault), **dict.fromkeys(SENT, sent_fault)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(kinds[name], name) for name in chosen(request, "name")}


@pytest.mark.parametrize(
    "name",
    [
        "exit0",
        "stop worker",
        "kill server",
        *campaign("hang", "raise", "exit0_at_start", "stop scheduler", "async stop server"),
        *campaign(*(name for name in SENT if "set back" in name and which("cc"))),
    ],
)
def test_all_processes_end_and_the_cause_is_named(jobs, name):
    cluster, seconds = jobs[name].result()
    print(f"{name}: all had ended {seconds:.1f} s after the fault")
    by_scheduler, by_worker = {**OWN, **SENT}[name][-2:]
    assert by_scheduler in cluster.scheduler.text
    places = "in", "at the end of"  # at the time of its last word
    expected = [by_worker.format(port=cluster.port, place=place) for place in places]
    assert any(words in cluster.workers[0].text for words in expected)
    assert cluster.workers[0].status == 1
    assert seconds < BOUND_SECONDS


@pytest.mark.campaign
def test_pauses_of_some_seconds_end_nothing():
    cluster = pauses()
    assert [each.status for each in cluster.processes] == [0] * 5
    assert all("RESULT steps 100" in each.text for each in cluster.workers)
    assert "lbbsp: " not in "".join(each.text for each in cluster.processes)


@pytest.mark.campaign
def test_missing_processes_are_reported_and_one_that_fails_before_the_start_ends_all():
    cluster, seconds = waits_for_absent()
    print(f"killed before the start: all had ended {seconds:.1f} s after the fault")
    assert seconds < BOUND_SECONDS
    assert "for 3 workers and 1 servers at 127.0.0.1:" in cluster.scheduler.lines[0]
    assert "3 of 4 processes have connected (127.0.0.1)" in cluster.scheduler.lines[0]
    assert "a worker or server at 127.0.0.1 has ended before" in cluster.scheduler.text
    for each in cluster.workers[0], cluster.servers[0]:
        assert "it answers, and other processes have not connected" in each.lines[0]
        assert "the scheduler at 127.0.0.1:" in each.text
        assert each.status == 1


@pytest.mark.campaign
def test_strangers_are_no_processes_of_the_job_and_one_that_ends_the_scheduler_ends_all():
    with by_hand("mx_liveness.py", "sync", "none", "-1", absent=1) as cluster:
        for each in cluster.processes:
            each.wait_for("lbbsp: ")
        for text in b"", b"\x16\x03\x01", b"GET ":
            stranger(cluster, text)
        assert "2 of 3 processes have connected" in cluster.scheduler.wait_for("lbbsp: ")
        stranger(cluster, b"\x01\x02\x03hello world" * 30)
        cluster.wait_for_ends()
        for each in *cluster.servers, *cluster.workers:
            assert f"{SCHEDULER.format(port=cluster.port)}has ended; its own output" in each.text
            assert each.status == 1


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [
        ("freeze", "worker 1 has given no sign of life for 10 s"),
        *campaign(("exit0", "worker 1 has left (at the end of its script, before step 20)")),
    ],
)
def test_faults_without_a_failing_status_end_launched_jobs(fault, culprit, capsys):
    job, seconds = launched(fault)
    print(f"launched {fault}: all had ended {seconds:.1f} s after the fault")
    assert seconds < BOUND_SECONDS
    assert job.status == 1
    assert culprit in job.text + capsys.readouterr().err
