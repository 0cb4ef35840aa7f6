"""Plans of the steps that are drawn, and the samples that each worker has by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lbbsp_core.cost import Cost
from lbbsp_core.order import Indices, Order, Snapshot
from lbbsp_core.policy import BatchConstraints, Sizes
from lbbsp_core.reserve import Split, split
from lbbsp_core.runtime.loop import bounds as chain
from lbbsp_core.sampled_order import order_of
from lbbsp_core.types import Limits
from lbbsp_core.work import StepShares, require_work


class _Plan(NamedTuple):
    """A plan, the predicted costs for which it was made, and the bounds of its cut by work."""

    sizes: Sizes
    costs: Sequence[Cost | None]
    constraints: BatchConstraints


class Schedule:
    """Knows the constraints, the order and the plans of ``lag`` steps; a `Balancer` decides them.

    Args:
        rank: Number of this worker, in [0, workers).
        lag: Steps between a plan's decision and its use, >= 1.
        parts: Parts into which each worker cuts its batch.
        trace: Constraints after each bound, see `lbbsp_core.runtime.loop.bounds`.
    """

    def __init__(self, rank: int, lag: int, parts: int, trace: chain.Trace) -> None:
        self.rank = rank
        self._use_bounds(trace)
        self.workers = self.constraints.workers
        self.step = 0
        self.parts = parts
        self._order: Order | None = None
        self._order_start = 0
        self._plans: dict[int, _Plan] = {}
        self._percents: dict[int, int] = {}
        self._set_lag(lag)

    def _use_bounds(self, trace: chain.Trace) -> None:
        """Sets the constraints of all plans; the next plan may have narrower ones."""
        self.trace, self.constraints = trace, chain.last(trace)
        self._required = chain.required(trace)

    @property
    def default_maximum(self) -> int | None:
        """Largest batch of a worker whose memory is not known; None: there is no such bound."""
        return chain.default_maximum_of(self.trace)

    @property
    def is_maximum_raised(self) -> bool:
        """Whether other workers' maxima leave no plan within the usual default maximum."""
        return (self.default_maximum or 0) > chain.usual_maximum(self.constraints)

    @property
    def known_limits(self) -> tuple[Limits, ...]:
        """Limits by rank without the default maximum."""
        return self._required.limits

    @property
    def latest_plan(self) -> tuple[Sizes, Sequence[Cost | None]]:
        """Plan that was decided last, and the predicted costs for which it was."""
        plan = self._plans[self.step + self.lag - 1]
        return plan.sizes, plan.costs

    def _set_lag(self, lag: int) -> None:
        """Changes the lag; plans that are decided stay, and the last one is repeated."""
        if lag < 1:
            raise ValueError(
                f"lag must be >= 1, got {lag}: a plan cannot apply to the step after which it is "
                "decided"
            )
        latest = self._plans.get(max(self._plans, default=0))
        steps = range(self.step, self.step + lag)
        self._plans = {step: self._plans.get(step, latest) for step in steps} if latest else {}
        self.lag = lag

    def _use_plans(self, plans: Sequence[Sizes]) -> None:
        """Uses plans from the running step on, and the last one for all later steps."""
        known = [self._plan(sizes, (None,) * self.workers) for sizes in plans]
        self._plans = {self.step + i: known[min(i, len(known) - 1)] for i in range(self.lag)}

    def _plan(self, sizes: Sizes, costs: Sequence[Cost | None]) -> _Plan:
        # The default maximum does not bound the cut: many small samples may have a plan's work.
        return _Plan(sizes, costs, self._required)

    def _are_allowed(self, plans: Iterable[Sizes]) -> bool:
        # Noise of layers depends on plans: those that have run are to stay.
        return all(map(self._required.allow, plans))

    def use_order(self, order: Order) -> None:
        """Plans for the steps of `order`; an order other than the last one starts at this step.

        Raises:
            ValueError: `Limits.maximum_work` is given and cannot be kept.
        """
        require_work(order.work, self.constraints.limits, self.constraints.global_batch_size)
        if self._order is None or order != self._order:
            self._order_start = self.step
        elif order is not self._order:
            order.adopt(self._order)
        self._order = order

    def local_indices(self, step: int) -> Indices:
        """Returns this worker's samples of a global step, int64, shape ``(sizes(step)[rank],)``.

        Raises:
            LookupError: There is no order, or the plan of the step is not decided yet.
        """
        if self.workers == 1 and self._order:  # without plans: may be drawn ahead without limit
            return self._order.indices(self.step_of_order(step))
        return self._slice(step, self.rank)

    def reserve_indices(self, step: int) -> Indices:
        """Returns the samples of a global step that its plan assigns to no worker."""
        return self._slice(step, self.workers)

    def _slice(self, step: int, part: int) -> Indices:
        """Returns a part of a step: that of a worker, or the reserve behind all of them."""
        if self._order is None:
            raise LookupError("there is no order to draw samples from: call use_order() first")
        mains, reserve = self.split(step)
        return self._order.slice(self.step_of_order(step), part, [*mains, reserve])

    def split(self, step: int) -> Split:
        """Returns the plan of a step, divided into main parts and a reserve.

        Raises:
            LookupError: The plan of the step is not decided yet, or no longer stored.
        """
        return split(self.sizes(step), self.percent(step), self.constraints.granularity)

    def percent(self, step: int) -> int:
        """Returns the fraction of a step that is kept back for its reserve."""
        return self._percents.get(step, 0)

    def keep_back(self, step: int, percent: int) -> None:
        """Keeps a fraction of a step back for its reserve, the same on all workers."""
        known = {at: kept for at, kept in self._percents.items() if at >= self.step}
        self._percents = {**known, step: percent}

    def keep_nothing_back(self) -> None:
        """Leaves all known steps without a reserve."""
        self._percents = {}

    def step_of_order(self, step: int) -> int:
        """Returns the number of a global step, counted from the start of the order."""
        return step - self._order_start

    def begin_epoch(self, epoch: int) -> None:
        """Moves to the start of the next epoch, or ahead to epoch `epoch` of the order.

        The rest of an unfinished epoch is skipped.
        """
        if self._order is not None:
            per_epoch = self._order.steps_per_epoch
            done = -((self._order_start - self.step) // per_epoch)
            self.skip_to(self._order_start + max(done, epoch) * per_epoch)

    def skip_to(self, step: int) -> None:
        """Skips to global step `step`; keeps the latest plan and the state of the predictor."""
        if step > self.step:
            latest = self._plan(*self.latest_plan)
            self.step = step
            self._plans = dict.fromkeys(range(step, step + self.lag), latest)

    def epoch_end_step(self, step: int | None = None, epochs: int = 1) -> int:
        """Returns the first global step after the epoch of a step, or after that many epochs.

        Defaults to the running step.

        Raises:
            LookupError: There is no order.
        """
        if self._order is None:
            raise LookupError("there are no epochs without an order: call use_order() first")
        per_epoch = self._order.steps_per_epoch
        done = self.step_of_order(self.step if step is None else step) // per_epoch
        return self._order_start + (done + epochs) * per_epoch

    def sizes(self, step: int) -> Sizes:
        """Returns the samples of each worker in global step `step`, by rank.

        Plans are known ``lag - 1`` steps ahead. Where the work of samples is known, a plan divides
        the work of the step, and these are the samples that have it.

        Raises:
            LookupError: The plan of the step is not decided yet, or no longer stored.
            ValueError: The step cannot be divided within `Limits.maximum_work`.
        """
        return self._shares(step).sizes

    def _shares(self, step: int) -> StepShares:
        if step not in self._plans:
            raise LookupError(
                f"plans are known for steps {self.step} to {self.step + self.lag - 1}, not for "
                f"step {step}: a plan decided after step k applies to step k + {self.lag}"
            )
        plan, _, given = self._plans[step]
        if self._order is None:
            return StepShares(plan, plan, plan)
        in_order, parts = self.step_of_order(step), self.parts
        return self._order.shares(in_order, plan, given.limits, given.granularity, parts)

    def _place(self) -> tuple[int, Snapshot | None, int, tuple[Sizes, ...]]:
        """Returns the next step, the order, the step at which it started, and the plans."""
        order = self._order
        snapshot = order.snapshot(self.step_of_order(self.step)) if order else None
        plans = (self._plans[step].sizes for step in range(self.step, self.step + self.lag))
        return self.step, snapshot, self._order_start, tuple(plans)

    def _move_to(self, step: int, order: Snapshot | None, order_start: int) -> None:
        self.step, self._order_start = step, order_start
        self._order = order_of(order) if order else None
