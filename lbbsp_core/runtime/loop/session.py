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

Forecasts may be better with what is known when the barrier is left. A plugin that can exchange
messages once more replaces `after_allreduce`::

        if session.leave_barrier(rows):
            row = session.revise()                     # predict again
            ...                                        # all-gather the rows
            session.end_exchange(rows)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple

import numpy.typing as npt

from lbbsp_core.order import GlobalOrder, Indices, Order, make_order
from lbbsp_core.policy import Sizes
from lbbsp_core.resources.sampler import MEMORY_OF_GPU
from lbbsp_core.runtime.checkpoint.serialization import Arrays, Json
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.runtime.exchange.digest import Array, Digest, different_row
from lbbsp_core.runtime.exchange.handshake import Facts
from lbbsp_core.runtime.exchange.identity import Devices, Identity, hosts_and_devices
from lbbsp_core.runtime.exchange.protocol import (
    DisagreementError,
    Row,
    StepMessage,
    compare_facts,
    decode,
    encode,
    pack_float,
    unpack_float,
)
from lbbsp_core.runtime.exchange.settings import Settings, SharedSettings
from lbbsp_core.runtime.loop.balancer import Balancer, BalancerState
from lbbsp_core.runtime.loop.bounds import BatchBounds, default_granularity
from lbbsp_core.runtime.loop.bounds_notice import BoundsNotice
from lbbsp_core.runtime.loop.session_state import (
    check_states,
    gather_state,
    order_facts,
    own_state,
    restored_state,
)
from lbbsp_core.runtime.loop.step_meter import StepMeter
from lbbsp_core.runtime.options import env
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.record.metrics_file import MetricsFile
from lbbsp_core.runtime.record.observers import Observer, Observers
from lbbsp_core.runtime.record.record import RunHeader, RunRecord, open_record, run_header
from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity

logger = logging.getLogger("lbbsp.session")

LONG_STEP_SECONDS: Final = 0.1
"""Busy seconds of the slowest worker from which messages are exchanged twice. In shorter steps the
last speed is about as new as the driving factors.
"""


class StepFlags(NamedTuple):
    """Flags of a worker's running step.

    Args:
        excluded: Whether the step is excluded from learning.
        retraced: Whether it was traced or compiled anew.
        stop: Whether the worker asks all workers to stop after this step.
        preempted: Whether the worker must leave after this step.
        digest: Digest of the weights with which the step began; 0 if they are not compared.
        settings: Fingerprint of the settings of the step; 0 if they are not compared.
    """

    excluded: bool
    retraced: bool
    stop: bool
    preempted: bool
    digest: int
    settings: int


class WorkerSession:
    """Runs one worker's side of synchronous training; every worker of the job runs one.

    It owns the `Balancer`, the timer, the resource sampler, the run record and the stop flag.
    Every step calls `before_allreduce` and `after_allreduce`; the other methods are called rarely.

    Args:
        collectives: Collectives of the framework.
        global_batch_size: X, samples per step over all workers; constant.
        options: Options of the user.
        framework: Name of the framework, for the run record.
        versions: Versions of the framework's packages, for the run record.
        activity: Takes what this worker does, for its heartbeat.
        parts: Parts into which each worker cuts its batch, >= 1.
        devices: Devices of this process: of its only worker, or of each of its replicas. Defaults
            to its cores.

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
    ) -> None:
        self.collectives = collectives
        self.activity = activity or CurrentActivity()
        self.options = options = options.for_workers(self.workers, global_batch_size)
        self.order: Order | None = None
        self._global_batch_size = global_batch_size
        self._parts = parts
        self._devices = devices or Devices()
        self._policy = options.choose_policy()
        self._framework = framework
        self._versions = dict(versions or {})
        self._identity = Identity.here(self._devices.names)
        self._record: RunRecord | None = None
        self._notice = BoundsNotice()
        self._metrics: MetricsFile | None = None
        self._metrics_path = options.metrics_path()
        self._observers = Observers()
        self._balancer = Balancer(
            rank=self.rank,
            workers=self.workers,
            global_batch_size=global_batch_size,
            policy=self._policy,
            predictor=options.predictor,
            cost=options.cost,
            limits=options.limits,
            granularity=options.granularity or 1,
            bounds=BatchBounds(
                parts=parts,
                granularity=options.granularity
                or default_granularity(self._devices.are_gpus, self.workers, global_batch_size),
                shows_memory=self._devices.show_memory,
                default_maximum=True,
                short_step_seconds=options.short_step_seconds,
                first_uses=True,
            ),
        )
        self._meter = StepMeter()
        self._peers: list[list[int]] | None = None
        self._stop_requested = False
        self._preemption_requested = False
        self._busy_seconds = 0.0
        self._digest = self._offers = 0
        self._divergence: str | None = None
        self._settings = SharedSettings()
        self._fresh_drivers = False  # set by the handshake
        # Message and wall seconds of a step, between leave_barrier and end_exchange.
        self._unfinished: tuple[StepMessage, float] | None = None

    @property
    def rank(self) -> int:
        """Number of this worker, in [0, workers)."""
        return self.collectives.rank

    @property
    def workers(self) -> int:
        """Number of workers, N."""
        return self.collectives.workers

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
        balancer = self.balancer
        return balancer.sizes(balancer.step)

    @property
    def busy_seconds(self) -> float:
        """Busy seconds of this worker since `start`, without those of excluded steps."""
        return self._busy_seconds

    @property
    def uses_fresh_drivers(self) -> bool:
        """Whether messages may be exchanged once more after long steps, see `leave_barrier`.

        Known from the first `start` on, the same on all workers, and for good.
        """
        return self._fresh_drivers

    # Data

    def make_order(
        self,
        num_samples: int,
        seed: int | None = None,
        *,
        work: npt.ArrayLike | None = None,
        **order: Any,
    ) -> GlobalOrder:
        """Creates the order of `num_samples` samples; the seed defaults to that of the options.

        The other arguments are those of `GlobalOrder`, and `work` that of `make_order`.

        Raises:
            ValueError: The data set is smaller than one global batch, or `work` is wrong.
        """
        return make_order(
            num_samples,
            self._global_batch_size,
            workers=self.workers,
            most_workers=env.workers_at_first(self.workers),
            parts=self._parts,
            work=work,
            seed=self.options.seed if seed is None else seed,
            **order,
        )

    def use_order(self, order: Order) -> None:
        """Uses the samples of `order` from the running step on."""
        self.balancer.use_order(order)
        self.order = order

    def local_indices(self, step: int) -> Indices:
        """Returns this worker's samples of global step `step`, int64, shape ``(samples,)``.

        Raises:
            LookupError: There is no order, or the plan of the step is not decided yet.
        """
        return self.balancer.local_indices(step)

    def step_of_order(self, step: int) -> int:
        """Returns the number of a global step, counted from the start of the order."""
        return self.balancer.step_of_order(step)

    def begin_epoch(self, epoch: int) -> None:
        """Moves to the start of the next epoch, or ahead to epoch `epoch` of the order."""
        self.balancer.begin_epoch(epoch)
        self.exclude_step()

    def use_lag(self, lag: int) -> None:
        """Changes the steps between a plan's decision and its use; call it before `start`.

        A loader that draws n batches ahead needs lag 1 + n, the same on all workers (rule 2).
        """
        if self.workers > 1 and lag != self.balancer.lag:
            self.balancer.use_lag(lag)

    def skip_step(self) -> None:
        """Advances by a step without an exchange, for a single worker."""
        self.balancer.skip_to(self.balancer.step + 1)

    # Handshake

    def start(self, facts: Facts) -> None:
        """Starts the training with the handshake: compares static facts, exchanges cost shapes.

        Every worker must call it at the same time, before the first step of a fit.

        Args:
            facts: Further facts of the plugin, integers or texts by name, that must be the same
                on all workers.

        Raises:
            DisagreementError: A fact differs; names the fact, the ranks and their values.
        """
        names = self._identity.pack()
        peers = handshake.agree(
            self._balancer,
            self.order,
            self.collectives,
            facts,
            names,
            are_drawn=self._draws_before_start,
        )
        predictor = self._balancer.predictor
        wants = self.options.wants_fresh_drivers(self._policy, predictor)
        self._fresh_drivers = self.workers > 1 and self.any_worker(wants)
        self._open_meter()
        self._busy_seconds = 0.0
        if self.rank == 0:
            self._open_files(peers)
        self.exclude_step()
        self.activity.enter(Activity.OUTSIDE, self._balancer.step)
        self._peers = peers  # last: what failed before has not started

    def check_same(self, name: str, value: int) -> None:
        """Checks that all workers have the same value of a fact; a collective.

        Raises:
            DisagreementError: The fact differs; names the fact, the ranks and their values.
        """
        compare_facts([name], self.collectives.all_gather([value]))

    def check_samples(self, digests: Sequence[Digest], what: str = "the data") -> None:
        """Checks that all workers have the same samples, of which they give as many digests.

        Every worker must call it at the same time. The error names `what`.

        Raises:
            DisagreementError: Samples differ; names the rank, and the remedy.
        """
        values = [half for each in digests for number in each for half in pack_float(number)]
        rows = [
            [Digest(unpack_float(row[i : i + 2]), unpack_float(row[i + 2 : i + 4]))
             for i in range(0, len(values), 4)]
            for row in self.collectives.all_gather(values)
        ]  # fmt: skip
        if (found := different_row(rows)) is not None:
            rank, _ = found
            raise DisagreementError(
                f"workers disagree on {what}: samples of worker {rank} differ from those of "
                "worker 0 with the same numbers; pass the whole data set in the same order to all "
                "workers (give every shuffle a seed, sort lists of files)"
            )

    def any_worker(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any worker; a collective."""
        return any(row[0] for row in self.collectives.all_gather([int(flag)]))

    # Steps

    def observe(self, observer: Observer) -> None:
        """Passes each step that follows to `observer`, with the values of all workers."""
        self._observers.add(observer)
        self._balancer.record_to(self._observers)

    def begin_step(self) -> None:
        """Restarts the timer if the step is excluded; optional, at the start of a step."""
        self.activity.enter(Activity.COMPUTING, self._balancer.step)
        self._meter.begin_step()

    def offer_weights(self, weights: Callable[[], Iterable[Array]], *, now: bool = False) -> None:
        """Compares the workers' weights in some steps; optional, at the start of every step.

        Args:
            weights: Returns the weights, which must be equal on all workers; called once in
                `compare_weights` steps.
            now: Whether to compare them in this step in any case; the same on all workers.
        """
        self.check_weights()
        every = self.options.compare_weights
        if every and self.workers > 1:
            self._offers += 1
            # Also in the second one: optimizers that draw noise make weights differ at once.
            if now or self._offers == 2 or self._offers % every == 1 % every:
                with self._meter.excluded_wait():  # it may take long, and is no work on samples
                    self._digest = Digest.of(weights()).to_integer()

    def check_weights(self) -> None:
        """Raises if the latest comparison of weights has found a difference.

        Raises:
            DisagreementError: Workers have different weights.
        """
        if self._divergence is not None:
            raise DisagreementError(self._divergence)

    def offer_settings(self, settings: Callable[[], Settings], remedy: str) -> None:
        """Compares settings of the workers; optional, at the start of every step.

        Args:
            settings: Returns the settings, which must be equal on all workers.
            remedy: What a user is to do if they are not.

        Raises:
            DisagreementError: They differed in the last step; names the values.
        """
        self.check_settings(remedy)
        if self.options.compare_weights and self.workers > 1:
            self._settings.offer(settings())

    def check_settings(self, remedy: str) -> None:
        """Raises if the settings of the last step differ; a collective if they do.

        Raises:
            DisagreementError: They differ; names the values.
        """
        self._settings.check(self.collectives, remedy)

    @property
    def disputed_step(self) -> int | None:
        """Step in which the workers' settings differed, until `check_settings` has named them."""
        return self._settings.disputed

    def before_allreduce(self) -> Row:
        """Measures and predicts; call it when this worker has computed its gradient.

        Returns:
            This worker's message, shape ``(WIDTH,)`` float32. It is piggybacked on the gradient
            all-reduce: each worker contributes its row to a ``(workers, WIDTH)`` array of zeros.
        """
        return encode(self._report(self._take_flags()))

    def after_allreduce(self, rows: Iterable[Iterable[float]]) -> None:
        """Decides the plan of step + lag from the messages of all workers.

        Args:
            rows: Messages by rank, shape ``(workers, WIDTH)``, the same on every worker.

        Raises:
            DisagreementError: A worker has computed a different plan.
        """
        wall_seconds = self._leave_barrier()
        self._receive([decode(row) for row in rows], wall_seconds)

    def leave_barrier(self, rows: Iterable[Iterable[float]]) -> bool:
        """Decides the plan as `after_allreduce`, unless the messages are exchanged once more.

        That is done with the option `fresh_drivers` after steps of `LONG_STEP_SECONDS`, if
        forecasts depend on driving factors, and plans apply to the next step: what slows a worker
        down when it leaves the barrier says more about that step than what did when it reached it.

        Returns:
            Whether `revise` and `end_exchange` are to follow; the same on all workers.
        """
        wall_seconds = self._leave_barrier()
        messages = [decode(row) for row in rows]
        if self._exchanges_again(messages, self._may_exchange_again()):
            self._unfinished = messages[self.rank], wall_seconds
            return True
        self._receive(messages, wall_seconds)
        return False

    def revise(self) -> Row:
        """Samples the driving factors again and predicts, after `leave_barrier`.

        Returns:
            This worker's message for another exchange, shape ``(WIDTH,)``. Until `end_exchange`,
            no time is busy time.
        """
        assert self._unfinished is not None, "leave_barrier has asked for no further exchange"
        message, _ = self._unfinished
        row = encode(self._revised(message))
        self._begin_exchange()
        return row

    def end_exchange(self, rows: Iterable[Iterable[float]]) -> None:
        """Decides the plan of step + lag from the revised messages of all workers.

        Args:
            rows: Messages by rank, as for `after_allreduce`.
        """
        assert self._unfinished is not None, "leave_barrier has asked for no further exchange"
        (_, wall_seconds), self._unfinished = self._unfinished, None
        self._end_exchange()
        self._receive([decode(row) for row in rows], wall_seconds)

    @contextmanager
    def excluded_wait(self) -> Iterator[None]:
        """Excludes the time inside the context, a collective within the step, from busy time."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def begin_wait(self) -> None:
        """Starts an `excluded_wait` where no context manager can be used (inside a graph)."""
        self._meter.begin_wait()
        self.activity.enter(Activity.WAITING)

    def end_wait(self) -> None:
        """Ends a wait that `begin_wait` has started."""
        self.activity.enter(Activity.COMPUTING)
        self._meter.end_wait()

    def exclude_step(self, *, retraced: bool = False) -> None:
        """Excludes the running step from learning, because it contains other work.

        Args:
            retraced: Whether that is tracing or compiling the step anew: each batch size that
                follows is then a new one.
        """
        self._meter.exclude_step(retraced=retraced)

    # End

    def request_stop(self) -> None:
        """Asks all workers to stop: `stopping` is true on all of them after the next exchange."""
        self._stop_requested = True

    @property
    def stop_requested(self) -> bool:
        """Request of this worker to stop that has not been exchanged yet."""
        return self._stop_requested

    @property
    def stopping(self) -> bool:
        """Request of any worker to stop, true on all workers after the same step."""
        return self.balancer.stopping

    def request_preemption(self) -> None:
        """Announces that this worker must leave: `preempted` is true on all after the exchange.

        May be called by any thread.
        """
        self._preemption_requested = True

    @property
    def preemption_requested(self) -> bool:
        """Request of this worker to leave."""
        return self._preemption_requested

    @property
    def preempted(self) -> bool:
        """Request of any worker to leave, true on all workers after the same step."""
        return self.balancer.preempted

    def state(self) -> BalancerState:
        """Returns a state for `restore`, which can be pickled."""
        return self.balancer.state()

    def restore(self, state: BalancerState) -> None:
        """Continues from `state`; call it before the first step."""
        self.balancer.restore(state)
        if self.order is not None:
            self.balancer.use_order(self.order)

    def facts(self) -> dict[str, Json]:
        """Returns what must be the same for another job to continue from a state, by name."""
        return order_facts(self.order, self._global_batch_size)

    def save_state(self) -> tuple[Json, Arrays]:
        """Returns the state of all workers after the last step; a collective.

        Returns:
            JSON and arrays for `load_state`, the same on every worker.

        Raises:
            TypeError: A state of a predictor or policy cannot be written; see `check_state`.
        """
        return gather_state([self.balancer], self.collectives)

    def own_state(self) -> tuple[Json, Arrays]:
        """Returns the state of this worker for `load_state`; no collective.

        The other workers' speeds are not in it: those who load it learn them again.

        Raises:
            TypeError: As for `save_state`.
        """
        return own_state(self.balancer)

    def load_state(self, state: Json, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continues from a saved state, also with another number of workers.

        Call it before the first step, on every worker, with the order of the saved state.

        Raises:
            ValueError: The state was not saved by `save_state`, or cannot be read.
        """
        self.restore(restored_state(self.balancer, state, arrays))

    def check_state(self) -> None:
        """Raises an error if a state of the user's predictor or policy cannot be saved.

        Raises:
            TypeError: Names the type of the value, and the remedy.
        """
        check_states(self.balancer)

    def flush(self) -> None:
        """Writes the last step to the file of metrics; the run record has it already."""
        if self._metrics is not None:
            self._metrics.flush()

    def close(self) -> None:
        """Ends a fit: stops sampling and drops a request to stop; `start` begins the next fit."""
        self._meter.close()
        self.flush()
        self._stop_requested = False
        self._digest = self._offers = 0
        self._divergence = None
        self._settings = SharedSettings()
        self.activity.enter(Activity.OUTSIDE, self._balancer.step)

    def _open_meter(self) -> None:
        """Starts to sample resources, on the cores that are in use now."""
        if not self._meter.is_open:
            names = self.options.choose_drivers(self._policy)
            if self._devices.show_memory and not (
                self._policy.uses_costs or self._policy.is_static
            ):
                names = (MEMORY_OF_GPU,)
            self._meter.open(names if self.workers > 1 else ())

    def _take_flags(self) -> StepFlags:
        digest, self._digest = self._digest, 0
        return StepFlags(
            self._meter.take_excluded(),
            self._meter.take_retraced(),
            self._stop_requested,
            self._preemption_requested,
            digest,
            self._settings.fingerprint,
        )

    def _report(self, flags: StepFlags) -> StepMessage:
        """Ends the busy time of the step, learns from it, and returns its message."""
        busy_seconds, drivers = self._meter.reach()
        self.activity.enter(Activity.WAITING, self._balancer.step)
        self._busy_seconds += 0.0 if flags.excluded else busy_seconds
        message = self._balancer.report(
            busy_seconds,
            excluded=flags.excluded,
            stop=flags.stop,
            preempted=flags.preempted,
            drivers=drivers,
        )
        return replace(
            message,
            retraced=flags.retraced,
            digest=flags.digest,
            settings=flags.settings,
            drivers=self._named(drivers),
        )

    def _may_exchange_again(self) -> bool:
        """Returns whether messages are exchanged once more if the running step is long."""
        return self.uses_fresh_drivers and self._balancer.lag == 1

    def _exchanges_again(self, messages: Sequence[StepMessage], may: bool) -> bool:
        """Returns whether messages are exchanged once more; the same on all workers."""
        return may and max(each.busy_nanoseconds for each in messages) >= LONG_STEP_SECONDS * 1e9

    def _begin_exchange(self) -> None:
        """Notes that this worker waits for revised messages; the barrier is left already."""
        self._meter.begin_wait()
        self.activity.enter(Activity.WAITING, self._balancer.step)

    def _end_exchange(self) -> None:
        self.activity.enter(Activity.COMPUTING, self._balancer.step + 1)
        self._meter.end_wait()

    def _revised(self, message: StepMessage) -> StepMessage:
        """Returns the message with a forecast from the driving factors known now."""
        drivers = self._meter.sample()
        message = self._balancer.revise(message, drivers)
        return replace(message, drivers=self._named(drivers))

    def _named(self, drivers: Sequence[float]) -> dict[str, float]:
        return dict(zip(self._meter.names, drivers, strict=True))

    def _leave_barrier(self) -> float:
        """Starts the next step, to which what follows belongs; returns wall seconds of this one."""
        self.activity.enter(Activity.COMPUTING, self._balancer.step + 1)
        self._observers.end_step()
        return self._meter.leave()

    def _receive(self, messages: Sequence[StepMessage], wall_seconds: float) -> None:
        balancer = self._balancer
        if logger.isEnabledFor(logging.DEBUG):
            _log_waits(balancer.step, messages, wall_seconds)
        self._compare_weights([message.digest for message in messages])
        self._settings.compare(balancer.step, [message.settings for message in messages])
        balancer.receive(messages, wall_seconds)
        if self.rank == 0 and self.workers > 1:
            self._notice.check(balancer)
        if balancer.stopping:
            self._stop_requested = False  # has been exchanged

    def _compare_weights(self, digests: Sequence[int]) -> None:
        """Notes if two workers have sent digests of different weights."""
        sent = {rank: Digest.from_integer(value) for rank, value in enumerate(digests) if value}
        for rank, digest in sent.items():
            first, expected = next(iter(sent.items()))
            if not digest.is_close(expected):
                self._divergence = (
                    f"workers have different weights at step {self._balancer.step}, where they are "
                    f"compared every {self.options.compare_weights} steps: those of worker {first} "
                    f"have norm {expected.norm:.4g} and projection {expected.projection:.4g}, "
                    f"those of worker {rank} {digest.norm:.4g} and {digest.projection:.4g}; a "
                    "callback or script changes the model, the optimizer or its learning rate on "
                    "one worker only, or the optimizer draws other noise there: do the same on all "
                    "workers, with the same seeds"
                )

    def _open_files(self, peers: Sequence[Sequence[int]]) -> None:
        """Opens the run record and the file of metrics in the first fit, if they are wanted."""
        path = self.options.record_path()
        if path is not None and self._record is None:
            self._record = open_record(path, self._header(peers))
            self.observe(self._record.write)
        if self._metrics_path is not None and self._metrics is None:
            self._metrics = MetricsFile(self._metrics_path, self._header(peers))
            self.observe(self._metrics.add)

    def _header(self, peers: Sequence[Sequence[int]]) -> RunHeader:
        balancer, order = self._balancer, self.order
        hosts, devices = hosts_and_devices(peers)
        return run_header(
            self._framework,
            workers=self.workers,
            global_batch_size=self._global_batch_size,
            versions=self._versions,
            num_samples=order.num_samples if order else None,
            seed=order.seed if order else None,
            lag=balancer.lag,
            policy=balancer.policy,
            predictor=balancer.predictor,
            cost=balancer.cost_shape.prior,
            drivers=self._meter.names,
            hosts=hosts,
            devices=devices,
        )


def _log_waits(step: int, messages: Sequence[StepMessage], wall_seconds: float) -> None:
    """Logs which worker the others waited for in a step, and how long each of them waited."""
    busy = [message.busy_nanoseconds / 1e9 for message in messages]
    last = max(range(len(busy)), key=busy.__getitem__)
    waits = ", ".join(
        f"worker {rank} {busy[last] - seconds:.4f} s"
        for rank, seconds in enumerate(busy)
        if rank != last
    )
    logger.debug(
        "step %d took %.4f s; waited for worker %d (busy %.4f s): %s",
        step,
        wall_seconds,
        last,
        busy[last],
        waits or "no other worker",
    )
