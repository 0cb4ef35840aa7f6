"""Plain BSP: equal batches for all workers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from lbbsp_core.policy.base import Observation, Policy
from lbbsp_core.policy.constraints import BatchConstraints, Sizes
from lbbsp_core.policy.fixed_shares import FixedShares, FixedState


@dataclass(frozen=True, slots=True)
class Even(Policy[FixedState]):
    """Equal batches, ``x_i = X / N``, as nearly as integers, limits and granularity allow.

    This is the plan of plain BSP and the first plan of all policies that adapt.

    Example:
        >>> from lbbsp_core import Limits
        >>> Even().init(BatchConstraints(8, (Limits(),) * 3)).sizes
        (3, 3, 2)
    """

    is_static: ClassVar[bool] = True

    def init(self, constraints: BatchConstraints) -> FixedState:
        """Returns the even plan."""
        return FixedShares((1.0,) * constraints.workers).init(constraints)

    def update(
        self, state: FixedState, constraints: BatchConstraints, observation: Observation
    ) -> FixedState:
        """Returns `state`: the plan never changes."""
        return state


@lru_cache(maxsize=8)
def even_plan(constraints: BatchConstraints) -> Sizes:
    """Returns the plan of `Even`, which is needed in each step."""
    return Even().init(constraints).sizes
