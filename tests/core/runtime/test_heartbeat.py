"""Heartbeats: who is found to be lost, what is said, and what ends a process."""

import threading
import time

import pytest
from waits import HANG_SECONDS, until

from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity
from lbbsp_core.runtime.reliability.heartbeat import (
    BEAT_SECONDS,
    WIDTH,
    Beat,
    Heartbeat,
    Loss,
    Reason,
)


class View:
    """A worker's view of a board in memory."""

    holder = "the store"

    def __init__(self, rows, rank):
        self._rows, self._rank = rows, rank

    def post(self, row):
        assert len(row) == WIDTH
        assert all(0 <= value < 1 << 24 for value in row)
        self._rows[self._rank] = list(row)

    def read(self, rank):
        return self._rows.get(rank)


@pytest.fixture
def job(monkeypatch):
    """Three workers whose clock the test moves."""
    return Job(monkeypatch)


class Job:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.rows = {}
        self.activities = [CurrentActivity() for _ in range(3)]
        self.workers = [self.worker(rank) for rank in range(3)]
        self.alive = {0, 1, 2}

    def worker(self, rank, **options):
        view, activity = View(self.rows, rank), self.activities[rank]
        return Heartbeat(view, rank, 3, activity, end=pytest.fail, **options)

    def run(self, seconds):
        """Lets the living workers beat; returns what each of them says first, by rank."""
        said = {}
        for _ in range(round(seconds / BEAT_SECONDS)):
            self.now += BEAT_SECONDS
            for rank in sorted(self.alive):
                self.workers[rank].post()
                self.workers[rank].read(BEAT_SECONDS)
                why = self.workers[rank].check(BEAT_SECONDS)
                if why is not None:
                    said.setdefault(rank, why)
        return said


def test_a_beat_fits_into_its_row():
    beat = Beat(7, Activity.WAITING, 41, 3, Loss(Reason.LEFT, 2, Activity.LEAVING, 40))
    assert Beat.of(beat.row()) == beat
    assert Beat(1 << 24, Activity.COMPUTING, (1 << 24) + 5).row()[:3] == [0, Activity.COMPUTING, 5]


WAITING, COMPUTING, MEETING = Activity.WAITING, Activity.COMPUTING, Activity.MEETING
OUTSIDE, LEAVING, TRAINED = Activity.OUTSIDE, Activity.LEAVING, Activity.TRAINED
STAYS = "worker 2 has left (at the end of its script, before step {}), and others wait for it"


@pytest.mark.parametrize(
    ("times", "doing", "quiet_seconds", "why"),
    [
        ({}, {}, 100, None),
        ({}, {0: (COMPUTING, 10), 2: (COMPUTING, 12)}, 100, None),
        # Workers that evaluate may take their time after the others have left.
        ({}, {0: (OUTSIDE, 7), 2: (LEAVING, 7)}, 600, None),
        ({}, {0: (WAITING, 7), 2: (LEAVING, 6)}, 4, STAYS.format(6)),
        ({}, {1: (WAITING, 7), 2: (LEAVING, 7)}, 4, STAYS.format(7)),
        ({}, {0: (MEETING, 7), 2: (LEAVING, 6)}, 4, STAYS.format(6)),
        (
            {"left_remedy": "make as many steps", "tail_seconds": 60.0},
            {1: (WAITING, 7), 2: (LEAVING, 7)},
            4,
            STAYS.format(7) + ": make as many steps",
        ),
        # Worker 2 has made step 7, so that its gradients are there; their sums may still travel.
        ({"tail_seconds": 60.0}, {1: (WAITING, 7), 2: (LEAVING, 8)}, 57, STAYS.format(8)),
        # Collectives between steps have no tail.
        ({"tail_seconds": 60.0}, {1: (MEETING, 7), 2: (LEAVING, 8)}, 4, STAYS.format(8)),
        # A checkpoint, say, after a loop that one worker has left before the others.
        (
            {"apart_seconds": 60.0},
            {0: (WAITING, 7), 1: (WAITING, 7), 2: (MEETING, 7)},
            57,
            "worker 2 has left (between steps, before step 7, waiting for the others), and others "
            "wait for it",
        ),
        # The other one has made the step.
        ({"apart_seconds": 60.0}, {0: (WAITING, 7), 1: (MEETING, 8)}, 120, None),
        (
            {"limit_seconds": 20},
            {0: (WAITING, 41), 1: (COMPUTING, 41), 2: (WAITING, 41)},
            17,
            "others have waited for worker 1, which is in step 41, for 20 s",
        ),
    ],
)
def test_who_keeps_others_waiting_in_vain_is_named_by_all(job, times, doing, quiet_seconds, why):
    job.workers = [job.worker(rank, **times) for rank in range(3)]
    for rank, (activity, step) in doing.items():
        job.activities[rank].enter(activity, step)
    assert job.run(quiet_seconds) == {}
    if why is not None:
        assert job.run(6) == dict.fromkeys(range(3), why)


@pytest.mark.parametrize(
    ("alive", "doing", "said"),
    [
        ({0, 1}, {0: MEETING}, "worker 2 is before its first step"),
        (
            {0, 1, 2},
            {0: WAITING, 1: COMPUTING, 2: WAITING},
            "worker 1 is in step 41",
        ),
        (
            {0, 1, 2},
            {0: LEAVING, 1: TRAINED, 2: LEAVING},
            "worker 1 is after its training, before the end of its script",
        ),
    ],
)
def test_a_late_worker_is_reported_and_ends_nothing(job, capsys, alive, doing, said):
    job.alive = alive
    for activity in job.activities[:2]:
        activity.enter(OUTSIDE, 41)
    for rank, activity in doing.items():
        job.activities[rank].enter(activity, 41)
    assert job.run(130) == {}
    reports = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert reports == [
        f"lbbsp: {said}; others have waited for it for {seconds} s" for seconds in (60, 120)
    ]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_silent_worker_is_named_by_all_others_with_what_it_did_last(job, lost):
    for activity in job.activities:
        activity.enter(COMPUTING, 41)
    assert job.run(5) == {}
    job.alive.remove(lost)
    assert job.run(9) == {}
    said = job.run(3)
    assert set(said) == job.alive
    for why in said.values():
        silent = f"worker {lost} has given no sign of life for 10 s"
        assert why == f"{silent}; with its last one it was in step 41"


@pytest.mark.parametrize("asked", [0, 2])
def test_all_workers_leave_with_one_that_got_sigterm(job, asked):
    ends = []
    for worker in job.workers:
        worker._end = lambda status, why, **_: ends.append(status)
    job.activities[asked].enter(OUTSIDE, 8)
    assert job.run(2) == {}
    job.workers[asked].leave()
    said = job.run(3)
    assert set(said) == {0, 1, 2}
    why = f"worker {asked} got SIGTERM (between steps, before step 8), so that all workers leave"
    assert set(said.values()) == {why}
    for worker in job.workers:
        worker._report_and_end(1, why)
    assert ends == [143] * 3


def test_a_worker_that_has_left_in_order_may_be_silent(job):
    job.run(5)
    job.workers[0].forget(1)
    job.alive -= {1, 2}
    (why,) = job.run(15).values()
    assert why.startswith("worker 2 has given no sign of life")


def test_a_worker_that_was_suspended_does_not_suspect_the_others(job):
    job.run(5)
    job.now += 3600
    for worker in job.workers:
        worker.read(3600.0)
        assert worker.check(3600.0) is None


def test_time_without_readings_is_no_silence_of_the_others(job):
    job.run(5)
    job.workers[2].post()  # and reads only now, because another thread has kept it from running
    for _ in range(40):
        job.now += BEAT_SECONDS
        assert job.workers[0].check(0.0) is None
    job.workers[0].read(40 * BEAT_SECONDS)
    assert job.workers[0].check(0.0) is None


def test_a_wait_that_ends_as_another_worker_leaves_is_no_loss(job):
    """Worker 1's last row, of a long wait, is still there when worker 2 already leaves."""
    job.activities[1].enter(WAITING, 7)
    assert job.run(8) == {}
    job.alive = {0, 2}
    job.activities[0].enter(OUTSIDE, 8)
    job.activities[2].enter(LEAVING, 8)
    assert job.run(9) == {}
    job.activities[1].enter(OUTSIDE, 8)
    job.alive = {0, 1, 2}
    assert job.run(60) == {}


def test_a_wait_that_goes_on_after_another_worker_has_left_is_in_vain_soon(job):
    job.activities[1].enter(WAITING, 7)
    assert job.run(60) == {}
    job.activities[2].enter(LEAVING, 7)
    assert job.run(4) == {}
    assert set(job.run(4)) == {0, 1, 2}


def test_a_board_that_does_not_respond_ends_the_wait(job):
    job.run(5)
    assert [job.workers[1].check(2.0) for _ in range(4)] == [None] * 4
    assert job.workers[1].check(2.0) == "the store did not respond for 10 s"


@pytest.fixture
def short_beats(monkeypatch):
    monkeypatch.setattr("lbbsp_core.runtime.reliability.heartbeat.BEAT_SECONDS", 0.01)


def test_posts_go_on_while_a_read_waits_until_the_board_answers_none(short_beats):
    view, release, ended = View({}, 1), threading.Event(), threading.Event()
    posts, answered = [], 5

    def post(row):
        posts.append(row)
        assert len(posts) <= answered or release.wait(HANG_SECONDS)

    def end(*_, **__):
        ended.set()

    view.post = post
    view.read = lambda rank: release.wait(HANG_SECONDS) and None
    heartbeat = Heartbeat(view, 1, 2, CurrentActivity(), silence_seconds=HANG_SECONDS, end=end)
    heartbeat.start()
    until(lambda: len(posts) > answered)
    heartbeat.use_times(silence_seconds=0.1, limit_seconds=None)
    assert ended.wait(HANG_SECONDS)
    release.set()
    heartbeat.stop()


def test_no_thread_is_in_the_board_once_it_has_stopped(short_beats):
    view, reading, calls = View({}, 1), threading.Event(), []

    def read(rank):
        calls.append("begins")
        reading.set()
        until(heartbeat._watches[-1]._stopped.is_set)
        calls.append("ends")

    view.read = read
    heartbeat = Heartbeat(view, 1, 2, CurrentActivity(), end=pytest.fail)
    heartbeat.start()
    assert reading.wait(HANG_SECONDS)
    heartbeat.stop()
    assert calls == ["begins", "ends"]


def test_the_thread_ends_the_process_and_says_why(short_beats):
    rows, given = {}, []
    View(rows, 0).post(Beat(1, loss=Loss(Reason.SILENT, 2, OUTSIDE, 9)).row())

    def end(*arguments, linger_seconds):
        given.append((*arguments, linger_seconds))

    names = ["a:1", "b:1", "c:1"]
    heartbeat = Heartbeat(View(rows, 1), 1, 3, CurrentActivity(), names=names, end=end)
    heartbeat.start()
    until(lambda: given)
    heartbeat.stop()
    says = "lbbsp: c:1 has given no sign of life for 10 s; with its last one it was between steps"
    assert given == [(1, f"{says}, before step 9; b:1 ends", 0)]
