"""Heartbeats: every worker says regularly that it runs, and what it does.

They come from a thread, never from the progress of steps, so that a long compilation, a validation
or a slow step raises no suspicion. Beats travel over what the framework already runs, a `Board`.
Rank 0 reads the beats of all workers; the others read only that of rank 0, which names a worker
that is lost. So the traffic grows linearly with the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from lbbsp_core.runtime.options.defaults import SILENCE_SECONDS
from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity, describe
from lbbsp_core.runtime.reliability.exit import LEFT, end_now
from lbbsp_core.runtime.reliability.liveness import MAX_COUNTED_SECONDS, Watch, print_message
from lbbsp_core.runtime.reliability.marks import note_lost

BEAT_SECONDS: Final = 0.5  # between two beats
REPORT_SECONDS: Final = 60.0  # for which others wait for a worker before it is reported
_TELL_SECONDS: Final = 2.0  # in which the others read which worker is lost
_LEFT_SECONDS: Final = 5.0  # in which a message may still arrive from a worker that leaves
_STOP_SECONDS: Final = 5.0  # in which the board responds, or this process does not wait for it
_LEFT_BEATS: Final = 2  # beats a wait must last before it counts; a shorter one may be a stale row
WAITS: Final = (Activity.WAITING, Activity.MEETING)
_MODULUS: Final = 1 << 24  # float32 holds smaller integers exactly


class Reason(IntEnum):
    """Why a worker is lost."""

    NONE = 0
    SILENT = 1
    LEFT = 2
    LATE = 3
    PREEMPTED = 4


class Loss(NamedTuple):
    """Worker without which the others cannot proceed, and what it did last."""

    reason: int = Reason.NONE
    rank: int = 0
    activity: int = Activity.STARTING
    step: int = 0


class Beat(NamedTuple):
    """One sign of life of a worker."""

    number: int = 0
    activity: int = Activity.STARTING
    step: int = 0  # that is running or comes next
    seconds: int = 0  # for which the activity has lasted, rounded down
    loss: Loss = Loss()  # that rank 0 has found, or this worker, if it was asked to leave

    def row(self) -> list[int]:
        """Returns the beat as `WIDTH` integers in [0, 2^24)."""
        return [value % _MODULUS for value in (*self[:-1], *self.loss)]

    @classmethod
    def of(cls, row: Sequence[int]) -> Beat:
        """Returns the beat of a row."""
        number, activity, step, seconds, *loss = row
        return cls(number, activity, step, seconds, Loss(*loss))


WIDTH: Final = len(Beat().row())  # of a beat, in integers


class Board(Protocol):
    """Store of the framework that all workers share, with one row for each of them.

    Both methods may block for as long as the store does not respond.
    """

    @property
    def holder(self) -> int | str:
        """Worker that keeps the rows, or a name of what keeps them: "a parameter server"."""

    def post(self, row: Sequence[int]) -> None:
        """Replaces this worker's row of `WIDTH` integers in [0, 2^24)."""

    def read(self, rank: int) -> Sequence[int] | None:
        """Returns the row of a worker, or None if there is none, or it cannot be read now."""


@dataclass
class Times:
    """Times after which a worker is lost."""

    silence_seconds: float = SILENCE_SECONDS  # without a new beat
    limit_seconds: float | None = None  # for which others wait for it; None for ever
    # For which sums may still travel to a worker that waits in a step, after another worker has
    # completed this step and left:
    tail_seconds: float = _LEFT_SECONDS
    # For which one worker waits in a step, and another, which has not made it, between steps:
    apart_seconds: float = math.inf


class Beats:
    """Beats of workers as one of them sees them.

    Only time in which this worker was running counts: one that was suspended does not suspect the
    others. Workers are watched from their first beat on.
    """

    def __init__(self, ranks: Iterable[int], times: Times) -> None:
        self.beats: dict[int, Beat] = {}
        self.ranks = list(ranks)
        self._times = times
        self._quiet = dict.fromkeys(self.ranks, 0.0)  # seconds since the last new beat
        self._left: set[int] = set()
        self._unchanged = dict.fromkeys(self.ranks, 0)  # beats of a wait, while another one leaves

    def see(self, rank: int, beat: Beat) -> None:
        """Notes the latest beat of a worker; the same beat as before is no sign of life."""
        before = self.beats.get(rank)
        if beat != before:
            goes_on = before is not None and (
                (before.activity, before.step) == (beat.activity, beat.step)
                and before.seconds <= beat.seconds
            )
            lasts = goes_on and bool(self._doing(Activity.LEAVING))
            self._unchanged[rank] = self._unchanged[rank] + 1 if lasts else 0
            self.beats[rank], self._quiet[rank] = beat, 0.0

    def forget(self, rank: int) -> None:
        """Stops watching a worker that has left in order."""
        self._left.add(rank)

    def wait(self, seconds: float) -> None:
        """Counts seconds in which no worker was seen."""
        for rank in list(self.beats):  # which another thread adds to
            self._quiet[rank] += min(seconds, MAX_COUNTED_SECONDS)

    def loss(self) -> Loss:
        """Returns a worker that is lost, if any; the most certain reason comes first."""
        for rank, beat in list(self.beats.items()):
            if beat.loss.reason == Reason.PREEMPTED or (beat.loss.reason and rank == 0):
                return beat.loss
        for rank, seconds in self._quiet.items():
            if seconds > self._times.silence_seconds and rank not in self._left:
                return self.lost(rank, Reason.SILENT)
        for rank in (*self._left_behind(), *self._apart()):
            return self.lost(rank, Reason.LEFT)
        limit = self._times.limit_seconds
        if limit is not None and self.waited_seconds(*WAITS) >= limit:
            for rank in self.late():
                return self.lost(rank, Reason.LATE)
        return Loss()

    def lost(self, rank: int, reason: Reason) -> Loss:
        """Returns the loss of a worker, with what it did last."""
        beat = self.beats.get(rank, Beat())
        return Loss(reason, rank, beat.activity, beat.step)

    def waited_seconds(self, *activities: Activity) -> int:
        """Returns for how long a worker has been waiting for others; 0 if none is."""
        return max((self.beats[rank].seconds for rank in self._doing(*activities)), default=0)

    def late(self) -> list[int]:
        """Returns the workers that do not wait for others, so that others may wait for them."""
        late = Activity.STARTING, Activity.COMPUTING, Activity.OUTSIDE, Activity.TRAINED
        return [*self._doing(*late), *(rank for rank in self.ranks if rank not in self.beats)]

    def _left_behind(self) -> list[int]:
        """Returns the workers that leave although another one waits for them."""
        waiting = self._doing(*WAITS)
        return [
            rank
            for rank in self._doing(Activity.LEAVING)
            if any(self._waits_in_vain(waiter, rank) for waiter in waiting)
        ]

    def _waits_in_vain(self, waiting: int, leaving: int) -> bool:
        """Returns whether a worker can only be waiting for one that leaves.

        The last row of a wait that has ended may still be there when another worker leaves.
        """
        waits, leaves = self.beats[waiting], self.beats[leaving]
        is_tail = waits.activity == Activity.WAITING and leaves.step > waits.step
        limit = self._times.tail_seconds if is_tail else _LEFT_SECONDS
        lasts = self._unchanged[waiting] >= _LEFT_BEATS
        return lasts and min(waits.seconds, leaves.seconds) >= limit

    def _apart(self) -> list[int]:
        """Returns the workers that wait between steps, while others wait for them in a step."""
        limit = self._times.apart_seconds
        lasting = {rank: beat for rank, beat in sorted(self.beats.items()) if beat.seconds >= limit}
        waiting = (beat.step for beat in lasting.values() if beat.activity == Activity.WAITING)
        latest = max(waiting, default=-1)
        return [
            rank
            for rank, beat in lasting.items()
            if beat.activity == Activity.MEETING and beat.step <= latest
        ]

    def _doing(self, *activities: Activity) -> list[int]:
        beats = list(self.beats.items())
        return [rank for rank, beat in beats if beat.activity in activities]


class Heartbeat:
    """Threads that post this worker's beats, and end the process if a worker is lost.

    `times` are those of `Times`. The message about a worker that leaves while others wait for it
    ends with `left_remedy`.
    """

    # One thread posts and one reads; they may have to wait for the board, or for another thread
    # that keeps the interpreter busy. A third one, which never waits, reads the clock and decides.
    # A board that fails is one that does not respond.

    def __init__(
        self,
        board: Board,
        rank: int,
        workers: int,
        activity: CurrentActivity,
        *,
        names: Sequence[str] | None = None,
        left_remedy: str = "",
        end: Callable[..., object] = end_now,
        **times: float,
    ) -> None:
        self._board, self._rank, self._activity, self._end = board, rank, activity, end
        self.names = names or [f"worker {number}" for number in range(workers)]  # by rank
        self._left_remedy = f": {left_remedy}" if left_remedy else ""
        self._times = Times(**times)
        self._beats = Beats(range(workers) if rank == 0 else [0], self._times)
        self._beat, self._loss = Beat(), Loss()
        self._reports = 0
        self._unanswered = 0.0
        self._watches = [
            Watch(call, lambda: self.names[rank], BEAT_SECONDS, self._report_and_end)
            for call in (self.check, self.post, self.read)
        ]

    def use_times(self, silence_seconds: float, limit_seconds: float | None) -> None:
        """Changes times."""
        self._times.silence_seconds, self._times.limit_seconds = silence_seconds, limit_seconds

    def start(self) -> None:
        """Starts the threads, once."""
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        """Ends the beats; call it when all workers have reached their end.

        A thread that is in a framework's library while the interpreter ends may abort the process,
        so this waits for the threads, but not for ever for a board that does not respond.
        """
        for watch in self._watches:
            watch.stop()
        for watch in self._watches:
            watch.join(_STOP_SECONDS)

    def forget(self, rank: int) -> None:
        """Stops watching a worker that has left in order."""
        self._beats.forget(rank)

    def leave(self) -> None:
        """Makes all workers end with status 143, because this one was asked to by SIGTERM."""
        activity, step, _ = self._activity.read()
        self._loss = Loss(Reason.PREEMPTED, self._rank, activity, step)

    def post(self, _: float = 0.0) -> None:
        """Posts a beat."""
        self._beat = Beat(self._beat.number + 1, *self._activity.read(), self._loss)
        self._board.post(self._beat.row())
        self._unanswered = 0.0

    def read(self, seconds: float) -> None:
        """Reads the beats of other workers; time counts as silence once all have been read."""
        for rank in self._beats.ranks:
            row = self._beat.row() if rank == self._rank else self._board.read(rank)
            if row is not None:
                self._beats.see(rank, Beat.of(row))
        self._beats.wait(seconds)

    def check(self, seconds: float) -> str | None:
        """Returns why this process must end, or None, `seconds` after the last check."""
        self._unanswered += min(seconds, MAX_COUNTED_SECONDS)
        if self._rank == 0:
            self._report()
        if not self._loss.reason:
            silence, holder = self._times.silence_seconds, self._board.holder
            if self._unanswered <= silence:
                loss = self._beats.loss()
            elif isinstance(holder, int):
                loss = self._beats.lost(holder, Reason.SILENT)
            else:
                return f"{holder} did not respond for {silence:g} s"
            if not loss.reason:
                return None
            self._loss = loss  # the next beat of rank 0 tells it the others
        why = self._describe(self._loss)
        note_lost(self._loss.rank, why)
        return why

    def _report_and_end(self, status: int, why: str) -> None:
        """Ends the process; its beats go on for a moment if the others learn the loss from them."""
        tells = self._rank in (0, self._loss.rank)
        status = LEFT if self._loss.reason == Reason.PREEMPTED else status
        self._end(status, why, linger_seconds=_TELL_SECONDS if tells else 0.0)

    def _report(self) -> None:
        """Says which workers the others wait for, each time that they have waited for long."""
        waited = self._beats.waited_seconds(*WAITS, Activity.LEAVING)
        reports = int(waited // REPORT_SECONDS)
        if reports > self._reports:
            for rank in self._beats.late():
                beat = self._beats.beats.get(rank, Beat())
                doing = f"{self.names[rank]} is {describe(beat.activity, beat.step)}"
                print_message(f"{doing}; others have waited for it for {waited} s")
        self._reports = reports

    def _describe(self, loss: Loss) -> str:
        name, last = self.names[loss.rank], describe(loss.activity, loss.step)
        if loss.reason == Reason.PREEMPTED:
            return f"{name} got SIGTERM ({last}), so that all workers leave"
        if loss.reason == Reason.LEFT:
            return f"{name} has left ({last}), and others wait for it{self._left_remedy}"
        if loss.reason == Reason.LATE:
            limit = self._times.limit_seconds  # None if only rank 0 has one
            waited = "too long" if limit is None else f"{limit:g} s"
            return f"others have waited for {name}, which is {last}, for {waited}"
        silent = f"{name} has given no sign of life for {self._times.silence_seconds:g} s"
        return f"{silent}; with its last one it was {last}"
