"""Faults in MXNet jobs started by hand and by the launcher: all processes end, the cause is named."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from mx_cluster import by_hand

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'"),
]
AT_ONCE = 3  # jobs, which mostly wait
LEFT = "worker 1 has ended without leaving the job"
SILENT = "has given no sign of life for 10 s"
ENDED = "worker 1 gave no sign of life; it was"

OWN = {  # faults of worker 1 itself: what the scheduler, and worker 0, must say
    "raise": (LEFT, ENDED),
    "_exit0": (LEFT, ENDED),
    "exit0": ("worker 0 has ended", "worker 1 has left (at the end of its script, before step 20)"),
    "hang": ("ended without leaving", "others have waited for worker 1, which is in step 20"),
}
SENT = {  # signals from outside: to whom, by whom it is named, and how
    "kill worker": (signal.SIGKILL, "worker", LEFT, ENDED),
    "stop worker": (signal.SIGSTOP, "worker", f"worker 1 {SILENT}", ENDED),
    "kill server": (signal.SIGKILL, "server", "server 0 has ended", "a parameter server has not"),
    "stop server": (signal.SIGSTOP, "server", f"server 0 {SILENT}", "a parameter server has not"),
    "kill scheduler": (signal.SIGKILL, "scheduler", "", "the scheduler at 127.0.0.1:"),
    "stop scheduler": (signal.SIGSTOP, "scheduler", "", SILENT),
}
ASYNC = {f"async {name}": SENT[name] for name in ("kill worker", "stop worker", "stop server")}


def own_fault(name):
    with by_hand("mx_liveness.py", "sync", name, "1") as cluster:
        cluster.wait_for_ranks()
        said = cluster.workers[1].wait_for("FAULT")
        hung = [cluster.workers[1]] if name == "hang" else []
        ended = cluster.wait_for_ends()
        return cluster, ended - float(said.split()[1]) - (3 if hung else 0)


def sent_fault(name):
    signum, role, *_ = {**SENT, **ASYNC}[name]
    mode = "async" if name.startswith("async") else "sync"
    with by_hand("mx_liveness.py", mode, "none", "-1") as cluster:
        cluster.wait_for_ranks()
        cluster.workers[0].wait_for("AT")
        target = {
            "worker": cluster.workers[1],
            "server": cluster.servers[0],
            "scheduler": cluster.scheduler,
        }[role]
        sent = time.time()
        target.send(signum)
        return cluster, cluster.wait_for_ends(target) - sent


@pytest.fixture(scope="module")
def jobs():
    """The processes of each job after their end, and how long after the fault this was."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {name: pool.submit(own_fault, name) for name in OWN}
        found |= {name: pool.submit(sent_fault, name) for name in (*SENT, *ASYNC)}
        return found


@pytest.mark.parametrize("name", [*OWN, *SENT, *ASYNC])
def test_all_processes_end_and_name_the_cause(jobs, name):
    cluster, seconds = jobs[name].result()
    print(f"{name}: all had ended {seconds:.1f} s after the fault")
    _, _, by_scheduler, by_worker = {**SENT, **ASYNC}.get(name) or (None, None, *OWN[name])
    assert by_scheduler in cluster.scheduler.text
    if not (name.startswith("async") and "server" not in name):
        assert by_worker in cluster.workers[0].text
    assert seconds < 60
    assert cluster.workers[0].status == 1
