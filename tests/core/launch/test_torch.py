"""Workers of PyTorch: they get what torchrun would give them. No PyTorch is needed."""

import json
import socket

import pytest

from lbbsp_core.launch import devices, launch
from lbbsp_core.launch.cluster import cluster_variables, listening_port, require_free_ports
from lbbsp_core.launch.devices import VARIABLE
from lbbsp_core.launch.hosts import find_hosts

NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]

# Prints what a worker gets, and binds the port as the store of worker 0 does. In the first attempt,
# worker 2 fails when all have printed.
SCRIPT = f"""
import json, os, socket, sys, time
print(json.dumps([os.environ.get(name) for name in [*{NAMES}, {VARIABLE!r}]]), flush=True)
if os.environ["RANK"] == "0":
    socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
open(__file__ + os.environ["RANK"], "w").close()
if os.environ["RANK"] == "2" and os.environ["LBBSP_RESTART"] == "0":
    while not all(os.path.exists(__file__ + rank) for rank in "01"):
        time.sleep(0.01)
    sys.exit(1)
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Returns a function that launches the script, and returns the values of each worker."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.delenv(VARIABLE, raising=False)

    def start(**options):
        lines = []
        options = {"workers": 3, "framework": "torch", **options}
        take = lambda rank, line: lines.append((rank, json.loads(line)))  # noqa: E731
        assert launch([str(tmp_path / "script.py")], output=take, **options) == 0
        return lines

    return start


@pytest.mark.slow
def test_workers_of_one_machine_get_the_variables_of_torchrun(launched, monkeypatch):
    """Those of another job, as in a worker that torchrun has started, are replaced."""
    for name in NAMES:
        monkeypatch.setenv(name, "17")
    lines = launched(max_restarts=1, elastic=2)
    first = {rank: values for rank, values in reversed(lines) if values[1] == "3"}
    then = {rank: values for rank, values in lines if values[1] == "2"}
    assert [first[rank][:5] for rank in range(3)] == [
        [str(rank), "3", str(rank), "3", "127.0.0.1"] for rank in range(3)
    ]
    assert [then[rank][:5] for rank in range(2)] == [
        [str(rank), "2", str(rank), "2", "127.0.0.1"] for rank in range(2)
    ]
    for attempt in (first, then):
        assert len({values[5] for values in attempt.values()}) == 1
    assert int(first[0][5]) > 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, [None] * 3),  # a script takes the one of its LOCAL_RANK
        ({"devices": "0,1,0"}, ["0", "1", "0"]),
        ({"speeds": [1, 1, 1]}, ["-1"] * 3),
    ],
)
def test_workers_see_all_gpus_unless_they_are_divided(launched, monkeypatch, options, values):
    monkeypatch.setattr(devices, "count_gpus", lambda: 2)
    monkeypatch.setattr(devices, "gpu_uuids", list)
    lines = launched(max_restarts=1, **options)
    assert [dict(lines)[rank][-1] for rank in range(3)] == values


def test_a_local_rank_counts_the_workers_of_a_host():
    found = find_hosts("a,b,user@a,c", None, framework="torch", port=7000)
    workers = cluster_variables("torch", 4, hosts=found).workers
    assert [[own[name] for name in NAMES] for own in workers] == [
        ["0", "4", "0", "2", "a", "7000"],
        ["1", "4", "0", "1", "a", "7000"],
        ["2", "4", "1", "2", "a", "7000"],
        ["3", "4", "0", "1", "a", "7000"],
    ]


def test_only_worker_0_needs_the_port():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = find_hosts("a,b", None, framework="torch", port=port)
        job = cluster_variables("torch", 2, hosts=found)
        assert [listening_port(own) for own in job.workers] == [port, None]
        require_free_ports(job, 1)
        with pytest.raises(ValueError, match=f"port {port} of .* cannot be opened"):
            require_free_ports(job, 0)
