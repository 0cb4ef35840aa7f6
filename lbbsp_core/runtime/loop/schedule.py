"""Plans of the steps that are drawn, and the samples that each worker has by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lbbsp_core.cost import Cost
from lbbsp_core.order import Indices, Order
from lbbsp_core.policy import BatchConstraints, Sizes
from lbbsp_core.runtime.loop import bounds as chain
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
        workers: Number of workers, N.
        trace: Constraints after each bound, see `lbbsp_core.runtime.loop.bounds`.
        parts: Parts into which each worker cuts its batch.
    """

    lag: int
    """Steps between a plan's decision and its use."""

    def __init__(self, rank: int, workers: int, trace: chain.Trace, parts: int) -> None:
        self.rank, self.workers = rank, workers
        self.trace = trace
        """Constraints after each bound that is known; it changes with the facts of the peers."""
        self.step = 0
        self._parts = parts
        self._order: Order | None = None
        self._order_start = 0
        self._plans: dict[int, _Plan] = {}

    @property
    def constraints(self) -> BatchConstraints:
        """Constraints of all plans; the next plan may have narrower ones."""
        return chain.last(self.trace)

    @property
    def default_maximum(self) -> int | None:
        """Largest batch of a worker whose memory is not known; None: there is no such bound."""
        return chain.default_maximum_of(self.trace)

    @property
    def latest_plan(self) -> tuple[Sizes, Sequence[Cost | None]]:
        """Plan that was decided last, and the predicted costs for which it was."""
        plan = self._plans[self.step + self.lag - 1]
        return plan.sizes, plan.costs

    def _plan(self, sizes: Sizes, costs: Sequence[Cost | None]) -> _Plan:
        # The default maximum does not bound the cut: many small samples may have a plan's work.
        return _Plan(sizes, costs, self.trace[chain.granules.__name__])

    def _are_allowed(self, plans: Iterable[Sizes]) -> bool:
        # Not by the default maximum, which a policy of the user need not keep, and which says
        # nothing of what has run before. Noise of layers depends on plans.
        return all(map(self.trace[chain.granules.__name__].allow, plans))

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
        if self._order is None:
            raise LookupError("there is no order to draw samples from: call use_order() first")
        if self.workers == 1:  # independent of plans, so steps may be drawn ahead without limit
            return self._order.indices(self.step_of_order(step))
        return self._order.slice(self.step_of_order(step), self.rank, self.sizes(step))

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

    def epoch_end_step(self) -> int:
        """Returns the first global step after the running epoch of the order.

        Raises:
            LookupError: There is no order.
        """
        if self._order is None:
            raise LookupError("there are no epochs without an order: call use_order() first")
        per_epoch = self._order.steps_per_epoch
        done = (self.step - self._order_start) // per_epoch
        return self._order_start + (done + 1) * per_epoch

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
        in_order, parts = self.step_of_order(step), self._parts
        return self._order.shares(in_order, plan, given.limits, given.granularity, parts)
