"""A policy for comparisons of what is learned: uneven plans that change in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lbbsp_core.policy import FixedState


@dataclass(frozen=True)
class Cycle:
    """A policy whose plan changes every step, whatever is measured and forecast."""

    uses_costs = True
    is_static = False
    needs_common_steps = True
    accepts_narrower_limits = False

    plans: tuple[tuple[int, ...], ...]

    def init(self, cluster: Any) -> FixedState:
        """Returns the first plan."""
        return FixedState(self.plans[0])

    def update(self, state: FixedState, cluster: Any, observation: Any) -> FixedState:
        """Returns the plan of the next step."""
        return FixedState(self.plans[(observation.step + 1) % len(self.plans)])
