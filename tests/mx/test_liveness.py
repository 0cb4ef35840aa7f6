"""Which processes a scheduler, a server or a worker takes for lost, and what they say."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

lbbsp_mx = pytest.importorskip("lbbsp_mx", exc_type=ImportError)

from mxnet import MXNetError, profiler  # noqa: E402
from waits import until  # noqa: E402

from lbbsp_core.runtime.options import env  # noqa: E402
from lbbsp_core.runtime.reliability import marks  # noqa: E402
from lbbsp_core.runtime.reliability.liveness import Watch  # noqa: E402
from lbbsp_mx import compat, server  # noqa: E402
from lbbsp_mx.reliability import liveness  # noqa: E402
from lbbsp_mx.reliability.liveness import Nodes, NodesWatch, SchedulerWatch, node_names  # noqa: E402
from lbbsp_mx.store.native import runtime  # noqa: E402

NAMES = node_names(workers=2, servers=1)
PEERS = {("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)}
WORKER_1 = 11


@pytest.fixture(autouse=True)
def _cluster(monkeypatch):
    described = {"ROLE": "worker", "PS_ROOT_URI": "10.0.0.9", "PS_ROOT_PORT": "99"}
    described |= {"NUM_WORKER": "2", "NUM_SERVER": "1"}
    for name, value in described.items():
        monkeypatch.setenv(f"DMLC_{name}", value)


class Network:
    """What processes know of each other, set by the test."""

    def __init__(self, *, ready=True):
        self.ready, self.silent, self.peers = ready, set(), set(PEERS)
        self.answers = True

    def is_ready(self):
        return self.ready

    def has_beaten(self, node):
        return node not in self.silent


def nodes_watch(network):
    return NodesWatch(lambda: network, lambda: set(network.peers), NAMES, silence_seconds=10)


def scheduler_watch(network, explain=str):
    return SchedulerWatch(lambda: network, lambda: network.answers, 10, explain)


def looks(watch, seconds, pace=0.5):
    """Looks for some seconds; returns the reason to end, and after how long it was found."""
    for look in range(round(seconds / pace)):
        why = watch.look(pace)
        if why:
            return why, (look + 1) * pace
    return None


# --- the scheduler --------------------------------------------------------------------------------


def test_a_silent_worker_is_lost_after_ten_seconds():
    network = Network()
    watch = nodes_watch(network)
    assert looks(watch, 20) is None
    network.silent = {WORKER_1}
    why, seconds = looks(watch, 20)
    assert why == "worker 1 has given no sign of life for 10 s"
    assert seconds == 10.5


@pytest.mark.parametrize(("frozen", "rank"), [(13, 2), (8, None)])
def test_the_launcher_learns_which_worker_is_frozen(tmp_path, monkeypatch, frozen, rank):
    monkeypatch.setattr(env, "marks", lambda: tmp_path)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    network, names = Network(), node_names(workers=3, servers=1)
    network.peers.add(("10.0.0.4", 4))
    watch = NodesWatch(lambda: network, lambda: network.peers, names, silence_seconds=10)
    assert looks(watch, 5) is None
    network.silent = {frozen}
    assert looks(watch, 11)[0] == f"{names[frozen]} has given no sign of life for 10 s"
    lost = marks.read_marks(tmp_path).lost
    assert (lost.rank if lost else None) == rank


def test_a_worker_that_speaks_again_is_not_lost():
    network = Network()
    watch = nodes_watch(network)
    for _ in range(6):
        assert looks(watch, 5) is None
        network.silent ^= {WORKER_1}


def test_a_closed_connection_shortens_the_wait_and_is_no_proof_alone():
    network = Network()
    watch = nodes_watch(network)
    assert looks(watch, 5) is None
    network.peers.discard(("10.0.0.2", 2))
    assert looks(watch, 20) is None
    network.silent = {WORKER_1}
    why, seconds = looks(watch, 20)
    assert "worker 1 has ended" in why
    assert "from 10.0.0.2 " in why
    assert seconds <= 4


def test_all_who_end_together_are_given_time_because_they_may_have_left_in_order():
    network = Network()
    watch = nodes_watch(network)
    assert looks(watch, 20) is None
    network.silent, network.peers = set(NAMES), set()
    why, seconds = looks(watch, 20)
    assert why.endswith("has given no sign of life for 10 s")
    assert seconds >= 10


def test_a_scheduler_that_was_suspended_suspects_no_worker():
    network = Network()
    watch = nodes_watch(network)
    assert looks(watch, 5) is None
    network.silent = {8, 9, 11}
    assert watch.look(60.0) is None
    network.silent = set()
    assert looks(watch, 5) is None


def test_workers_that_never_send_heartbeats_are_lost_only_with_their_connection():
    network = Network()
    watch = nodes_watch(network)
    assert looks(watch, 2) is None
    network.silent = {9, 11}
    assert looks(watch, 60) is None
    network.peers.pop()
    assert "worker 0, worker 1 has ended" in looks(watch, 60)[0]


def test_a_worker_that_freezes_before_its_first_heartbeat_is_lost_too():
    network = Network()
    watch = nodes_watch(network)
    network.silent = {WORKER_1}
    assert looks(watch, 20)[0].startswith("worker 1 ")


def test_a_server_is_lost_like_a_worker():
    network = Network()
    watch = nodes_watch(network)
    network.silent = {8}
    assert looks(watch, 20)[0].startswith("server 0 ")


def test_the_scheduler_says_how_many_have_connected(capsys):
    network = Network(ready=False)
    network.peers = {("10.0.0.1", 1), ("10.0.0.2", 2)}
    assert looks(nodes_watch(network), 31) is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "2 workers and 1 servers at 10.0.0.9:99: 2 of 3 processes have connected" in said[0]
    assert said[0].endswith("(10.0.0.1, 10.0.0.2)")


def test_a_process_that_ends_before_the_start_ends_the_job():
    network = Network(ready=False)
    watch = nodes_watch(network)
    assert looks(watch, 5) is None
    network.peers.discard(("10.0.0.3", 3))
    assert "at 10.0.0.3 has ended before" in looks(watch, 5)[0]


def test_a_connection_that_only_probes_the_port_counts_for_nothing():
    network = Network(ready=False)
    watch = nodes_watch(network)
    for port in range(20):
        network.peers = {("10.0.0.1", 1), ("10.0.0.2", 100 + port)}
        assert watch.look(0.5) is None
    network.peers = {("10.0.0.1", 1)}
    assert looks(watch, 20) is None


def test_workers_that_leave_as_they_are_asked_to_are_not_lost_but_one_that_freezes_is():
    network = Network()
    watch = nodes_watch(network)
    watch.leaving = True
    assert looks(watch, 5) is None
    network.silent = {9}
    network.peers.pop()
    assert looks(watch, 60) is None
    network.silent = {9, WORKER_1}
    assert looks(watch, 20) is not None


# --- workers and servers --------------------------------------------------------------------------


def test_a_scheduler_that_has_ended_is_seen_at_once():
    network = Network()
    watch = scheduler_watch(network, lambda: "worker 1 is late")
    assert looks(watch, 5) is None
    network.silent, network.answers = {1}, False
    why, seconds = looks(watch, 20)
    assert why == "the scheduler at 10.0.0.9:99 has ended; worker 1 is late"
    assert seconds == 2.5


class Store:
    """Store of a server, whose number MXNet does not tell any more while its transport stops."""

    handle, stops = None, False

    @property
    def rank(self):
        if self.stops:
            raise MXNetError("Check failed: ready_ == true")
        return 1


def test_a_server_that_stops_after_the_scheduler_has_left_is_not_alarmed(monkeypatch):
    monkeypatch.setenv("DMLC_ROLE", "server")
    network, store = Network(), Store()
    monkeypatch.setattr(liveness, "Nodes", lambda handle: network)
    monkeypatch.setattr(liveness, "is_listening", lambda: True)
    monkeypatch.setattr(liveness, "scheduler_answers", lambda: network.answers)
    monkeypatch.setattr(server.signal, "set_wakeup_fd", lambda writer: None)
    monkeypatch.setattr(server.signal, "signal", lambda *given: None)
    process = server._Process(store)
    assert looks(process, 5) is None
    network.silent, network.answers, store.stops = {1}, False, True
    ended, looked = [], []

    def look(_):
        looked.append(process.look(0.5))
        store.stops = len(looked) < 20  # the transport
        return looked[-1]

    watch = Watch(look, process.name, pause_seconds=0, end=lambda *given: ended.append(given))
    watch.start()
    watch.join()
    said = "the scheduler at 10.0.0.9:99 has ended; its own output may say why"
    assert looked.count(said) > 10
    assert len(looked) == 20, "nothing ended before"
    assert ended == [(1, f"lbbsp: {said}; server 1 ends")]


@pytest.mark.parametrize("answers", [True, None])
def test_a_scheduler_that_is_silent_but_may_run_is_lost_after_ten_seconds(answers):
    network = Network()
    watch = scheduler_watch(network)
    network.silent, network.answers = {1}, answers
    why, seconds = looks(watch, 20)
    assert why == "the scheduler at 10.0.0.9:99 has given no sign of life for 10 s"
    assert seconds == 10.5


def test_a_pause_of_the_scheduler_or_of_this_process_ends_nothing():
    network = Network()
    watch = scheduler_watch(network)
    network.silent = {1}
    assert looks(watch, 5) is None
    assert watch.look(60.0) is None
    network.silent = set()
    assert looks(watch, 5) is None
    network.silent = {1}
    assert looks(watch, 5) is None


def test_a_scheduler_that_has_not_started_is_waited_for_with_a_word(capsys):
    network = Network(ready=False)
    network.answers = False
    watch = scheduler_watch(network)
    assert looks(watch, 31) is None
    network.answers = True
    assert looks(watch, 15) is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert said[1].endswith("it does not answer: it has not started, or has ended (see its output)")
    assert "other processes have not connected" in said[2]


def test_a_scheduler_that_never_answers_is_lost_in_the_end_and_one_that_has_answered_is_not():
    network = Network(ready=False)
    network.answers = False
    watch = SchedulerWatch(lambda: network, lambda: network.answers, 10, answer_seconds=60)
    why, seconds = looks(watch, 70)
    assert why.startswith("the scheduler at 10.0.0.9:99 has not answered for 60 s")
    assert seconds == 60.5
    network.answers = True
    watch = SchedulerWatch(lambda: network, lambda: network.answers, 10, answer_seconds=60)
    assert looks(watch, 200) is None


def test_a_scheduler_that_ends_before_the_start_is_lost():
    network = Network(ready=False)
    watch = scheduler_watch(network)
    assert looks(watch, 10) is None
    network.answers = False
    assert "has ended" in looks(watch, 10)[0]


# --- the transport --------------------------------------------------------------------------------


class Library:
    """What ps-lite knows of one node: the time of day of its last sign, after a start at 1.8e9."""

    def __init__(self, now):
        self.now = self.sign = now
        setattr(self, liveness._SET, None)

    def MXKVStoreGetNumDeadNode(self, _handle, _node, count, seconds):  # noqa: N802
        count._obj.value = max(self.sign, 1.8e9) + seconds < self.now
        return 0

    def __getitem__(self, name):
        def call(*arguments):
            if name == liveness._SET:
                self.sign = arguments[-1].value

        return call


@pytest.mark.parametrize("now", [1.8e9, 1.8e9 - 86400, 1.8e9 + 86400])
def test_a_sign_of_life_counts_once_whatever_the_clock_says(monkeypatch, now):
    library = Library(1.8e9)
    monkeypatch.setattr(liveness, "_LIB", library)
    node = Nodes(None)
    library.now = now
    assert node.is_ready()
    assert [node.has_beaten(1), node.has_beaten(1), node.is_ready()] == [True, False, True]
    library.sign = now
    assert [node.has_beaten(1), node.has_beaten(1)] == [True, False]


def test_the_transport_is_not_ready_before_it_knows_of_a_node(monkeypatch):
    library = Library(1.8e9)
    monkeypatch.setattr(liveness, "_LIB", library)
    node = Nodes(None)
    monkeypatch.setattr(library, "MXKVStoreGetNumDeadNode", lambda *_: 0)
    assert not node.is_ready()


@pytest.mark.parametrize(
    ("told", "is_stranger"), [(10, True), (64, True), (110, False), (5000, False)]
)
def test_a_connection_to_which_only_a_greeting_went_is_of_no_process_of_the_job(told, is_stranger):
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.create_connection(port.getsockname()),
        port.accept()[0] as connection,
    ):
        connection.sendall(bytes(told))
        # The system acknowledges the bytes a little later.
        until(lambda: liveness._is_stranger(connection.fileno()) == is_stranger)
        assert connection.send(b"more") == 4, "it is still open"


@pytest.mark.parametrize("text", ["4", "inf", "ten", "nan"])
def test_a_wrong_limit_is_refused(monkeypatch, text):
    monkeypatch.setenv("LBBSP_SILENCE_SECONDS", text)
    with pytest.raises(ValueError, match=r"LBBSP_SILENCE_SECONDS must be .* got"):
        lbbsp_mx.env.silence_seconds()


# --- MXNet's profiler, which aborts the process if it starts within a call of another thread ------


def test_the_profiler_and_a_look_wait_for_each_other(monkeypatch):
    nodes, looked = Nodes(None), []

    def count(*_):
        looked.append(nodes.lock.locked())
        return 0

    monkeypatch.setattr(liveness, "_LIB", SimpleNamespace(MXKVStoreGetNumDeadNode=count))
    monkeypatch.setattr(runtime(), "_transport", nodes)
    assert not nodes.is_ready()
    assert looked == [True]
    with runtime()._quiet():
        assert nodes.lock.locked()


def test_a_watch_goes_on_while_the_profiler_of_the_servers_starts(monkeypatch):
    quiet, seen = threading.Lock(), []
    for name in ("set_state", "resume"):
        monkeypatch.setattr(profiler, name, lambda *_, **__: seen.append(quiet.locked()))
    compat.guard_profiler(lambda: quiet)
    profiler.set_state("run")
    profiler.set_state("run", "server")
    profiler.resume()
    profiler.resume(profile_process="server")
    assert seen == [True, False, True, False]
