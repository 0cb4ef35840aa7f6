"""Meetings of doctors: messages, threads of this process on the loopback, and impostors."""

import json
import os
import platform
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("packaging")

from lbbsp_core.doctor import addresses, peers
from lbbsp_core.doctor.cluster import tf_cluster
from lbbsp_core.doctor.exchange import PINGS
from lbbsp_core.doctor.messages import MAX_BYTES, PING, Hello, Times, digest
from lbbsp_core.doctor.peers import check_peers
from lbbsp_core.doctor.scheduler import check_scheduler
from lbbsp_core.launch.cluster import free_ports

pytestmark = pytest.mark.slow

VERSIONS = {"lbbsp": "1.0", "Python": "3.11.7", "keras": "3.15"}


# messages


def test_messages_survive_the_way():
    hello = Hello("worker 1", digest(["a:1"]), VERSIONS)
    assert Hello.of(hello.line()) == hello
    assert Times.of(Times(1.5, 2.0).line()) == Times(1.5, 2.0)
    assert digest(["a:1", "b:2"]) != digest(["b:2", "a:1"])


def messages():
    names = st.sampled_from(["lbbsp_doctor", "task", "cluster", "versions", "sent", "received"])
    values = st.none() | st.floats() | st.integers() | st.text(max_size=5)
    tree = st.recursive(values, lambda inner: st.dictionaries(names, inner), max_leaves=8)
    return st.binary(max_size=99) | tree.map(lambda value: json.dumps(value).encode())


@given(messages())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_line_is_a_message_or_an_error(line):
    for kind in (Hello, Times):
        with suppress(ValueError):
            assert isinstance(kind.of(line), kind)


@pytest.mark.parametrize(
    "values",
    [
        {"task": "x" * 65},
        {"task": "\x1b[31m"},
        {"versions": {str(i): "1" for i in range(17)}},
        {"versions": {"a": 1}},
        {"lbbsp_doctor": 2},
    ],
)
def test_texts_are_short_and_printable(values):
    good = json.loads(Hello("worker 0", "x", {}).line())
    with pytest.raises(ValueError, match=r"printable|versions|no message"):
        Hello.of(json.dumps({**good, **values}).encode())


@pytest.mark.parametrize("number", [b"Infinity", b"NaN", b"true", b"1" * 400, b"null"])
def test_long_messages_and_infinite_times_are_refused(number):
    with pytest.raises(ValueError, match=f"longer than {MAX_BYTES}"):
        Hello.of(b" " * MAX_BYTES + b"{}")
    with pytest.raises(ValueError, match="number of seconds"):
        Times.of(b'{"received": %s, "sent": 1}' % number)


# meetings


def cluster(ports, index):
    addresses = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": index}
    return tf_cluster(json.dumps({"cluster": {"worker": addresses}, "task": task}))


def at_once(functions):
    """Returns what functions return that run at the same time."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [each.result() for each in [pool.submit(function) for function in functions]]


def meet(*meetings, seconds=20.0):
    """Runs `check_peers` of several clusters and versions; returns what each has found."""
    return at_once(
        [lambda each=each: check_peers(each[0], seconds, versions=each[1]) for each in meetings]
    )


def problems(findings):
    return [finding for finding in findings if finding.status == "problem"]


def test_three_tasks_meet_both_ways():
    ports = free_ports(3)
    for findings in meet(*((cluster(ports, index), VERSIONS) for index in range(3))):
        assert [finding.status for finding in findings] == ["ok"] * 4
        assert sum("answers in" in finding.message for finding in findings) == 2
        assert sum("has reached 127.0.0.1:" in finding.message for finding in findings) == 2


def test_differences_of_versions_are_named():
    ports = free_ports(2)
    other = {"lbbsp": "1.1", "Python": "3.11.9", "mxnet": "1.9.1"}
    findings, _ = meet((cluster(ports, 0), VERSIONS), (cluster(ports, 1), other))
    [lbbsp] = problems(findings)
    assert lbbsp.message == "lbbsp 1.1, here 1.0: workers refuse to start"
    noted = [finding.message for finding in findings if finding.status == "note"]
    assert noted == [
        "keras is not installed, here 3.15: results may differ a little",
        "mxnet 1.9.1, here not: results may differ a little",
    ]


def test_differences_of_devices_and_drivers_are_named():
    ports = free_ports(2)
    gpu, cpu = ({**VERSIONS, "device": device} for device in ("GPU", "CPU"))
    drivers = [{**gpu, "NVIDIA driver": driver} for driver in ("570.86", "535.2")]
    findings, _ = meet((cluster(ports, 0), cpu), (cluster(ports, 1), drivers[0]))
    [found] = findings[2:]
    assert (found.check, found.status) == ("device of worker 1", "problem")
    assert found.message.startswith("is a GPU, here it is a CPU: TensorFlow's collectives need")
    assert found.remedy.startswith("set CUDA_VISIBLE_DEVICES=-1 for all workers")
    findings, _ = meet((cluster(ports, 0), drivers[0]), (cluster(ports, 1), drivers[1]))
    [found] = findings[2:]
    assert found.status == "note"
    assert found.message == "NVIDIA driver 535.2, here 570.86: results may differ a little"
    for other in (VERSIONS, gpu):  # nothing is known of the other one
        assert len(meet((cluster(ports, 0), drivers[0]), (cluster(ports, 1), other))[0]) == 2


@pytest.mark.parametrize(
    ("gpus", "visible", "package", "device"),
    [(2, None, None, "GPU"), (0, None, None, "CPU"), (2, "-1", None, "CPU"),
     (2, "1", None, "GPU"), (2, None, "2.21.0", "CPU")],
)  # fmt: skip
def test_the_device_is_known_without_tensorflow(monkeypatch, gpus, visible, package, device):
    monkeypatch.setattr(peers, "count_gpus", lambda: gpus)
    monkeypatch.setattr(peers, "installed_version", {"tensorflow-cpu": package}.get)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert peers.own_device() == device


@pytest.mark.parametrize("kind", ["worker", "ps"])
def test_devices_are_compared_unless_there_are_parameter_servers(monkeypatch, kind):
    told = []
    monkeypatch.setattr(peers, "own_device", lambda: "GPU")
    monkeypatch.setattr(peers, "driver_version", lambda: "570.86")
    monkeypatch.setattr(peers, "Exchange", lambda own, *_: told.append(own) or SimpleNamespace(
        run=lambda: None))  # fmt: skip
    tasks = {"chief": ["127.0.0.1:1111"], kind: ["127.0.0.1:2222"]}
    task = {"type": "chief", "index": 0}
    check_peers(tf_cluster(json.dumps({"cluster": tasks, "task": task})), 1.0)
    [hello] = told
    assert hello.versions["NVIDIA driver"] == "570.86"
    assert hello.versions.get("device") == (None if kind == "ps" else "GPU")
    assert Hello.of(hello.line()) == hello


def test_another_cluster_at_the_same_address_is_a_problem_and_learns_no_versions():
    ports = free_ports(3)
    mine, theirs = cluster(ports[:2], 0), cluster([ports[2], ports[1]], 1)
    findings, _ = meet((mine, VERSIONS), (theirs, VERSIONS), seconds=2.0)
    assert "is another one than that" in " ".join(each.message for each in problems(findings))
    with listening_pair(ports[:2]) as exchanged:
        exchanged.sendall(Hello("worker 1", "another", {}).line())
        assert json.loads(exchanged.makefile("rb").readline())["versions"] == {}


@contextmanager
def listening_pair(ports):
    """Connects to a doctor that waits for a task which never comes."""
    waiting = threading.Thread(target=check_peers, args=(cluster(ports, 0), 2.0))
    waiting.start()
    for _ in range(100):
        try:
            connected = socket.create_connection(("127.0.0.1", ports[0]), timeout=5)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    with connected:
        yield connected
    waiting.join()


def test_what_follows_the_last_question_is_not_collected():
    ports = free_ports(2)
    with listening_pair(ports) as connected:
        lines = connected.makefile("rb")
        connected.sendall(Hello("worker 1", "another", {}).line() + PINGS * PING)
        assert all(lines.readline() for _ in range(1 + PINGS))
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            connected.sendall(bytes(64 << 20))


def listening():
    """Addresses on which this process listens."""
    return {
        tuple(each.laddr)
        for each in psutil.net_connections("tcp")
        if each.pid == os.getpid() and each.status == psutil.CONN_LISTEN
    }


def test_it_listens_on_its_own_address_and_only_until_it_ends():
    ports, before = free_ports(2), listening()
    with listening_pair(ports):
        assert listening() - before == {("127.0.0.1", ports[0])}
    assert listening() == before


def test_a_machine_whose_own_name_is_of_the_loopback_is_reached(monkeypatch):
    # As if 127.0.0.2 and 127.0.0.3 were addresses of two machines.
    monkeypatch.setattr(addresses, "is_loopback", lambda number: number == "127.0.1.1")
    ports = free_ports(2)
    workers = {"worker": [f"debian:{ports[0]}", f"other:{ports[1]}"]}
    names = [
        {"debian": ["127.0.1.1"], "other": ["127.0.0.2"]},
        {"debian": ["127.0.0.3"], "other": ["127.0.0.2"]},
    ]
    each = [{"cluster": workers, "task": {"type": "worker", "index": index}} for index in (0, 1)]

    def check(index):
        own = tf_cluster(json.dumps(each[index]))
        return check_peers(own, 10.0, versions=VERSIONS, resolve=lambda _: names[index])

    for findings in at_once([lambda index=index: check(index) for index in (0, 1)]):
        assert [finding.status for finding in findings] == ["ok", "ok"], findings


def test_a_task_that_does_not_run_is_named_in_both_directions():
    there, back = check_peers(cluster(free_ports(2), 0), 0.5, versions=VERSIONS)
    assert "worker 1 does not answer: connection refused (for 0.5 s)" in there.message
    assert "start `lbbsp doctor --peers` as worker 1" in there.remedy
    assert "worker 1 has not reached 127.0.0.1:" in back.message
    assert "admit its host to port" in back.remedy


@contextmanager
def impostor(answer):
    """Serves `answer(connection)` on a port of the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda connection: None, "accepts connections there, and closes them|reset by peer"),
        (lambda connection: connection.sendall(b"HTTP/1.1 400\r\n"), "no message of lbbsp doctor"),
        (lambda connection: connection.sendall(b"x" * 100_000), "longer than|limit|reset"),
        (
            lambda connection: connection.sendall(Hello("worker 7", "", {}).line()),
            "worker 7 answers there, instead of worker 1",
        ),
    ],
)
def test_something_else_at_the_address_of_a_task_is_a_problem(answer, reason):
    with impostor(answer) as port:
        there, _ = check_peers(cluster([*free_ports(1), port], 0), 0.7, versions=VERSIONS)
    assert there.status == "problem"
    assert re.search(reason, there.message.lower()), there.message
    assert "end what runs at port" in there.remedy


def test_a_clock_that_is_wrong_is_noted():
    def late(connection):
        lines = connection.makefile("rb")
        hello = Hello.of(lines.readline())
        connection.sendall(hello._replace(task="worker 1").line())
        while lines.readline() == PING:
            now = time.time() + 100
            connection.sendall(Times(now, now).line())

    with impostor(late) as port:
        findings = check_peers(cluster([*free_ports(1), port], 0), 2.0, versions=VERSIONS)
    [clock] = [finding for finding in findings if finding.status == "note"]
    assert clock.check == "clock of worker 1"
    assert "differs by +100.0 s" in clock.message
    assert "100.0" in findings[0].message


def test_a_port_in_use_is_a_problem():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = [server.getsockname()[1], *free_ports(1)]
        [found] = check_peers(cluster(ports, 0), 5.0, versions=VERSIONS)
    assert "cannot listen on 127.0.0.1:" in found.message
    assert "in use" in found.message


def dmlc(role, port):
    return {"DMLC_ROLE": role, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}  # fmt: skip


def test_processes_of_mxnet_meet_at_the_scheduler(monkeypatch):
    [port] = free_ports(1)
    names = iter(["a", "b"])
    monkeypatch.setattr(platform, "node", lambda: next(names))
    roles = ("scheduler", "worker", "server")
    at_scheduler, *others = at_once(
        [lambda role=role: check_scheduler(dmlc(role, port), 20.0, versions={}) for role in roles]
    )
    assert [finding.status for finding in at_scheduler] == ["ok"]
    assert "2 of 2 processes have reached 127.0.0.1:" in at_scheduler[0].message
    for findings in others:
        assert [finding.status for finding in findings] == ["ok"]
        assert "answers in" in findings[0].message


def test_a_scheduler_that_is_not_reached_or_not_there_is_a_problem():
    [port] = free_ports(1)
    [found] = check_scheduler(dmlc("scheduler", port), 0.3, versions={})
    assert "0 of 2 processes have reached" in found.message
    assert "for each worker and server" in found.remedy
    [found] = check_scheduler(dmlc("worker", port), 0.3, versions={})
    assert "scheduler does not answer: connection refused" in found.message
