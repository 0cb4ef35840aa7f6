"""LB-BSP: batch sizes follow predicted speeds so that all workers finish together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.cost import slowest
from lbbsp_core.policy.base import BatchConstraints, Observation, Sizes
from lbbsp_core.policy.even import Even


class LoadBalancedState(NamedTuple):
    """The plan in force."""

    sizes: Sizes


@dataclass(frozen=True, slots=True)
class LoadBalanced:
    r"""LB-BSP (Chen et al., arXiv 1806.02508): minimise ``max_i Gamma_i(x_i)``, ``sum x_i = X``.

    Each worker's curve Gamma_i carries its *predicted* speed; the exact integer minimiser is
    `lbbsp_core.allocate`. Paper: every iteration, and every change is adopted. Ours: a change
    is adopted only if it is worth it, since noise would otherwise move samples to no purpose
    (``min_gain=0, interval=1`` is the paper's mode).

    Args:
        min_gain: Least relative drop of the slowest predicted time for a new plan, in [0, 1).
        interval: Decide every so many steps, >= 1.

    Raises:
        ValueError: An option out of range.
    """

    uses_costs: ClassVar[bool] = True

    min_gain: float = 0.02
    interval: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.min_gain < 1:
            raise ValueError(f"min_gain must be in [0, 1), got {self.min_gain!r}")
        if self.interval < 1 or self.interval != int(self.interval):
            raise ValueError(f"interval must be an integer >= 1, got {self.interval!r}")

    def init(self, constraints: BatchConstraints) -> LoadBalancedState:
        """Even, until every worker has been measured."""
        return LoadBalancedState(Even().init(constraints).sizes)

    def update(
        self, state: LoadBalancedState, constraints: BatchConstraints, observation: Observation
    ) -> LoadBalancedState:
        """Adopts the best plan for the predicted costs, if it gains enough."""
        costs = observation.known_costs()
        if costs is None or (observation.step + 1) % self.interval:
            return state
        sizes = constraints.plan(costs)
        now, then = slowest(costs, state.sizes), slowest(costs, sizes)
        return LoadBalancedState(sizes) if now - then > self.min_gain * now else state
