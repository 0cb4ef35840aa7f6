"""Notices why batches do not follow speeds, and what to do about it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lbbsp_core.cost import Cost, slowest
from lbbsp_core.policy import Notices, Sizes
from lbbsp_core.runtime.exchange.protocol import StepMessage
from lbbsp_core.runtime.extensions.base import Extra, Session, StepExtension
from lbbsp_core.runtime.planning.balancer import Balancer
from lbbsp_core.runtime.record.record import StepLine

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


class BoundsNotice(StepExtension):
    """Warns of what the maximum and the granularity cost, and of short steps, once each.

    It also passes on the notices of the policy. Worker 0 does so, after each step.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._streaks: dict[int | str, int] = {}  # consecutive steps or looks in which it held
        self._checks = [self._check_maximum, self._check_short_steps, self._check_granularity]
        self._notices = Notices()

    def received(self, line: StepLine, extra: Extra, messages: Sequence[StepMessage]) -> StepLine:
        """Gives the notices that are due after a step."""
        if self.session.rank == 0 and self.session.workers > 1:
            self.check(self.session.balancer)
        return line

    def check(self, balancer: Balancer) -> None:
        """Gives the notices that are due about the latest plan of a `Balancer`."""
        for check in tuple(self._checks):
            if text := check(balancer):
                self._checks.remove(check)
                logger.warning("%s", text)
        if text := self._notices.of(
            balancer.policy_state, f"step {balancer.step + balancer.schedule.lag - 1}"
        ):
            logger.log(self._notices.level, "%s", text)

    def _streak(self, subject: int | str, *, holds: bool) -> int:
        """Returns how often in a row something has held, with this time."""
        self._streaks[subject] = self._streaks.get(subject, 0) + 1 if holds else 0
        return self._streaks[subject]

    def _check_maximum(self, balancer: Balancer) -> str:
        maximum, (sizes, _) = balancer.bounds.default_maximum, balancer.schedule.latest_plan
        ranks = [
            rank
            for rank, limits in enumerate(balancer.bounds.required.limits)
            if self._streak(rank, holds=limits.maximum is None and sizes[rank] == maximum)
            >= PATIENCE
        ]
        if maximum is None or not ranks:
            return ""
        self._streaks.update(dict.fromkeys(range(len(sizes)), 0))
        loss, constraints = "", balancer.constraints
        if costs := _known_costs(balancer):
            free = replace(constraints, limits=balancer.bounds.required.limits).plan(costs)
            ranks = [rank for rank in ranks if free[rank] > maximum]
            batches = ", ".join(str(free[rank]) for rank in ranks)
            loss = (
                f"; its speed is that of {batches} samples, and steps take "
                f"{_loss(costs, sizes, free):.0%} longer"
            )
        if not ranks:
            return ""
        is_raised = balancer.bounds.is_maximum_raised
        why = "what other workers' memory leaves" if is_raised else "twice an even share"
        total = constraints.global_batch_size
        return (
            f"worker {', '.join(map(str, ranks))} has had {maximum} samples in each of {PATIENCE} "
            f"steps, the largest batch by default ({why}), because its memory is not known{loss}: "
            "if larger batches fit into the memory of the workers, pass "
            f"limits=lbbsp_core.Limits(1, {total}), or the largest batch that fits instead of "
            f"{total}"
        )

    def _check_short_steps(self, balancer: Balancer) -> str:
        short = balancer.bounds.short_steps
        seconds = short.seconds if short.fraction < 1 else None
        plans = self._streak("bounded", holds=seconds is not None)
        if seconds is None:
            self._streaks["slower"] = 0
        if seconds is None or short.steps < SHORT_STEPS:
            return ""
        are_very_short = short.fraction <= _NOTABLE
        if not are_very_short and plans % _LOOK_EVERY:
            return ""
        loss = _loss_of_short_steps(balancer)
        looks = self._streak("slower", holds=loss >= _NOTABLE_LOSS)
        if not are_very_short and looks * _LOOK_EVERY < PATIENCE:
            return ""
        longer = f", so that by the forecasts steps take {loss:.0%} longer"
        return (
            f"steps take {_rounded(seconds * 1e3)} ms, too short to measure the speeds of "
            f"workers by: batches stay within {_rounded(short.fraction * 100)} % of even shares "
            f"until steps take {_rounded(short.threshold_seconds * 1e3)} ms"
            f"{longer if looks else ''}; a larger global_batch_size makes them longer, and "
            "short_step_seconds=0 lets batches follow any measurement"
        )

    def _check_granularity(self, balancer: Balancer) -> str:
        coarse = balancer.constraints
        is_given = coarse.granularity == balancer.bounds.initial.granularity
        if is_given or balancer.step % _LOOK_EVERY:
            return ""
        loss = 0.0
        if costs := _known_costs(balancer):
            loss = _loss(costs, coarse.plan(costs), replace(coarse, granularity=1).plan(costs))
        looks = self._streak("coarse", holds=loss >= _NOTABLE_COARSENESS)
        if looks * _LOOK_EVERY < PATIENCE:
            return ""
        return (
            f"batches are multiples of {coarse.granularity} samples, with which by the forecasts "
            f"steps take {loss * 100:.1f} % longer: a larger global_batch_size makes that less, "
            "and granularity=1 lets batches follow speeds exactly"
        )


def _loss_of_short_steps(balancer: Balancer) -> float:
    """Returns how much longer steps are predicted to take than without bounds of short steps."""
    costs = _known_costs(balancer)
    sizes, _ = balancer.schedule.latest_plan
    return _loss(costs, sizes, balancer.constraints.plan(costs)) if costs else 0.0


def _known_costs(balancer: Balancer) -> list[Cost]:
    """Returns the predicted costs of all workers; nothing while any of them is missing."""
    _, costs = balancer.schedule.latest_plan
    known_costs = [cost for cost in costs if cost is not None]
    return known_costs if len(known_costs) == len(costs) else []


def _loss(costs: Sequence[Cost], sizes: Sizes, better: Sizes) -> float:
    """Returns how much longer a step takes with a plan than with a better one."""
    return slowest(costs, sizes) / slowest(costs, better) - 1


def _rounded(value: float) -> str:
    """Returns a number with digits that do not say 0 for a small one."""
    return f"{value:.0f}" if value >= 1 else f"{value:.1g}"
