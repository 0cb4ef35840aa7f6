"""A link between two machines is cut; two network namespaces stand for the machines."""

import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from jobs import SCRIPTS
from namespaces import namespaces

ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = 20_000  # in a new namespace all ports are free
pytestmark = pytest.mark.campaign
SECONDS = 240  # the time on an idle machine is in docs/reliability.md


@pytest.fixture
def machines():
    """Names of two namespaces that a link connects."""
    with namespaces(*ADDRESSES) as names:
        yield names


@pytest.fixture
def processes():
    """Ends what a test leaves."""
    started = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(machine: str, command: list[str], variables: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, sys.executable, *command],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(processes: list[subprocess.Popen]) -> list[str]:
    """Waits for the ends of all processes; returns what each has said."""
    said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    cut = float(re.search(r"FAULT ([\d.]+)", "".join(said))[1])
    print(f"all had ended {time.time() - cut:.1f} s after the cut")
    return said


def test_keras_workers_name_each_other(machines, processes):
    workers = [f"{address}:{PORT}" for address in ADDRESSES]
    for rank, machine in enumerate(machines):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        variables = {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "2"}
        processes.append(start(machine, [str(SCRIPTS / "faults.py"), "cut", "1"], variables))
    chief, other = outputs(processes)
    assert [process.returncode for process in processes] == [1, 1]
    assert re.search(r"worker 1 \(.*\) has given no sign of life", chief)
    assert re.search(r"worker 0 \(.*\) has given no sign of life", other)


@pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'")
def test_mxnet_processes_end_and_the_scheduler_names_the_worker(machines, processes):
    cluster = {
        "DMLC_PS_ROOT_URI": ADDRESSES[0],
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
    }
    serve, train = ["-m", "lbbsp_mx.server"], [str(SCRIPTS / "mx_liveness.py"), "sync", "cut", "1"]
    roles = [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
    for role, machine in roles:
        own = {**cluster, "DMLC_ROLE": role, "DMLC_NODE_HOST": ADDRESSES[machine]}
        command = train if role == "worker" else serve
        processes.append(start(machines[machine], command, own))
    scheduler, *_, cut_off = outputs(processes)
    assert all(process.returncode == 1 for process in processes)
    rank = re.search(r"RANK (\d)", cut_off)[1]  # MXNet assigns it
    assert f"worker {rank} has given no sign of life" in scheduler
    assert f"the scheduler at {ADDRESSES[0]}:{PORT} has given no sign of life" in cut_off
