"""A link between two machines is cut; two network namespaces stand for the machines."""

import json
import os
import re
import sys
from importlib.util import find_spec

import pytest
from jobs import SCRIPTS
from namespaces import namespaces

ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = 20_000  # in a new namespace all ports are free
pytestmark = pytest.mark.campaign


@pytest.fixture
def machines():
    """Names of two namespaces that a link connects."""
    with namespaces(*ADDRESSES) as names:
        yield names


@pytest.fixture
def start(popen, tmp_path):
    """Returns a function that starts a program of Python on a machine."""

    def start(machine, command, variables):
        variables = {**os.environ, "FAULT_MARK": str(tmp_path / "fault"), **variables}
        return popen(["ip", "netns", "exec", machine, sys.executable, *command], env=variables)

    return start


def test_keras_workers_name_each_other(machines, start):
    workers, processes = [f"{address}:{PORT}" for address in ADDRESSES], []
    for rank, machine in enumerate(machines):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        variables = {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "2"}
        processes.append(start(machine, [SCRIPTS / "faults.py", "cut", "1"], variables))
    chief, other = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [1, 1]
    assert re.search(r"worker 1 \(.*\) has given no sign of life", chief)
    assert re.search(r"worker 0 \(.*\) has given no sign of life", other)


@pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'")
def test_mxnet_processes_end_and_the_scheduler_names_the_worker(machines, start):
    cluster = {
        "DMLC_PS_ROOT_URI": ADDRESSES[0],
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "LBBSP_SILENCE_SECONDS": "30",
    }
    serve, train = ["-m", "lbbsp_mx.server"], [SCRIPTS / "mx_liveness.py", "sync", "cut", "1"]
    processes = []
    roles = [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
    for role, machine in roles:
        own = {**cluster, "DMLC_ROLE": role, "DMLC_NODE_HOST": ADDRESSES[machine]}
        command = train if role == "worker" else serve
        processes.append(start(machines[machine], command, own))
    scheduler, *_, cut_off = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 1 for process in processes)
    rank = re.search(r"RANK (\d)", cut_off)[1]  # MXNet assigns it
    assert f"worker {rank} has given no sign of life" in scheduler
    assert f"the scheduler at {ADDRESSES[0]}:{PORT} has given no sign of life" in cut_off
