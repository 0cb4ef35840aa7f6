"""Which processes a scheduler, a server or a worker takes for lost, and what they say."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest
from mxnet import MXNetError, profiler
from waits import until

import lbbsp_mx
from lbbsp_core.runtime.options import env
from lbbsp_core.runtime.reliability import marks
from lbbsp_core.runtime.reliability.liveness import Watch
from lbbsp_mx import compat, server
from lbbsp_mx.reliability import liveness
from lbbsp_mx.reliability.liveness import Nodes, NodesWatch, SchedulerWatch, node_names
from lbbsp_mx.store.native import Runtime, runtime

NAMES = node_names(workers=2, servers=1)
ONE = ("10.0.0.1", 1)
PEERS = {ONE, ("10.0.0.2", 2), ("10.0.0.3", 3)}
WORKER_1 = 11


@pytest.fixture(autouse=True)
def _cluster(in_cluster, monkeypatch):
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "10.0.0.9")
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", "99")


class Network:
    """What processes know of each other, set by the test."""

    def __init__(self, *, ready=True, answers=True, peers=PEERS):
        self.ready, self.answers = ready, answers
        self.silent, self.peers = set(), set(peers)

    def is_ready(self):
        return self.ready

    def has_heartbeat(self, node):
        return node not in self.silent


def nodes_watch(network, names=NAMES):
    return NodesWatch(lambda: network, lambda: set(network.peers), names, silence_seconds=10)


def scheduler_watch(network, explain=str, **options):
    return SchedulerWatch(lambda: network, lambda: network.answers, 10, explain, **options)


def looks(watch, seconds, pace=0.5):
    """Looks for some seconds; returns the reason to end, and after how long it was found."""
    for look in range(round(seconds / pace)):
        why = watch.check(pace)
        if why:
            return why, (look + 1) * pace
    return None


def play(watch, network, phases):
    """Plays phases: what changes, for how long, and when the watch then says what, if at all."""
    for changes, seconds, *expected in phases:
        vars(network).update(changes)
        found = looks(watch, seconds)
        if expected:
            said, at = expected
            assert found, "nothing was found"
            assert said in found[0]
            assert found[1] == at
        else:
            assert found is None


# --- the scheduler --------------------------------------------------------------------------------

SILENT = "has given no sign of life for 10 s"
WELL = ({}, 5)
STARTS = {"ready": False}
SOME = PEERS - {("10.0.0.2", 2)}


@pytest.mark.parametrize(
    "phases",
    [
        [({}, 20), ({"silent": {WORKER_1}}, 20, f"worker 1 {SILENT}", 10.5)],
        [({"silent": {WORKER_1}}, 20, f"worker 1 {SILENT}", 10.5)],
        [({"silent": {8}}, 20, f"server 0 {SILENT}", 10.5)],
        3 * [WELL, ({"silent": {WORKER_1}}, 5), ({"silent": set()}, 5)],
        [WELL, ({"peers": SOME}, 20), ({"silent": {WORKER_1}}, 20, "from 10.0.0.2 is gone", 3.5)],
        [({}, 20), ({"silent": set(NAMES), "peers": set()}, 20, SILENT, 10.5)],
        [
            ({}, 2),
            ({"silent": {9, WORKER_1}}, 60),
            ({"peers": SOME}, 60, "worker 0, worker 1 has ended", 0.5),
        ],
        [(STARTS, 5), ({"peers": SOME}, 5, "at 10.0.0.2 has ended be", 2)],
        [(STARTS | {"peers": {ONE, ("10.0.0.2", 100 + k)}}, 0.5) for k in range(20)]
        + [({"peers": {ONE}}, 20)],
    ],
    ids=["silent", "before its first heartbeat", "server", "speaks again", "closed connection",
         "all together", "without heartbeats", "ends before the start", "probes of a port"],
)  # fmt: skip
def test_the_scheduler_finds_who_is_lost(phases):
    """A closed connection shortens the wait, and is no proof alone; one that probes is none."""
    network = Network()
    play(nodes_watch(network), network, phases)


@pytest.mark.parametrize(("frozen", "rank"), [(13, 2), (8, None)])
def test_the_launcher_learns_which_worker_is_frozen(tmp_path, monkeypatch, frozen, rank):
    monkeypatch.setattr(env, "marks", lambda: tmp_path)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    names = node_names(workers=3, servers=1)
    network = Network(peers=PEERS | {("10.0.0.4", 4)})
    lost = {"silent": {frozen}}, 11, f"{names[frozen]} {SILENT}", 10.5
    play(nodes_watch(network, names), network, [WELL, lost])
    lost = marks.read_marks(tmp_path).lost
    assert (lost.rank if lost else None) == rank


def test_a_scheduler_that_was_suspended_suspects_no_worker():
    network = Network()
    watch = nodes_watch(network)
    play(watch, network, [WELL])
    network.silent = {8, 9, WORKER_1}
    assert watch.check(60.0) is None
    play(watch, network, [({"silent": set()}, 5)])


def test_the_scheduler_says_how_many_have_connected(capsys):
    network = Network(ready=False, peers=PEERS - {("10.0.0.3", 3)})
    play(nodes_watch(network), network, [({}, 31)])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "2 workers and 1 servers at 10.0.0.9:99: 2 of 3 processes have connected" in said[0]
    assert said[0].endswith("(10.0.0.1, 10.0.0.2)")


def test_workers_that_leave_as_they_are_asked_to_are_not_lost_but_one_that_freezes_is():
    network = Network()
    watch = nodes_watch(network)
    watch.leaving = True
    left = {"silent": {9}, "peers": SOME}, 60
    play(watch, network, [WELL, left, ({"silent": {9, WORKER_1}}, 20, "worker 0 has ended", 2)])


# --- workers and servers --------------------------------------------------------------------------

LOST = "the scheduler at 10.0.0.9:99 has"
QUIET = {"silent": {1}}


@pytest.mark.parametrize(
    "phases",
    [
        [WELL, (QUIET | {"answers": False}, 20, f"{LOST} ended; worker 1 is late", 2.5)],
        [(QUIET, 20, f"{LOST} given no sign of life for 10 s", 10.5)],
        [(QUIET | {"answers": None}, 20, f"{LOST} given no sign of life for 10 s", 10.5)],
        [(STARTS | {"answers": False}, 70, f"{LOST} not answered for 60 s", 60.5)],
        [(STARTS, 200)],
        [(STARTS, 5), ({"answers": False}, 10, f"{LOST} ended", 2)],
    ],
    ids=["ended", "silent", "unreachable", "never answers", "answers", "ended before the start"],
)
def test_others_find_that_the_scheduler_is_lost(phases):
    network = Network()
    watch = scheduler_watch(network, lambda: "worker 1 is late", answer_seconds=60)
    play(watch, network, phases)


def test_a_pause_of_the_scheduler_or_of_this_process_ends_nothing():
    network = Network()
    watch = scheduler_watch(network)
    play(watch, network, [(QUIET, 5)])
    assert watch.check(60.0) is None
    play(watch, network, [({"silent": set()}, 5), (QUIET, 5)])


def test_a_scheduler_that_has_not_started_is_waited_for_with_a_word(capsys):
    network = Network(ready=False, answers=False)
    play(scheduler_watch(network), network, [({}, 31), ({"answers": True}, 15)])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert said[1].endswith("it does not answer: it has not started, or has ended (see its output)")
    assert "it answers, and waits for others" in said[2]


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
        looked.append(process.check(0.5))
        store.stops = len(looked) < 20  # the transport
        return looked[-1]

    watch = Watch(look, process.name, pause_seconds=0, end=lambda *given: ended.append(given))
    watch.start()
    watch.join()
    said = "the scheduler at 10.0.0.9:99 has ended; its own output may say why"
    assert looked.count(said) > 10
    assert len(looked) == 20, "nothing ended before"
    assert ended == [(1, f"lbbsp: {said}; server 1 ends")]


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
    assert [node.has_heartbeat(1), node.has_heartbeat(1), node.is_ready()] == [True, False, True]
    library.sign = now
    assert [node.has_heartbeat(1), node.has_heartbeat(1)] == [True, False]


def test_the_transport_is_not_ready_before_it_knows_of_a_node(monkeypatch):
    library = Library(1.8e9)
    monkeypatch.setattr(liveness, "_LIB", library)
    node = Nodes(None)
    monkeypatch.setattr(library, "MXKVStoreGetNumDeadNode", lambda *_: 0)
    assert not node.is_ready()


@pytest.mark.parametrize(
    ("told", "heard", "is_stranger"),
    [
        *((10, 4, True), (64, 1000, True)),  # no greeting of the transport came back
        *((107, 110, True), (107, 166, False), (5000, 5000, False)),  # who said which process it is
    ],
)
def test_a_connection_that_only_greets_is_of_no_process_of_the_job(told, heard, is_stranger):
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.create_connection(port.getsockname()) as other,
        port.accept()[0] as connection,
    ):
        connection.sendall(bytes(told))
        other.sendall(bytes(heard))
        # The system counts the bytes a little later.
        until(lambda: liveness._is_stranger(connection.fileno()) == is_stranger)
        assert connection.send(b"more") == 4, "it is still open"


@pytest.mark.parametrize("text", ["4", "inf", "ten", "nan"])
def test_a_wrong_limit_is_refused(monkeypatch, text):
    monkeypatch.setenv("LBBSP_SILENCE_SECONDS", text)
    with pytest.raises(ValueError, match=r"LBBSP_SILENCE_SECONDS must be .* got"):
        lbbsp_mx.env.silence_seconds()


# --- MXNet's profiler, which aborts the process if it starts within a call of another thread ------


def test_compression_ends_the_board_which_then_blames_no_server():
    process, board = Runtime(), SimpleNamespace(explain=lambda: "a parameter server has not ...")
    process._exchange = SimpleNamespace(board=board, close=lambda: None)
    assert process._explain() == "a parameter server has not ..."
    process.compress()
    assert process._explain() == ""


def test_the_profiler_and_a_look_wait_for_each_other(monkeypatch):
    nodes, looked = Nodes(None), []

    def count(*_):
        looked.append(nodes.lock.locked())
        return 0

    monkeypatch.setattr(liveness, "_LIB", SimpleNamespace(MXKVStoreGetNumDeadNode=count))
    assert not nodes.is_ready()
    assert looked == [True]
    with runtime()._quiet(nodes):
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
