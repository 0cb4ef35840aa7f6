"""Heartbeats: who is found to be lost, what is said, and what ends a process."""

import threading
import time

import pytest

from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity
from lbbsp_core.runtime.reliability.heartbeat import (
    BEAT_SECONDS,
    WIDTH,
    Beat,
    Heartbeat,
    Loss,
    Reason,
)


class Rows:
    """Board in memory, with a view for each worker."""

    def __init__(self):
        self.rows = {}

    def of(self, rank):
        return _View(self.rows, rank)


class _View:
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
        self.board = Rows()
        self.activities = [CurrentActivity() for _ in range(3)]
        self.workers = [self.worker(rank) for rank in range(3)]
        self.alive = {0, 1, 2}

    def worker(self, rank, **options):
        return Heartbeat(
            self.board.of(rank), rank, 3, self.activities[rank], end=pytest.fail, **options
        )

    def run(self, seconds):
        """Lets the living workers beat; returns what each of them says first, by rank."""
        said = {}
        for _ in range(round(seconds / BEAT_SECONDS)):
            self.now += BEAT_SECONDS
            for rank in sorted(self.alive):
                self.workers[rank].post()
                self.workers[rank].read(BEAT_SECONDS)
                why = self.workers[rank].look(BEAT_SECONDS)
                if why is not None:
                    said.setdefault(rank, why)
        return said


def test_a_beat_fits_into_its_row():
    beat = Beat(7, Activity.WAITING, 41, 3, Loss(Reason.LEFT, 2, Activity.LEAVING, 40))
    assert Beat.of(beat.row()) == beat
    assert Beat(1 << 24, Activity.COMPUTING, (1 << 24) + 5).row()[:3] == [0, Activity.COMPUTING, 5]


def test_workers_that_beat_are_not_suspected(job):
    for rank, activity in enumerate(job.activities):
        activity.enter(Activity.COMPUTING, 10 + rank)
    assert job.run(100) == {}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_silent_worker_is_named_by_all_others_with_what_it_did_last(job, lost):
    for activity in job.activities:
        activity.enter(Activity.COMPUTING, 41)
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
    job.activities[asked].enter(Activity.OUTSIDE, 8)
    assert job.run(2) == {}
    job.workers[asked].leave()
    said = job.run(3)
    assert set(said) == {0, 1, 2}
    why = f"worker {asked} got SIGTERM (between steps, before step 8), so that all workers leave"
    assert set(said.values()) == {why}
    for worker in job.workers:
        worker._tell_and_end(1, why)
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
        assert worker.look(3600.0) is None


def test_time_without_readings_is_no_silence_of_the_others(job):
    job.run(5)
    job.workers[2].post()  # and reads only now, because another thread has kept it from running
    for _ in range(40):
        job.now += BEAT_SECONDS
        assert job.workers[0].look(0.0) is None
    job.workers[0].read(40 * BEAT_SECONDS)
    assert job.workers[0].look(0.0) is None


@pytest.mark.slow
def test_the_threads_beat_and_end_the_process_of_a_worker_that_has_lost_another():
    """Real threads and time; the board of worker 1 stops."""
    board, ended = Rows(), threading.Event()
    lasting, stopping = (
        Heartbeat(board.of(rank), rank, 2, CurrentActivity(), silence_seconds=3.0,
                  end=lambda *_, **__: ended.set())
        for rank in range(2)
    )  # fmt: skip
    lasting.start()
    stopping.start()
    assert not ended.wait(5.0)
    stopping.stop()
    assert ended.wait(60.0)
    assert lasting._loss.rank == 1


def test_a_worker_that_has_never_beaten_is_not_suspected(job):
    job.alive.remove(2)
    assert job.run(60) == {}


def test_others_that_wait_for_a_worker_that_has_never_beaten_say_so(job, capsys):
    job.alive.remove(2)
    job.activities[0].enter(Activity.MEETING, 0)
    assert job.run(65) == {}
    assert "worker 2 is before its first step; others have" in capsys.readouterr().err


def test_a_worker_that_leaves_while_others_wait_is_named(job):
    job.activities[0].enter(Activity.WAITING, 7)
    job.activities[1].enter(Activity.WAITING, 7)
    job.activities[2].enter(Activity.LEAVING, 6)
    assert job.run(4) == {}
    said = job.run(4)
    assert set(said) == {0, 1, 2}
    assert said[0] == (
        "worker 2 has left (at the end of its script, before step 6), and others wait for it"
    )


def test_a_worker_that_leaves_while_others_agree_on_something_is_named(job):
    job.activities[1].enter(Activity.LEAVING, 6)
    with job.activities[0].during(Activity.MEETING):
        assert set(job.run(8)) == {0, 1, 2}


def test_a_wait_that_ends_as_another_worker_leaves_is_no_loss(job):
    """Worker 1's last row, of a long wait, is still there when worker 2 already leaves."""
    job.activities[1].enter(Activity.WAITING, 7)
    assert job.run(8) == {}
    job.alive = {0, 2}
    job.activities[0].enter(Activity.OUTSIDE, 8)
    job.activities[2].enter(Activity.LEAVING, 8)
    assert job.run(9) == {}
    job.activities[1].enter(Activity.OUTSIDE, 8)
    job.alive = {0, 1, 2}
    assert job.run(60) == {}


def test_a_wait_that_goes_on_after_another_worker_has_left_is_in_vain_soon(job):
    job.activities[1].enter(Activity.WAITING, 7)
    assert job.run(60) == {}
    job.activities[2].enter(Activity.LEAVING, 7)
    assert job.run(4) == {}
    assert set(job.run(4)) == {0, 1, 2}


def test_sums_of_a_last_step_may_travel_for_a_while(job):
    """Worker 2 has made step 7, so that its gradients are there."""
    job.workers = [job.worker(rank, tail_seconds=60.0) for rank in range(3)]
    job.activities[1].enter(Activity.WAITING, 7)
    job.activities[2].enter(Activity.LEAVING, 8)
    assert job.run(50) == {}
    assert set(job.run(15)) == {0, 1, 2}


def test_collectives_between_steps_have_no_tail(job):
    job.workers = [job.worker(rank, tail_seconds=60.0) for rank in range(3)]
    job.activities[2].enter(Activity.LEAVING, 8)
    with job.activities[1].during(Activity.MEETING):
        assert set(job.run(8)) == {0, 1, 2}


def test_a_worker_that_leaves_a_loop_early_and_meets_the_others_elsewhere_is_named(job):
    """As with a checkpoint after a loop that one worker has left before the others."""
    job.workers = [job.worker(rank, apart_seconds=60.0) for rank in range(3)]
    job.activities[0].enter(Activity.WAITING, 7)
    job.activities[1].enter(Activity.WAITING, 7)
    job.activities[2].enter(Activity.MEETING, 7)
    assert job.run(55) == {}
    assert job.run(10)[1].startswith(
        "worker 2 has left (between steps, before step 7, waiting for the others), and others wait"
    )


def test_a_worker_that_has_made_the_step_may_meet_the_others_meanwhile(job):
    job.workers = [job.worker(rank, apart_seconds=60.0) for rank in range(3)]
    job.activities[0].enter(Activity.WAITING, 7)
    job.activities[1].enter(Activity.MEETING, 8)
    assert job.run(120) == {}


def test_a_plugin_says_what_to_do_about_a_worker_that_has_left(job):
    job.workers = [job.worker(rank, left_remedy="make as many steps") for rank in range(3)]
    job.activities[1].enter(Activity.WAITING, 7)
    job.activities[2].enter(Activity.LEAVING, 7)
    assert all(why.endswith("wait for it: make as many steps") for why in job.run(8).values())


def test_a_board_that_does_not_respond_ends_the_wait(job):
    job.run(5)
    assert [job.workers[1].look(2.0) for _ in range(4)] == [None] * 4
    assert job.workers[1].look(2.0) == "the store did not respond for 10 s"


def test_workers_that_evaluate_may_take_their_time_after_the_others_have_left(job):
    job.activities[0].enter(Activity.OUTSIDE, 7)
    job.activities[1].enter(Activity.LEAVING, 7)
    job.activities[2].enter(Activity.LEAVING, 7)
    assert job.run(600) == {}


def test_a_late_worker_is_reported_and_ends_nothing(job, capsys):
    job.activities[0].enter(Activity.WAITING, 41)
    job.activities[1].enter(Activity.COMPUTING, 41)
    job.activities[2].enter(Activity.WAITING, 41)
    assert job.run(130) == {}
    assert capsys.readouterr().err.splitlines() == [
        "lbbsp: worker 1 is in step 41; others have waited for it for 60 s",
        "lbbsp: worker 1 is in step 41; others have waited for it for 120 s",
    ]


def test_a_worker_that_has_trained_is_said_to_have(job, capsys):
    job.activities[0].enter(Activity.LEAVING, 41)
    job.activities[1].enter(Activity.TRAINED, 41)
    job.activities[2].enter(Activity.LEAVING, 41)
    assert job.run(70) == {}
    assert capsys.readouterr().err.splitlines() == [
        "lbbsp: worker 1 is after its training, before the end of its script; others have waited "
        "for it for 60 s",
    ]


def test_a_limit_ends_the_wait_for_a_late_worker(job):
    job.workers = [job.worker(rank, limit_seconds=20) for rank in range(3)]
    job.activities[0].enter(Activity.WAITING, 41)
    job.activities[1].enter(Activity.COMPUTING, 41)
    job.activities[2].enter(Activity.WAITING, 41)
    assert job.run(15) == {}
    said = job.run(7)
    assert said[2] == "others have waited for worker 1, which is in step 41, for 20 s"


def test_a_board_that_fails_does_not_end_the_beats(monkeypatch):
    monkeypatch.setattr("lbbsp_core.runtime.reliability.heartbeat.BEAT_SECONDS", 0.01)
    view, beaten = Rows().of(0), threading.Event()
    calls = iter([RuntimeError("the service is gone"), None])

    def post(row):
        error = next(calls, None)
        if error is not None:
            raise error
        beaten.set()

    view.post = post
    heartbeat = Heartbeat(view, 0, 2, CurrentActivity())
    heartbeat.start()
    assert beaten.wait(10)
    heartbeat.stop()


def test_posts_go_on_while_a_read_waits_for_the_board(monkeypatch):
    monkeypatch.setattr("lbbsp_core.runtime.reliability.heartbeat.BEAT_SECONDS", 0.01)
    view, release, posted = Rows().of(1), threading.Event(), threading.Semaphore(0)
    view.post = lambda row: posted.release()
    view.read = lambda rank: release.wait(60) and None
    heartbeat = Heartbeat(view, 1, 2, CurrentActivity(), end=pytest.fail)
    heartbeat.start()
    assert all(posted.acquire(timeout=10) for _ in range(5))
    heartbeat.stop()
    release.set()


def test_a_post_that_the_board_never_answers_ends_the_process(monkeypatch):
    monkeypatch.setattr("lbbsp_core.runtime.reliability.heartbeat.BEAT_SECONDS", 0.01)
    view, release, ended = Rows().of(1), threading.Event(), threading.Event()
    view.post = lambda row: release.wait(60)
    heartbeat = Heartbeat(
        view, 1, 2, CurrentActivity(), silence_seconds=0.5, end=lambda *_, **__: ended.set()
    )
    heartbeat.start()
    assert ended.wait(10)
    heartbeat.stop()
    release.set()


def test_the_thread_ends_the_process_and_says_why(monkeypatch):
    monkeypatch.setattr("lbbsp_core.runtime.reliability.heartbeat.BEAT_SECONDS", 0.01)
    board, ended = Rows(), threading.Event()
    board.of(0).post(Beat(1, loss=Loss(Reason.SILENT, 2, Activity.OUTSIDE, 9)).row())
    given = []

    def end(*arguments, linger_seconds):
        given.append((*arguments, linger_seconds))
        ended.set()

    Heartbeat(board.of(1), 1, 3, CurrentActivity(), names=["a:1", "b:1", "c:1"], end=end).start()
    assert ended.wait(10)
    says = "lbbsp: c:1 has given no sign of life for 10 s; with its last one it was between steps"
    assert given == [(1, f"{says}, before step 9; b:1 ends", 0)]
