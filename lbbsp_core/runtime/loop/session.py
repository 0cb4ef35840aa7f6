"""Training session of one worker: the loop around a `Balancer` that all plugins share.

A plugin supplies three things: a `Collectives` object, a way to draw a given number of samples,
and the place in its training step where the gradients are summed over workers::

    session = WorkerSession(collectives, global_batch_size, options, framework="toy")
    session.use_order(session.make_order(num_samples))
    session.start({"epochs": epochs})                  # handshake: workers compare static facts
    for step in range(steps):
        samples = session.local_indices(step)          # draw, compute the local gradient
        row = session.before_allreduce()               # measure, predict
        ...                                            # sum gradients; all-gather the rows
        session.after_allreduce(rows)                  # allocate, for step + lag
        if session.stopping:
            break
    session.close()
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy.typing as npt

from lbbsp_core.order import GlobalOrder, Indices, Order, make_order
from lbbsp_core.policy import Sizes
from lbbsp_core.runtime.checkpoint.checkpoint import Arrays, Json
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.runtime.exchange.handshake import Devices, Facts, Identity, Peer
from lbbsp_core.runtime.exchange.protocol import WIDTH, Row, decode, encode
from lbbsp_core.runtime.extensions.base import Extensions, Observer, StepExtension
from lbbsp_core.runtime.extensions.every import EXTENSIONS
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.loop import session_state
from lbbsp_core.runtime.loop.start import agree, drivers_of
from lbbsp_core.runtime.options import env
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.planning.balancer import Balancer, BalancerState
from lbbsp_core.runtime.planning.bounds import BatchBounds, default_granularity
from lbbsp_core.runtime.planning.running_step import Left, StepMeter, log_waits
from lbbsp_core.runtime.record.record import RunHeader, run_header
from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity
from lbbsp_core.runtime.reliability.liveness import training_thread

logger = logging.getLogger("lbbsp.session")


class StepMarks(NamedTuple):
    """What the message of the running step says of it, and not of the next one."""

    excluded: bool
    retraced: bool
    extra: tuple[int, ...]

    @classmethod
    def take(cls, session: WorkerSession) -> StepMarks:
        """Takes the marks of a session's running step, and resets them for the next one."""
        return cls(*session.meter.take_marks(), session.extensions.offer())


class WorkerSession:
    """Runs one worker's side of synchronous training; every worker of the job runs one.

    It owns the `Balancer`, the timer, the resource sampler and the extensions. Every step calls
    `before_allreduce` and `after_allreduce`; the other methods are called rarely.

    Args:
        collectives: Collectives of the framework.
        global_batch_size: X, samples per step over all workers; constant.
        options: Options of the user.
        framework: Name of the framework, for the run record.
        versions: Versions of the framework's packages, for the run record.
        activity: Takes what this worker does, for its heartbeat.
        parts: Parts into which each worker cuts its batch, >= 1.
        devices: Devices of this process, of each of its replicas. Defaults to its cores.
        extensions: What is done in each step besides, the same on all workers.

    Attributes:
        rank: Number of this worker, in [0, workers).
        workers: Number of workers, N.
        order: Samples of each step, if they are known.
        width: Length of a message's row.
        busy_seconds: Busy seconds of this worker since `start`, without those of excluded steps.
        extensions: Extensions by class, such as ``session.extensions[Stopping]``.
        observers: Functions that each step is passed to, with the values of all workers.
        meter: Timer of the steps.
        peers: All workers by rank; None before the first `start`.

    Raises:
        ValueError: No plan can satisfy the options; names the value and the remedy.

    Example:
        >>> from lbbsp_core import SingleWorker
        >>> session = WorkerSession(SingleWorker(), 8, SessionOptions(), framework="none")
        >>> session.use_order(session.make_order(16))
        >>> session.start({})
        >>> for step in range(2):
        ...     samples = session.local_indices(step)
        ...     session.after_allreduce([session.before_allreduce()])
        >>> session.sizes, session.step, session.stopping
        ((8,), 2, False)
    """

    _draws_before_start: ClassVar[bool] = False

    def __init__(
        self,
        collectives: Collectives,
        global_batch_size: int,
        options: SessionOptions,
        *,
        framework: str,
        versions: Mapping[str, str] | None = None,
        activity: CurrentActivity | None = None,
        parts: int = 1,
        devices: Devices | None = None,
        extensions: Sequence[type[StepExtension]] = EXTENSIONS,
    ) -> None:
        self.collectives = collectives
        self.rank, self.workers = collectives.rank, collectives.workers
        self.activity = activity or CurrentActivity()
        self.options = options = options.for_workers(self.workers, global_batch_size)
        self.order: Order | None = None
        self.busy_seconds = 0.0
        self.observers: list[Observer] = []
        self.meter = StepMeter(self.activity)
        self.extensions = Extensions(extensions, self)
        self.width = WIDTH + self.extensions.width
        devices = devices or Devices()
        policy = options.choose_policy(rank=self.rank)
        self._framework, self._versions = framework, dict(versions or {})
        self._identity = Identity.here(devices.names)
        self._drivers = drivers_of(options, policy, devices) if self.workers > 1 else ()
        self._gpu = devices.number
        usual = default_granularity(devices.are_gpus, self.workers, global_batch_size)
        self._balancer = Balancer(
            rank=self.rank,
            workers=self.workers,
            global_batch_size=global_batch_size,
            policy=policy,
            predictor=options.predictor,
            cost=options.cost,
            limits=options.limits,
            granularity=options.granularity or 1,
            bounds=BatchBounds(
                parts=parts,
                granularity=options.granularity or usual,
                shows_memory=devices.show_memory,
                default_maximum=True,
                short_step_seconds=options.short_step_seconds,
                first_uses=True,
            ),
        )
        self.peers: Sequence[Peer] | None = None

    @property
    def balancer(self) -> Balancer:
        """State machine of the loop, after the last barrier."""
        return self._balancer

    @property
    def step(self) -> int:
        """Global step that is running or comes next."""
        return self.balancer.step

    @property
    def sizes(self) -> Sizes:
        """Plan of the running step: samples by rank."""
        return self.balancer.sizes(self._balancer.step)

    def make_order(self, num_samples: int, seed: int | None = None, **order: Any) -> GlobalOrder:
        """Creates the order of `num_samples` samples, see `lbbsp_core.order.make_order`.

        The seed defaults to that of the options.
        """
        return make_order(
            num_samples,
            self._balancer.constraints.global_batch_size,
            workers=self.workers,
            most_workers=env.workers_at_first(self.workers),
            parts=self._balancer.bounds.parts,
            seed=self.options.seed if seed is None else seed,
            **order,
        )

    def use_order(self, order: Order) -> None:
        """Uses the samples of `order` from the running step on."""
        self.balancer.schedule.use_order(order)
        self.order = order

    def local_indices(self, step: int) -> Indices:
        """Returns this worker's samples of global step `step`, int64, shape ``(samples,)``.

        Raises:
            LookupError: There is no order, or the plan of the step is not decided yet.
        """
        return self.balancer.schedule.local_indices(step)

    def step_of_order(self, step: int) -> int:
        """Returns the number of a global step, counted from the start of the order."""
        return self._balancer.schedule.step_of_order(step)  # a barrier does not change it

    def begin_epoch(self, epoch: int) -> None:
        """Moves to the start of the next epoch, or ahead to epoch `epoch` of the order."""
        self.balancer.schedule.begin_epoch(epoch)
        self.exclude_step()

    def skip_step(self) -> None:
        """Advances by a step without an exchange."""
        self.balancer.schedule.skip_to(self.step + 1)

    def use_lag(self, lag: int) -> None:
        """Changes the steps between a plan's decision and its use; call it before `start`.

        A loader that draws n batches ahead needs lag 1 + n, the same on all workers (rule 2).
        """
        if self.workers > 1 and lag != self._balancer.schedule.lag:
            self._balancer.use_lag(lag)

    def start(self, facts: Facts, peers: Sequence[Peer] | None = None) -> None:
        """Starts the training with the handshake: compares static facts, exchanges cost shapes.

        Every worker must call it at the same time, before the first step of a fit.

        Args:
            facts: Further facts of the plugin by name, which must be the same on all workers.
            peers: Workers that another session of this process has agreed with, if there is one.

        Raises:
            DisagreementError: A fact differs; names the fact, the ranks and their values.
        """
        if peers is None:
            facts = {**self.extensions.facts(), **facts}
            peers = agree(self._balancer, self.order, self.collectives, facts, self._identity)
        infos = [peer.static_info for peer in peers]
        self._balancer.set_peers(infos, are_drawn=self._draws_before_start)
        self._sample()
        self.busy_seconds = 0.0
        for extension in self.extensions:
            extension.started(partial(_header, self, peers))
        self.exclude_step()
        self.activity.enter(Activity.OUTSIDE, self._balancer.step)
        self.peers = peers  # set last, so that a failed start leaves the session unstarted

    def any_worker(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any worker; a collective."""
        return any(row[0] for row in self.collectives.all_gather([int(flag)]))

    def begin_step(self) -> None:
        """Restarts the timer if the step is excluded; optional, at the start of a step."""
        self.meter.begin_step(self._balancer.step)

    def before_allreduce(self, marks: StepMarks | None = None) -> Row:
        """Measures and predicts; call it when this worker has computed its gradient.

        Args:
            marks: Marks of the step, if the next one may have begun. Defaults to those set now.

        Returns:
            This worker's message, shape ``(width,)`` float32. It is piggybacked on the gradient
            all-reduce: each worker contributes its row to a ``(workers, width)`` array of zeros.
        """
        marks = marks or StepMarks.take(self)
        busy_seconds, drivers, hidden_seconds = self.meter.reach()
        self.activity.enter(Activity.WAITING, self._balancer.step)
        self.busy_seconds += 0.0 if marks.excluded else busy_seconds
        message = replace(
            self._balancer.report(busy_seconds, excluded=marks.excluded, drivers=drivers),
            retraced=marks.retraced,
            hidden_nanoseconds=round(hidden_seconds * 1e9),
            drivers=dict(zip(self.meter.names, drivers, strict=True)),
            extra=marks.extra,
        )
        row = encode(message)
        self._balancer.train(training_thread().start)  # while the gradients are summed
        return row

    def after_allreduce(self, rows: Iterable[Iterable[float]], left: Left | None = None) -> None:
        """Decides the plan of step + lag from the messages of all workers.

        Args:
            rows: Messages by rank, shape ``(workers, width)``, the same on every worker.
            left: End of the step, if the barrier was left before. Defaults to now.

        Raises:
            DisagreementError: A worker has computed a different plan.
        """
        balancer, step = self._balancer, self._balancer.step
        # First, because what follows belongs to the next step.
        left = left or self.meter.leave(step + 1)
        messages = [decode(row) for row in rows]
        if logger.isEnabledFor(logging.DEBUG):
            log_waits(step, messages, left.wall_seconds)
        ended = balancer.receive(messages, left.wall_seconds)
        self.extensions.end_step(ended.line(left.time), messages)

    def excluded_wait(self) -> AbstractContextManager[None]:
        """Excludes the time inside the context, a collective within the step, from busy time."""
        return self.meter.excluded_wait()

    def exclude_step(self, *, retraced: bool = False) -> None:
        """Excludes the running step from learning, because it contains other work.

        Args:
            retraced: Whether that is tracing or compiling the step anew: each batch size that
                follows is then a new one.
        """
        self.meter.exclude_step(retraced=retraced)

    def request_stop(self) -> None:
        """Asks all workers to stop: `stopping` is true on all of them after the next exchange."""
        self.extensions[Stopping].request()

    @property
    def stopping(self) -> bool:
        """Request of any worker to stop, true on all workers after the same step."""
        _ = self.balancer  # passes the last barrier
        return self.extensions[Stopping].stopping

    def restore(self, state: BalancerState) -> None:
        """Continues from `Balancer.state`; call it before the first step."""
        self.balancer.restore(state)
        if self.order is not None:
            self.balancer.schedule.use_order(self.order)

    def facts(self) -> dict[str, Json]:
        """Returns what must be the same for another job to continue from a state, by name."""
        return session_state.order_facts(self.order, self._balancer.constraints.global_batch_size)

    def save_state(
        self, peers: Sequence[WorkerSession] = (), *, alone: bool = False
    ) -> tuple[Json, Arrays]:
        """Returns the state of all workers after the last step; a collective unless `alone`.

        Args:
            peers: Sessions of the other replicas of this process.
            alone: Whether to leave out the others' estimates of their speeds.

        Returns:
            JSON and arrays for `load_state`, the same on every worker.
        """
        if alone:
            state, arrays = session_state.own_state(self.balancer)
        else:
            balancers = [session.balancer for session in (self, *peers)]
            state, arrays = session_state.gather_state(balancers, self.collectives)
        if states := self.extensions.state():
            assert isinstance(state, dict)
            state["extensions"] = states
        return state, arrays

    def _sample(self) -> None:
        """Starts to sample driving factors; a wrong name is an error."""
        self.meter.open(self._drivers, self._gpu)
        self._balancer.driver_names = self.meter.names

    def load_state(self, state: Json, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continues from a saved state, also with another number of workers.

        Call it before the first step, on every worker, with the order of the saved state. Raises a
        `ValueError` if the state was not saved by `save_state`, or cannot be read.
        """
        self.restore(session_state.restored_state(self.balancer, state, arrays))
        states = state.get("extensions") if isinstance(state, dict) else None
        self.extensions.restore(states if isinstance(states, dict) else {})

    def close(self) -> None:
        """Ends a fit: stops sampling and drops a request to stop; `start` begins the next fit."""
        try:
            self._balancer.finish_training()
        finally:
            self.meter.close()
            self.extensions.close()
            self.activity.enter(Activity.OUTSIDE, self._balancer.step)


def _header(session: WorkerSession, peers: Sequence[Peer]) -> RunHeader:
    balancer, order = session._balancer, session.order
    return run_header(
        session._framework,
        workers=session.workers,
        global_batch_size=balancer.constraints.global_batch_size,
        versions=session._versions,
        num_samples=order.num_samples if order else None,
        seed=order.seed if order else None,
        lag=balancer.schedule.lag,
        policy=balancer.policy,
        predictor=balancer.predictor,
        cost=balancer.cost_shape.prior,
        drivers=session.meter.names,
        hosts=[peer.identity.host for peer in peers],
        devices=[peer.identity.device(rank) for rank, peer in enumerate(peers)],
    )
