"""Rows of heartbeats on keys of a synchronous store, here one in this process."""

import threading
from collections import Counter

import pytest

from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_core.runtime.reliability.heartbeat import Beat, Loss, Reason
from lbbsp_mx.reliability import board as boards
from lbbsp_mx.reliability.board import KeyBoard

WORKERS = 3


class Servers:
    """Keys that change when they have been pushed as often as there are workers."""

    def __init__(self):
        self.values, self.sums, self.pushes = {}, {}, Counter()


class Store:
    """What one worker sees of them."""

    def __init__(self, servers, rank):
        self._servers, self.rank = servers, rank
        self.arrays = []

    def init(self, keys, values):
        self._servers.values |= {key: value.copy() for key, value in zip(keys, values, strict=True)}

    def push(self, key, array):
        servers = self._servers
        assert all(array is not each for each in self.arrays), "MXNet writes into pushed arrays"
        self.arrays.append(array)
        servers.sums[key] = servers.sums.get(key, 0) + array
        servers.pushes[key] += 1
        if servers.pushes[key] % WORKERS == 0:
            servers.values[key] = servers.sums.pop(key)

    def pull(self, key, out):
        out[:] = self._servers.values[key]


@pytest.fixture
def clock(monkeypatch):
    """Time that only the test advances."""
    now = [100.0]
    monkeypatch.setattr(boards.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def board_of(clock):
    servers = Servers()
    made = [
        KeyBoard(Store(servers, rank), range(WORKERS), threading.Lock()) for rank in range(WORKERS)
    ]
    return made.__getitem__


def beat(number, activity=Activity.COMPUTING, step=7, loss=Loss()):  # noqa: B008
    return Beat(number, activity, step, 0, loss).row()


def test_each_worker_replaces_its_own_row_alone(board_of, clock):
    assert board_of(0).read(1) is None
    for number in (5, 1 << 23):
        clock[0] += 1
        board_of(1).post(beat(number))
        board_of(2).post(beat(number + 1))
        assert board_of(0).read(1) == beat(number)
        assert board_of(0).read(2) == beat(number + 1)
    assert board_of(1).read(0) is None


def test_rows_are_posted_at_intervals_and_important_ones_at_once(board_of, clock):
    lost = Loss(Reason.LEFT, 2)
    board_of(1).post(beat(1))
    for row, posted in (
        (beat(2), False),
        (beat(3, Activity.LEAVING), True),
        (beat(4, Activity.LEAVING), False),
        (beat(5, Activity.LEAVING, loss=lost), True),
    ):
        clock[0] += 0.01
        board_of(1).post(row)
        assert (board_of(0).read(1) == row) == posted
    clock[0] += 1
    board_of(1).post(beat(6))
    assert board_of(0).read(1) == beat(6)


def test_worker_0_tells_the_others_whose_row_is_old(board_of, clock):
    for seconds in range(6):
        clock[0] += 1
        for rank in range(WORKERS):
            if rank != 2 or seconds < 2:
                board_of(rank).post(beat(10 + seconds, step=seconds))
        board_of(0).read(1)
        board_of(0).read(2)
        board_of(1).read(0)
    for rank in (0, 1):
        text = "worker 2 had not been heard of lately; it was in step 1"
        assert board_of(rank).explain() == text


def test_a_silent_worker_0_is_found_by_the_others(board_of, clock):
    board_of(0).post(beat(1))
    for _ in range(5):
        clock[0] += 1
        board_of(1).read(0)
    assert board_of(1).explain().startswith("worker 0 had not")


def test_nothing_is_blamed_while_all_rows_change(board_of, clock):
    for number in range(1, 6):
        clock[0] += 1
        board_of(0).post(beat(number))
        board_of(1).post(beat(number))
        board_of(0).read(1)
        board_of(1).read(0)
    assert board_of(0).explain() == board_of(1).explain() == ""


def test_a_server_that_does_not_answer_is_blamed(board_of, clock):
    clock[0] += 4
    assert board_of(0).explain() == "a parameter server has not responded for 4 s"


def test_a_closed_board_does_not_use_the_store(board_of):
    board_of(1).post(beat(1))
    board_of(1).close()
    board_of(1).post(beat(2, Activity.LEAVING))
    assert board_of(1).read(1) is None
    assert board_of(0).read(1) == beat(1)
