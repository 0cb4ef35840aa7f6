"""One worker's training session: what every plugin does around a `Balancer`, once.

A plugin supplies three things: a `Collectives` object, a way to draw a given number of samples,
and the place in its training step where the gradients are summed over workers::

    session = WorkerSession(collectives, global_batch_size, options, framework="toy")
    session.use_order(session.make_order(num_samples))
    session.start({"epochs": epochs})                  # all workers agree on what never changes
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
from typing import NamedTuple

from lbbsp_core.order import GlobalOrder, Indices
from lbbsp_core.policy import Sizes
from lbbsp_core.runtime import handshake
from lbbsp_core.runtime.balancer import Balancer, BalancerState
from lbbsp_core.runtime.collectives import Collectives
from lbbsp_core.runtime.options import SessionOptions
from lbbsp_core.runtime.protocol import Row, StepMessage, compare_facts, decode, encode
from lbbsp_core.runtime.record import RunHeader, RunRecord, open_record, run_header
from lbbsp_core.runtime.step_meter import StepMeter

logger = logging.getLogger("lbbsp.session")


class StepFlags(NamedTuple):
    """What a worker says of its running step.

    Args:
        excluded: The step is not learned from.
        stop: The worker asks all workers to stop after this step.
    """

    excluded: bool
    stop: bool


class WorkerSession:
    """Runs one worker's side of synchronous training; every worker of the job runs one.

    It owns the `Balancer`, the clock, the resource sampler, the run record and the stop flag. A
    step's part is `before_allreduce` and `after_allreduce`; everything else is rare.

    Args:
        collectives: Of the framework.
        global_batch_size: X, samples a step over all workers; constant.
        options: As the user gave them.
        framework: Its name, for the run record.
        versions: Versions of the framework's packages, for the run record.

    Raises:
        ValueError: Options that no plan can satisfy; names the value and the remedy.

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

    def __init__(
        self,
        collectives: Collectives,
        global_batch_size: int,
        options: SessionOptions,
        *,
        framework: str,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.collectives = collectives
        self.options = options
        self.order: GlobalOrder | None = None
        self._global_batch_size = global_batch_size
        self._policy = options.choose_policy()
        self._framework = framework
        self._versions = dict(versions or {})
        self._record: RunRecord | None = None
        self._balancer = self._make_balancer(lag=1)
        self._meter = StepMeter()
        self._peers: list[list[int]] | None = None
        self._stop_requested = False

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

    # The data.

    def make_order(self, num_samples: int, seed: int | None = None) -> GlobalOrder:
        """Makes the order of `num_samples` samples; its seed defaults to that of the options.

        Raises:
            ValueError: Fewer samples than one global batch.
        """
        return self.balancer.make_order(num_samples, self.options.seed if seed is None else seed)

    def use_order(self, order: GlobalOrder) -> None:
        """Lets the steps from the running one on hold the samples of `order`."""
        self.balancer.use_order(order)
        self.order = order

    def local_indices(self, step: int) -> Indices:
        """Returns this worker's samples of global step `step`, int64, shape ``(samples,)``.

        Raises:
            LookupError: No order, or a step whose plan is not decided yet.
        """
        return self.balancer.local_indices(step)

    def begin_epoch(self, epoch: int) -> None:
        """Moves to the start of an epoch: the next one, or ahead to `epoch` of the order."""
        self.balancer.begin_epoch(epoch)
        self.exclude_step()

    def skip_step(self) -> None:
        """Moves on by a step without an exchange, where one worker trains alone."""
        self.balancer.skip_to(self.balancer.step + 1)

    # Agreement.

    def start(self, facts: Mapping[str, int]) -> None:
        """Starts the training: workers agree on what never changes, and introduce their costs.

        Every worker calls it at the same time, before the first step of a fit.

        Args:
            facts: Facts of the plugin's own that must be the same on all workers.

        Raises:
            DisagreementError: Names the fact, the ranks and their values.
        """
        peers = handshake.agree(self._balancer, self.order, self.collectives, facts)
        self._open_meter()
        path = self.options.record_path()
        if self.rank == 0 and path is not None and self._record is None:
            self._record = open_record(path, self._header())
            self._balancer.record_to(self._record)
        self.exclude_step()
        self._peers = peers  # last: what failed before has not started

    def check_same(self, name: str, value: int) -> None:
        """Compares a fact among all workers; a collective.

        Raises:
            DisagreementError: Names the fact, the ranks and their values.
        """
        compare_facts([name], self.collectives.all_gather([value]))

    def any_worker(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any worker; a collective."""
        return any(row[0] for row in self.collectives.all_gather([int(flag)]))

    # A step.

    def begin_step(self) -> None:
        """Restarts the clock before an excluded step, where the plugin knows when one begins."""
        self._meter.begin_step()

    def before_allreduce(self) -> Row:
        """Measures and predicts: this worker has computed its gradient.

        Returns:
            This worker's message, shape ``(WIDTH,)`` float32. It is piggybacked on the gradient
            all-reduce: each worker contributes its row to a ``(workers, WIDTH)`` array of zeros.
        """
        return self._report(self._take_flags())

    def after_allreduce(self, rows: Iterable[Iterable[float]]) -> None:
        """Allocates: from the messages of all workers to the plan of step + lag.

        Args:
            rows: Messages by rank, shape ``(workers, WIDTH)``, the same on every worker.

        Raises:
            DisagreementError: A worker has computed another plan.
        """
        wall_seconds = self._meter.leave()  # what follows belongs to the next step
        self._receive([decode(row) for row in rows], wall_seconds)

    def excluded_wait(self) -> AbstractContextManager[None]:
        """Excludes the time inside the context, a collective within the step, from busy time."""
        return self._meter.excluded_wait()

    def begin_wait(self) -> None:
        """Starts an `excluded_wait` where no context manager can be used (inside a graph)."""
        self._meter.begin_wait()

    def end_wait(self) -> None:
        """Ends what `begin_wait` has started."""
        self._meter.end_wait()

    def exclude_step(self) -> None:
        """Excludes the running step from what is learned: it holds work that others do not."""
        self._meter.exclude_step()

    # The end.

    def request_stop(self) -> None:
        """Asks all workers to stop; the next exchange says so, then `stopping` is true on all."""
        self._stop_requested = True

    @property
    def stop_requested(self) -> bool:
        """Request to stop of this worker that the others do not know of yet."""
        return self._stop_requested

    @property
    def stopping(self) -> bool:
        """Request to stop of any worker, known to all of them after the same step."""
        return self.balancer.stopping

    def state(self) -> BalancerState:
        """Returns what `restore` needs to continue from here."""
        return self.balancer.state()

    def restore(self, state: BalancerState) -> None:
        """Continues where `state` was taken; before the first step."""
        self._replace_balancer(state, self.balancer.lag)

    def close(self) -> None:
        """Ends a fit: stops sampling, drops a request to stop. `start` begins the next one."""
        self._meter.close()
        self._stop_requested = False

    def _make_balancer(self, lag: int) -> Balancer:
        options = self.options
        balancer = Balancer(
            rank=self.rank,
            workers=self.workers,
            global_batch_size=self._global_batch_size,
            policy=self._policy,
            predictor=options.predictor,
            cost=options.cost,
            limits=options.limits,
            granularity=options.granularity,
            lag=lag,
        )
        balancer.record_to(self._record)
        return balancer

    def _replace_balancer(self, state: BalancerState, lag: int) -> None:
        """Continues from `state` with another lag: predictors are made for a horizon."""
        self._balancer = self._make_balancer(lag)
        if self._peers is not None:
            self._balancer.set_peers(self._peers)
        self._balancer.restore(state)
        if self.order is not None:
            self._balancer.use_order(self.order)

    def _open_meter(self) -> None:
        """Starts to sample resources, on the cores that are in use now."""
        if not self._meter.is_open:
            names = self.options.choose_drivers(self._policy)
            self._meter.open(names if self.workers > 1 else ())

    def _take_flags(self) -> StepFlags:
        return StepFlags(self._meter.take_excluded(), self._stop_requested)

    def _report(self, flags: StepFlags) -> Row:
        busy_seconds, drivers = self._meter.reach()
        message = self._balancer.report(
            busy_seconds, excluded=flags.excluded, stop=flags.stop, drivers=drivers
        )
        return encode(message)

    def _receive(self, messages: Sequence[StepMessage], wall_seconds: float) -> None:
        balancer = self._balancer
        if logger.isEnabledFor(logging.DEBUG):
            _log_waits(balancer.step, messages, wall_seconds)
        balancer.receive(messages, wall_seconds)
        if balancer.stopping:
            self._stop_requested = False  # all workers know of it

    def _header(self) -> RunHeader:
        balancer, order = self._balancer, self.order
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
        )


def _log_waits(step: int, messages: Sequence[StepMessage], wall_seconds: float) -> None:
    """Logs who waited for whom in a step, and how long."""
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
