"""Plans of the steps that are drawn, and the samples that each worker has by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lbbsp_core.cost import Cost
from lbbsp_core.order import Indices, Order, Snapshot
from lbbsp_core.policy import BatchConstraints, FirstUses, Sizes
from lbbsp_core.reserve import Split, split
from lbbsp_core.runtime.planning.bounds import BoundsChain
from lbbsp_core.runtime.planning.running_step import RunningStep
from lbbsp_core.sampled_order import order_of
from lbbsp_core.work import StepShares, require_work


class _Plan(NamedTuple):
    """A plan, the predicted costs for which it was made, and the bounds of its cut by work."""

    sizes: Sizes
    costs: Sequence[Cost | None]
    constraints: BatchConstraints


class Schedule:
    """Plans of the running step and the next ones, and their samples in an order with epochs.

    Args:
        rank: Number of this worker, in [0, workers).
        lag: Steps between a plan's decision and its use, >= 1.
        bounds: Constraints of the plans.

    Attributes:
        step: Global step that is running or comes next.
        lag: Plans are decided for so many steps.
        order: Samples of the steps, if they are known.
        reserves: Percent of a step that is kept back for its reserve, the same on all workers, by
            step; absent: 0.
    """

    def __init__(self, rank: int, lag: int, bounds: BoundsChain) -> None:
        self._rank, self._bounds = rank, bounds
        self._workers = bounds.constraints.workers
        self.step = 0
        self.order: Order | None = None
        self.reserves: dict[int, int] = {}
        self._order_start = 0
        self._plans: dict[int, _Plan] = {}
        self.use_lag(lag)

    @property
    def plans(self) -> tuple[Sizes, ...]:
        """Plans that are decided, from the running step on."""
        return tuple(plan.sizes for plan in self._plans.values())

    @property
    def latest_plan(self) -> tuple[Sizes, Sequence[Cost | None]]:
        """Plan that was decided last, and the predicted costs for which it was."""
        plan = self._plans[self.step + self.lag - 1]
        return plan.sizes, plan.costs

    def use_lag(self, lag: int) -> None:
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

    def use_plans(self, plans: Sequence[Sizes]) -> None:
        """Uses plans from the running step on, and the last one for all later steps."""
        costs = (None,) * self._workers
        self._plans = {
            self.step + ahead: self._plan(plans[min(ahead, len(plans) - 1)], costs)
            for ahead in range(self.lag)
        }

    def advance(self, sizes: Sizes, costs: Sequence[Cost | None]) -> None:
        """Ends the running step with the plan of ``step + lag``, and the costs for which it is."""
        self._plans[self.step + self.lag] = self._plan(sizes, costs)
        del self._plans[self.step]
        self.reserves.pop(self.step, None)
        self.step += 1

    def _plan(self, sizes: Sizes, costs: Sequence[Cost | None]) -> _Plan:
        # The default maximum does not bound the cut: many small samples may have a plan's work.
        return _Plan(sizes, costs, self._bounds.required)

    def use_order(self, order: Order) -> None:
        """Plans for the steps of `order`; an order other than the last one starts at this step.

        Raises:
            ValueError: `Limits.maximum_work` is given and cannot be kept.
        """
        constraints = self._bounds.constraints
        require_work(order.work, constraints.limits, constraints.global_batch_size)
        if self.order is None or order != self.order:
            self._order_start = self.step
        elif order is not self.order:
            order.adopt(self.order)
        self.order = order

    def local_indices(self, step: int) -> Indices:
        """Returns this worker's samples of a global step, int64, shape ``(sizes(step)[rank],)``.

        Raises:
            LookupError: There is no order, or the plan of the step is not decided yet.
        """
        if self._workers == 1 and self.order:  # without plans: may be drawn ahead without limit
            return self.order.indices(self.step_of_order(step))
        return self._slice(step, self._rank)

    def reserve_indices(self, step: int) -> Indices:
        """Returns the samples of a global step that its plan assigns to no worker."""
        return self._slice(step, self._workers)

    def _slice(self, step: int, part: int) -> Indices:
        """Returns a part of a step: that of a worker, or the reserve behind all of them."""
        if self.order is None:
            raise LookupError("there is no order to draw samples from: call use_order() first")
        mains, reserve = self.split(step)
        return self.order.slice(self.step_of_order(step), part, [*mains, reserve])

    def split(self, step: int) -> Split:
        """Returns the plan of a step, divided into main parts and a reserve.

        Raises:
            LookupError: The plan of the step is not decided yet, or no longer stored.
        """
        percent = self.reserves.get(step, 0)
        return split(self.sizes(step), percent, self._bounds.constraints.granularity)

    def step_of_order(self, step: int) -> int:
        """Returns the number of a global step, counted from the start of the order."""
        return step - self._order_start

    def begin_epoch(self, epoch: int) -> None:
        """Moves to the start of the next epoch, or ahead to epoch `epoch` of the order.

        The rest of an unfinished epoch is skipped.
        """
        if self.order is not None:
            per_epoch = self.order.steps_per_epoch
            done = -((self._order_start - self.step) // per_epoch)
            self.skip_to(self._order_start + max(done, epoch) * per_epoch)

    def skip_to(self, step: int) -> None:
        """Skips to global step `step`; keeps the latest plan and the state of the predictor."""
        if step > self.step:
            latest = self._plan(*self.latest_plan)
            self.step = step
            self._plans = dict.fromkeys(range(step, step + self.lag), latest)
            self.reserves = {at: kept for at, kept in self.reserves.items() if at >= step}

    @property
    def ends_epoch(self) -> bool:
        """Whether the running step is the last one of an epoch."""
        return self.order is not None and self.step + 1 == self.epoch_end_step()

    def epoch_end_step(self, step: int | None = None, epochs: int = 1) -> int:
        """Returns the first global step after the epoch of a step, or after that many epochs.

        Defaults to the running step.

        Raises:
            LookupError: There is no order.
        """
        if self.order is None:
            raise LookupError("there are no epochs without an order: call use_order() first")
        per_epoch = self.order.steps_per_epoch
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

    def running_step(self, first_uses: tuple[FirstUses, ...]) -> RunningStep:
        """Returns the running step; `first_uses` are what is known of batches before it."""
        is_short = self.order is not None and self.order.is_short(self.step_of_order(self.step))
        costs = self._plans[self.step].costs
        return RunningStep(self.step, self._shares(self.step), costs, is_short, first_uses)

    def _shares(self, step: int) -> StepShares:
        if step not in self._plans:
            raise LookupError(
                f"plans are known for steps {self.step} to {self.step + self.lag - 1}, not for "
                f"step {step}: a plan decided after step k applies to step k + {self.lag}"
            )
        plan, _, constraints = self._plans[step]
        if self.order is None:
            return StepShares(plan, plan, plan)
        return self.order.shares(
            self.step_of_order(step),
            plan,
            constraints.limits,
            constraints.granularity,
            self._bounds.parts,
        )

    def place(self) -> tuple[int, Snapshot | None, int, tuple[Sizes, ...]]:
        """Returns the next step, the order, the step at which it started, and the plans."""
        snapshot = self.order.snapshot(self.step_of_order(self.step)) if self.order else None
        return self.step, snapshot, self._order_start, self.plans

    def move_to(self, step: int, order: Snapshot | None, order_start: int) -> None:
        """Continues at the place of a saved schedule; its plans are left to `use_plans`."""
        self.step, self._order_start = step, order_start
        self.order = order_of(order) if order else None
