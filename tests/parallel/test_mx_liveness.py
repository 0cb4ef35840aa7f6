"""Faults in MXNet jobs, by hand and launched: all processes end, and the cause is named.

How soon is told by `tests/mx/test_liveness.py`, look by look.
"""

import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from shutil import which
from typing import NamedTuple

import pytest
from jobs import campaign, chosen, needs_mxnet, run
from mx_cluster import by_hand
from waits import until

from lbbsp_core.launch.cluster import HOST

pytestmark = needs_mxnet
AT_ONCE = 3  # jobs, which mostly wait
PAUSE_SECONDS, SILENCE_SECONDS = 2, 30
GONE = "has ended without leaving the job"
SILENT = f"has given no sign of life for {SILENCE_SECONDS} s"
TWO_OF_THREE = "2 of 3 processes have connected"
SCHEDULER = f"the scheduler at {HOST}:"
UNHEARD = "worker 1 had not been heard of lately; it was "
LEFT = "worker {} has left (at the end of its script, before step {}), and others wait for it: let "
REMEDY = "all workers make the same number of steps, or call trainer.request_stop(), after which "


class Fault(NamedTuple):
    """What happens, and what the scheduler, and another worker, must say.

    The fault is one of the script, of the worker with this rank, or a signal from outside to the
    first process of this role. Only a process that is stopped counts as lost for its silence.
    """

    by_scheduler: str
    by_worker: str
    kind: str = "none"
    place: int | str = 1
    mode: str = "sync"
    set_back: bool = False  # the clock of the machine, by an hour


STOP, KILL = signal.SIGSTOP, signal.SIGKILL
FAULTS = {
    "raises": Fault(f"worker 1 {GONE}", UNHEARD, "raise"),
    "exits": Fault(GONE, LEFT.format(1, 20) + REMEDY, "exit0"),
    "exits at start": Fault(GONE, LEFT.format(1, 0) + REMEDY, "exit0_at_start"),
    "leaves": Fault(GONE, LEFT.format(0, 20) + REMEDY, "break", 0),
    "hangs": Fault(GONE, "others have waited for worker 1, which is in step 20, for 30 s", "hang"),
    "stop worker": Fault(f"worker 1 {SILENT}", UNHEARD, STOP, "worker"),
    "kill server": Fault(f"server 0 {GONE}", "a parameter server has not", KILL, "server"),
    "stop scheduler": Fault("", SILENT, STOP, "scheduler"),
    "async, stop server": Fault(f"server 0 {SILENT}", SCHEDULER, STOP, "server", "async"),
    "set back, stop worker": Fault(f"worker 1 {SILENT}", UNHEARD, STOP, "worker", set_back=True),
    "set back, kill worker": Fault(f"worker 1 {GONE}", UNHEARD, KILL, "worker", set_back=True),
    "set back, async, stop scheduler": Fault("", SILENT, STOP, "scheduler", "async", True),
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


def clock_of(folder):
    """Returns variables of processes whose clock the file "set back" sets back."""
    source, library = Path(folder, "clock.c"), Path(folder, "clock.so")
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library), "SET_BACK": str(Path(folder, "set back"))}


def after_fault(folder, fault):
    """Returns the cluster of a job in which something has happened, and all have ended."""
    is_own = isinstance(fault.place, int)
    own = (fault.kind, str(fault.place)) if is_own else ("outside", "-1")
    variables = clock_of(folder) if fault.set_back else {}
    if fault.kind == STOP:
        variables["LBBSP_SILENCE_SECONDS"] = str(SILENCE_SECONDS)
    with by_hand("mx_liveness.py", fault.mode, *own, **variables) as cluster:
        cluster.wait_for_ranks()
        if is_own:
            cluster.wait_for_ends()
        else:
            cluster.workers[0].wait_for("AT")
            Path(folder, "set back").touch()
            target = cluster.first(fault.place)
            target.send(fault.kind)
            cluster.wait_for_ends(target)
        return cluster


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """Clusters after faults, a few of which run at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            name: pool.submit(after_fault, tmp_path_factory.mktemp("job"), FAULTS[name])
            for name in chosen(request, "name")
        }


@pytest.mark.parametrize(
    "name",
    [
        "exits",
        *campaign(*(name for name in FAULTS if name != "exits" and "set back" not in name)),
        *campaign(*(name for name in FAULTS if "set back" in name and which("cc"))),
    ],
)
def test_all_processes_end_and_the_cause_is_named(jobs, name):
    cluster, fault = jobs[name].result(), FAULTS[name]
    assert fault.by_scheduler in cluster.scheduler.text
    others = [worker for rank, worker in enumerate(cluster.workers) if rank != fault.place]
    # Others may hear of worker 0's end before its own words reach them.
    said = [each.text for each in (cluster.workers if fault.place == 0 else others)]
    assert any(fault.by_worker in text for text in said)
    assert others[0].status == 1


@pytest.mark.campaign
def test_pauses_of_some_seconds_end_nothing(tmp_path):
    """Of one process after the other; they are on two servers, and do not end before."""
    may_end = tmp_path / "may end"
    options = {"servers": 2, "MAY_END": str(may_end)}
    with by_hand("mx_liveness.py", "sync", "none", "-1", **options) as cluster:
        cluster.wait_for_ranks()
        for role in ("worker", "server", "scheduler"):
            cluster.workers[0].wait_for("MORE")
            target = cluster.first(role)
            target.send(signal.SIGSTOP)
            time.sleep(PAUSE_SECONDS)
            target.send(signal.SIGCONT)
        may_end.touch()
        cluster.wait_for_ends()
    assert [each.status for each in cluster.processes] == [0] * 5
    assert all("RESULT steps 100" in each.text for each in cluster.workers)
    said = [line for each in cluster.processes for line in each.lines if "lbbsp: " in line]
    starting = "lbbsp: waiting for 2 workers and", "lbbsp: the scheduler has waited"
    assert not [line for line in said if not line.startswith(starting)]


def wait_until_others_wait(cluster):
    """Waits until all but the scheduler say that it waits for others, however late it starts."""
    for each in *cluster.servers, *cluster.workers:
        each.wait_for("lbbsp: ", "it answers, and waits for others")


@pytest.mark.campaign
def test_missing_processes_are_reported_and_one_that_fails_before_the_start_ends_all():
    with by_hand("mx_liveness.py", "sync", "none", "-1", workers=3, absent=1) as cluster:
        wait_until_others_wait(cluster)
        connected = "3 of 4 processes have connected (127.0.0.1)"
        said = cluster.scheduler.wait_for("lbbsp: ", connected)
        cluster.workers[1].kill()
        cluster.wait_for_ends()
    assert "for 3 workers and 1 servers at 127.0.0.1:" in said
    assert "a worker or server at 127.0.0.1 has ended before" in cluster.scheduler.text
    for each in cluster.workers[0], cluster.servers[0]:
        assert SCHEDULER in each.text
        assert each.status == 1


def stranger(cluster, text):
    """Connects to the scheduler as soon as it listens, and says something."""
    connection = socket.socket()
    until(lambda: not connection.connect_ex((HOST, cluster.port)))
    connection.sendall(text)
    return connection


@pytest.mark.campaign
def test_strangers_are_no_processes_of_the_job_and_one_that_ends_the_scheduler_ends_all():
    with (
        by_hand("mx_liveness.py", "sync", "none", "-1", absent=1) as cluster,
        ExitStack() as connections,
    ):
        wait_until_others_wait(cluster)
        cluster.scheduler.wait_for("lbbsp: ", TWO_OF_THREE)
        for text in b"", b"\x16\x03\x01", b"GET ":
            connections.enter_context(stranger(cluster, text))
        assert TWO_OF_THREE in cluster.scheduler.wait_for("lbbsp: ")
        connections.enter_context(stranger(cluster, b"\x01\x02\x03hello world" * 30))
        cluster.wait_for_ends()
        for each in *cluster.servers, *cluster.workers:
            assert f"{SCHEDULER}{cluster.port} has ended; its own output" in each.text
            assert each.status == 1


def greeted(cluster):
    """Connects to the scheduler, and completes the handshake of its transport (ZMTP 3.0)."""
    connection = stranger(cluster, b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(52, b"\0"))
    said = b"\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\3ps0"
    connection.sendall(bytes([4, len(said)]) + said)
    received = b""
    while b"ROUTER" not in received:
        received += connection.recv(128)
    return connection


@pytest.mark.campaign
def test_a_stranger_that_leaves_and_a_worker_too_many_stop_no_job():
    with by_hand("mx_liveness.py", "sync", "outside", "-1", absent=1) as cluster:
        cluster.scheduler.wait_for("lbbsp: ", TWO_OF_THREE)
        with greeted(cluster):
            assert TWO_OF_THREE in cluster.scheduler.wait_for("lbbsp: ")
        # The scheduler has looked several times meanwhile.
        assert TWO_OF_THREE in cluster.scheduler.wait_for("lbbsp: ")
        cluster.start_worker()
        for each in cluster.workers:
            each.wait_for("RANK")
        workers = [*cluster.workers]
        cluster.start_worker().wait_for("lbbsp: ", "the job has started without this process")
        for each in workers:
            each.wait_for("MORE")


@pytest.mark.parametrize(
    ("fault", "status", "culprit"),
    [
        ("freeze", 1, f"worker 1 {SILENT}"),
        *campaign(
            ("scheduler", 137, "scheduler was ended by SIGKILL"),
            ("exit0", 1, LEFT.format(1, 20)),
            ("kill", 137, "worker 1 was ended by SIGKILL"),
            ("server", 137, "server 0 was ended by SIGKILL"),
            ("raise", 1, "RuntimeError: the data base is gone"),
            ("exit3", 3, "worker 1 failed with exit status 3"),
        ),
    ],
)
def test_faults_end_launched_jobs(monkeypatch, fault, status, culprit, capsys):
    if fault == "freeze":
        monkeypatch.setenv("LBBSP_SILENCE_SECONDS", str(SILENCE_SECONDS))
    job = run("mx_liveness", "sync", fault, "1", workers=2, framework="mxnet")
    assert job.status == status
    assert culprit in job.text + capsys.readouterr().err
