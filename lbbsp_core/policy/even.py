"""Plain BSP: the same batch for everybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lbbsp_core.policy.base import Cluster, Observation
from lbbsp_core.policy.fixed_shares import FixedShares, FixedState


@dataclass(frozen=True, slots=True)
class Even:
    """``x_i = X / N`` as nearly as integers, limits and granularity allow.

    Example:
        >>> from lbbsp_core import Limits
        >>> Even().init(Cluster(8, (Limits(),) * 3)).sizes
        (3, 3, 2)
    """

    uses_costs: ClassVar[bool] = False

    def init(self, cluster: Cluster) -> FixedState:
        """The even plan."""
        return FixedShares((1.0,) * cluster.workers).init(cluster)

    def update(self, state: FixedState, cluster: Cluster, observation: Observation) -> FixedState:
        """Nothing ever changes."""
        return state
