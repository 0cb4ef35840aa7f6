"""Pipelined session, whose background thread passes the barrier of a step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lbbsp_core.order import Indices, Order
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.runtime.exchange.handshake import Facts
from lbbsp_core.runtime.exchange.protocol import (
    DisagreementError,
    Row,
    fingerprint,
    pack,
    pack_float,
    unpack,
    unpack_float,
)
from lbbsp_core.runtime.loop.session import StepMarks, WorkerSession
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.planning.balancer import Balancer, BalancerState
from lbbsp_core.runtime.planning.running_step import Left
from lbbsp_core.runtime.reliability.liveness import background_thread

Rows = npt.NDArray[np.float32]
_URGENT = 1 << 20  # messages are sent before all gradients
_SLOT = 1  # of the gathers


class PipelinedCollectives(Collectives, Protocol):
    """Collectives of a framework that computes asynchronously and reports only by blocking."""

    def begin_gather(
        self, row: Row | Sequence[float], *, slot: Hashable, priority: int = 0
    ) -> Callable[[], Rows]:
        """Starts to gather a float32 row from every worker; all rows have the same width.

        Two gathers can be pending at a time, on different slots, which are the same on all workers
        or created in the same order. Gathers of higher priority are sent first. Returns a function
        that waits for the rows by rank.
        """
        ...

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Bounds the time spent inside the context, in which this worker waits for its peers."""
        ...


class PipelinedSession(WorkerSession):
    """Session whose barriers are passed on a background thread.

    The thread waits for this worker's gradients, reads the clock, exchanges messages and waits
    for the sums. The session reads its result when it next uses the balancer, at the latest in
    the next step. A loader without prefetching needs the next plan at once and waits for it (lag
    1, the paper's mode). With prefetching, the next step starts while the gradients of this one
    are still being computed, at the cost of one more step of lag.

    `end_step` replaces `start`, `before_allreduce` and `after_allreduce`.

    The prefetch depth of a loader is detected when it draws its first batches: the lag is raised
    accordingly, and every step checks that all workers have the same lag. The
    arguments are those of `WorkerSession`, and `facts`: further facts of the plugin, by name, that
    must be the same on all workers; compared in the first step.
    """

    collectives: PipelinedCollectives
    _draws_before_start = True  # the session starts at the first barrier

    def __init__(
        self,
        collectives: PipelinedCollectives,
        global_batch_size: int,
        options: SessionOptions,
        *,
        facts: Facts | None = None,
        **session: Any,
    ) -> None:
        super().__init__(collectives, global_batch_size, options, **session)
        self._sample()  # a wrong name is an error here, not in the first step
        self._facts = dict(facts or {})
        self._barrier: Future[tuple[Rows, Left]] | None = None
        self._finishing = threading.RLock()  # several threads may ask for the state
        self._resumes = False
        self._skips = False
        self._iteration = 0
        self.weights: tuple[float, ...] | None = None  # by rank, of the last step if it had any
        self.in_epoch = False  # while an epoch is drawn; its user resets it after the last step

    @property
    def balancer(self) -> Balancer:
        """State machine of the loop, after the last barrier that was reached."""
        self.finish_barrier()
        return self._balancer

    def finish_barrier(self) -> None:
        """Waits until the last barrier is passed, and processes the messages of the peers."""
        with self._finishing:
            if self._barrier is not None:
                barrier, self._barrier = self._barrier, None
                self.after_allreduce(*barrier.result())

    def epoch_steps(self, order: Order) -> Iterator[int]:
        """Yields the global steps of the next epoch; the rest of an unfinished epoch is skipped.

        After `restore` the running epoch continues.
        """
        if self._skips:
            self._skips = False
            return
        self.use_order(order)
        if self._resumes:
            self._resumes = False
            self.exclude_step()
        else:
            self.begin_epoch(0)
        self._iteration += 1
        iteration = self._iteration
        self.in_epoch = True
        for step in range(self.balancer.step, self.balancer.schedule.epoch_end_step()):
            if iteration != self._iteration:
                raise RuntimeError(
                    f"the loader draws the batch of step {step}, but the training is at step "
                    f"{self.balancer.step} of another epoch or of a restored state: iterate the "
                    "loader again, and create it after load or load_states"
                )
            try:
                yield step
            except GeneratorExit:  # the loop over the loader was left before its end
                if iteration == self._iteration:
                    self.in_epoch = False
                raise

    def skip_epoch(self) -> None:
        """Lets the next epoch have no steps, because the training is already complete."""
        self._skips = True

    def local_indices(self, step: int) -> Indices:
        """Returns this worker's samples of `step`; raises the lag if the step lies ahead."""
        schedule = self._balancer.schedule
        if step >= schedule.step + schedule.lag:
            self.finish_barrier()
        ahead = step - schedule.step
        # Plans are then read one step later, while a barrier is pending.
        reads_late = ahead > 0 and self._barrier is None
        lag = 1 + ahead + reads_late
        if lag > schedule.lag:
            self.use_lag(lag)
        return schedule.local_indices(step)

    def local_span(self, step: int) -> tuple[int, int]:
        """Returns the place of this worker's samples of `step` in the order.

        Call it after `local_indices`, which makes sure that the plan is known. Returns the samples
        of the whole order before them, and their number.
        """
        if self.order is None:
            raise LookupError("there is no order to draw samples from: call use_order() first")
        in_order = self.step_of_order(step)
        sizes_alone = (self.order.size(in_order),)
        sizes = self._balancer.sizes(step) if self.workers > 1 else sizes_alone
        return self.order.position(in_order) + sum(sizes[: self.rank]), sizes[self.rank]

    def restore(self, state: BalancerState) -> None:
        """Continues from `state`; batches that loaders have already drawn become invalid."""
        super().restore(state)
        self._resumes = True
        self._iteration += 1
        self.exclude_step()

    def flush(self) -> None:
        """Passes the last barrier, and writes its step to the run record and file of metrics."""
        self.finish_barrier()
        for extension in self.extensions:
            extension.flush()

    def close(self) -> None:
        """Ends the training: passes the last barrier, then ends the session."""
        self.finish_barrier()
        super().close()

    def end_step(
        self, computed: Callable[[], None], summed: Callable[[], None], weight: float | None = None
    ) -> None:
        """Starts to pass the barrier of a step in the background, and returns at once.

        `computed` waits for this worker's gradients, `summed` for the sums. Either all workers have
        a `weight` or none; `weights` has them after the barrier.
        """
        self.finish_barrier()
        # The user's thread may mark the next step before this barrier is passed.
        marks = StepMarks.take(self)
        if self._begin(computed):
            self.meter.take_marks()  # `start` has excluded the step, which `marks` contain
        barrier = partial(self._pass, computed, summed, marks, _tail(self._position(), weight))
        self._barrier = background_thread().start(barrier)

    def pass_inner(
        self,
        number: int,
        computed: Callable[[], None],
        summed: Callable[[], None],
        batch_size: int,
        weight: float | None = None,
    ) -> tuple[int, ...]:
        """Passes a barrier within a step, as of another trainer; the wait there is no busy time.

        Arguments are those of `end_step`; `number` must be the same on all workers. Returns the
        batch sizes by rank.
        """
        self.finish_barrier()
        self._begin(computed)
        computed()
        packed = pack([batch_size])
        padded = np.pad(packed, (0, self.width - len(packed)))
        row = np.concatenate([padded, _tail(self._position(number), weight)])
        with self.excluded_wait(), self.collectives.waiting("for the gradients of other workers"):
            rows = self._gather(row)()
            self._take_tails(rows)
            summed()
        return tuple(unpack(row[: len(packed)])[0] for row in rows)

    def _begin(self, computed: Callable[[], None]) -> bool:
        """Starts the session at its first barrier; returns whether this is the first one."""
        if self.peers is not None:
            return False
        computed()
        with self.excluded_wait():
            self.start(self._facts)
            # The first gather creates its keys, here in the same order on all workers.
            self._gather(np.pad(_tail(0, None), (self.width, 0)))()
        return True

    def _gather(self, row: Row) -> Callable[[], Rows]:
        return self.collectives.begin_gather(row, slot=_SLOT, priority=_URGENT)

    def _pass(
        self, computed: Callable[[], None], summed: Callable[[], None], marks: StepMarks, tail: Row
    ) -> tuple[Rows, Left]:
        """Passes the barrier; meanwhile the training only draws batches of known plans."""
        computed()
        gather = self._gather(np.concatenate([self.before_allreduce(marks), tail]))
        with self.collectives.waiting("for the gradients and messages of the other workers"):
            rows = gather()
            self._take_tails(rows)  # sums of other arrays would never be complete
            summed()
        return rows[:, : self.width], self.meter.leave(self._balancer.step + 1)

    def _take_tails(self, rows: Rows) -> None:
        """Checks the positions of the workers, and takes their weights."""
        tails = [unpack(row[self.width :]) for row in rows]
        for rank, (position, *_) in enumerate(tails):
            if position != tails[0][0]:
                raise DisagreementError(
                    f"worker {rank} is at another step or in another order than worker 0 (this is "
                    f"worker {self.rank}, at step {self._balancer.step}): all workers must make a "
                    "step for each batch, and leave an epoch, load states, and use each of several "
                    "trainers at the same step"
                )
        self.weights = _same_kind([unpack_float(halves) for _, *halves in tails])

    def _position(self, barrier: int = 0) -> int:
        """Returns a fingerprint of this worker's step, lag and order, and of an inner barrier."""
        order, schedule = self.order, self._balancer.schedule
        samples = (*order.key, order.work_description) if order else ()
        return fingerprint(repr((schedule.step, schedule.lag, samples, barrier)))


def _tail(position: int, weight: float | None) -> Row:
    """Packs what follows a message: a position and a weight, NaN if there is none."""
    return pack([position, *pack_float(math.nan if weight is None else weight)])


def _same_kind(weights: Sequence[float]) -> tuple[float, ...] | None:
    """Returns the weights by rank, or None if no worker has one, which is sent as NaN."""
    have_weights = [not math.isnan(weight) for weight in weights]
    if any(have_weights) and not all(have_weights):
        raise DisagreementError(
            f"worker {have_weights.index(True)} passes a weight with its gradients, and worker "
            f"{have_weights.index(False)} none: pass `weight` on all workers in the same steps"
        )
    return tuple(weights) if all(have_weights) else None
