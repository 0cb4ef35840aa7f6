"""Notices, each given once, that defaults bound the batches, and what to do about it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lbbsp_core.cost import Cost, slowest
from lbbsp_core.policy import BatchConstraints, Sizes
from lbbsp_core.runtime.loop.balancer import Balancer

logger = logging.getLogger("lbbsp.session")

PATIENCE: Final = 20
"""Consecutive plans at the default maximum after which it is reported."""

SHORT_STEPS: Final = 50
"""Measured steps after which it is reported that they are short."""

_LOOK_EVERY = 10
"""Steps between looks at what short steps cost: a look takes some percent of a short step."""

_NOTABLE = 0.5
"""Fraction of even shares, T / D, up to which bounds of short steps are reported at once."""

_NOTABLE_LOSS = 0.25
"""Predicted loss of steps, because of these bounds, from which on they are reported, too."""

_NOTABLE_COARSENESS = 0.02
"""Predicted loss of steps, because of the granularity, from which on it is reported."""


class BoundsNotice:
    """Warns once each that the default maximum or the granularity costs speed, and of short steps.

    Worker 0 calls `check` after each step.
    """

    def __init__(self) -> None:
        self._plans_at_maximum: dict[int, int] = {}  # consecutive ones, by rank
        self._short_plans = 0  # consecutive plans with bounds of short steps
        self._slower_looks = 0  # consecutive looks at plans that cost notably more for them
        self._coarse_looks = 0  # the same of the granularity
        self._granularity_reported = False
        self._maximum_reported = False
        self._short_reported = False

    def check(self, balancer: Balancer) -> None:
        """Gives the notices that are due after a step."""
        if not self._maximum_reported and balancer.default_maximum is not None:
            self._check_maximum(balancer, balancer.default_maximum)
        if not self._short_reported:
            self._check_short_steps(balancer)
        is_default = balancer.constraints.granularity != balancer.given_constraints.granularity
        if not self._granularity_reported and is_default:
            self._check_granularity(balancer)

    def _check_maximum(self, balancer: Balancer, maximum: int) -> None:
        sizes, _ = balancer.latest_plan
        self._plans_at_maximum = {
            rank: self._plans_at_maximum.get(rank, 0) + 1
            for rank, limits in enumerate(balancer.known_limits)
            if limits.maximum is None and sizes[rank] == maximum
        }
        ranks = [rank for rank, plans in self._plans_at_maximum.items() if plans >= PATIENCE]
        if not ranks:
            return
        self._plans_at_maximum = {}
        loss = ""
        if known := _known_costs(balancer):
            free = _free_plan(balancer, known)
            ranks = [rank for rank in ranks if free[rank] > maximum]
            loss = _describe_loss(known, sizes, free, ranks)
        if ranks:
            self._maximum_reported = True
            self._report_maximum(balancer, ranks, maximum, loss)

    def _report_maximum(
        self, balancer: Balancer, ranks: Sequence[int], maximum: int, loss: str
    ) -> None:
        why = (
            "what other workers' memory leaves"
            if balancer.is_maximum_raised
            else "twice an even share"
        )
        logger.warning(
            "worker %s has had %d samples in each of %d steps, the largest batch by default (%s), "
            "because its memory is not known%s: if larger batches fit into the "
            "memory of the workers, pass limits=lbbsp_core.Limits(1, %d), or the largest batch "
            "that fits instead of %d",
            ", ".join(map(str, ranks)),
            maximum,
            PATIENCE,
            why,
            loss,
            *(balancer.constraints.global_batch_size,) * 2,
        )

    def _check_short_steps(self, balancer: Balancer) -> None:
        short = balancer.short_steps
        if short.seconds is None or short.fraction == 1:
            self._short_plans = self._slower_looks = 0
            return
        self._short_plans += 1
        if short.steps < SHORT_STEPS:
            return
        are_very_short = short.fraction <= _NOTABLE
        if not are_very_short and self._short_plans % _LOOK_EVERY:
            return
        loss = _loss_of_short_steps(balancer)
        self._slower_looks = self._slower_looks + 1 if loss >= _NOTABLE_LOSS else 0
        if not are_very_short and self._slower_looks * _LOOK_EVERY < PATIENCE:
            return
        self._short_reported = True
        longer = f", so that by the forecasts steps take {loss:.0%} longer"
        logger.warning(
            "steps take %s ms, too short to measure the speeds of workers by: batches stay "
            "within %s %% of even shares until steps take %s ms%s; a larger global_batch_size "
            "makes them longer, and short_step_seconds=0 lets batches follow any measurement",
            _rounded(short.seconds * 1e3),
            _rounded(short.fraction * 100),
            _rounded(short.threshold_seconds * 1e3),
            longer if loss >= _NOTABLE_LOSS else "",
        )

    def _check_granularity(self, balancer: Balancer) -> None:
        if balancer.step % _LOOK_EVERY:
            return
        coarse, loss = balancer.constraints, 0.0
        if known := _known_costs(balancer):
            loss = _loss(known, coarse.plan(known), replace(coarse, granularity=1).plan(known))
        self._coarse_looks = self._coarse_looks + 1 if loss >= _NOTABLE_COARSENESS else 0
        if self._coarse_looks * _LOOK_EVERY >= PATIENCE:
            self._granularity_reported = True
            logger.warning(
                "batches are multiples of %d samples, with which by the forecasts steps take "
                "%.1f %% longer: a larger global_batch_size makes that less, and granularity=1 "
                "lets batches follow speeds exactly",
                coarse.granularity,
                loss * 100,
            )


def _loss_of_short_steps(balancer: Balancer) -> float:
    """Returns how much longer steps are predicted to take than without bounds of short steps."""
    known = _known_costs(balancer)
    sizes, _ = balancer.latest_plan
    return _loss(known, sizes, balancer.constraints.plan(known)) if known else 0.0


def _known_costs(balancer: Balancer) -> list[Cost]:
    """Returns the predicted costs of all workers; nothing while any of them is missing."""
    _, costs = balancer.latest_plan
    known = [cost for cost in costs if cost is not None]
    return known if len(known) == len(costs) else []


def _loss(costs: Sequence[Cost], sizes: Sizes, better: Sizes) -> float:
    """Returns how much longer a step takes with a plan than with a better one."""
    return slowest(costs, sizes) / slowest(costs, better) - 1


def _rounded(value: float) -> str:
    """Returns a number with digits that do not say 0 for a small one."""
    return f"{value:.0f}" if value >= 1 else f"{value:.1g}"


def _free_plan(balancer: Balancer, costs: Sequence[Cost]) -> Sizes:
    """Returns the plan for predicted costs without the default maximum."""
    old = balancer.constraints
    limits = balancer.known_limits
    return BatchConstraints(old.global_batch_size, limits, old.granularity).plan(costs)


def _describe_loss(costs: Sequence[Cost], sizes: Sizes, free: Sizes, ranks: Sequence[int]) -> str:
    """Returns a phrase that says how much longer steps take than without the maximum."""
    wanted = ", ".join(str(free[rank]) for rank in ranks)
    longer = _loss(costs, sizes, free)
    return f"; its speed is that of {wanted} samples, and steps take {longer:.0%} longer"
