"""LB-BSP: batch sizes follow predicted speeds so that all workers finish together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.cost import Cost, Proportional, slowest
from lbbsp_core.policy.base import BatchConstraints, Observation, Policy, Sizes
from lbbsp_core.policy.even import Even
from lbbsp_core.policy.first_uses import extra_seconds, plan_of_used_sizes
from lbbsp_core.validate import require_fraction, require_integer


class LoadBalancedState(NamedTuple):
    """State of `LoadBalanced`.

    Args:
        sizes: Plan in force.
        missed_seconds: What plans with new sizes would have gained since one was last adopted.
    """

    sizes: Sizes
    missed_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadBalanced(Policy[LoadBalancedState]):
    r"""LB-BSP (Chen et al., arXiv 1806.02508): minimise ``max_i Gamma_i(x_i)``, ``sum x_i = X``.

    Gamma_i(x) is the batch-time curve of worker i at its *predicted* speed; the exact integer
    minimiser is `lbbsp_core.allocate`. On CPUs the curve is ``x / v_i``, and the minimum is at
    ``x_i = X v_i / sum v``.

    Paper: plans in every iteration and adopts every change. Ours: adopts a change only if the
    predicted step becomes shorter by more than `min_gain`, since noise would otherwise move
    samples without benefit (``min_gain=0, interval=1`` is the paper's mode). A plan that narrower
    limits do not allow is replaced at once, without predictions by one in its proportions.

    Ours, too: where the first step with a new batch size takes longer (`FirstUses`), the best plan
    of sizes that all workers have run is adopted instead, and a plan with a new size only once the
    gains that were missed without it add up to its price (rent or buy), at once if it gains as much
    in a step. ``min_gain=0`` has no such price.

    Args:
        min_gain: Minimum relative drop of the predicted step time, in [0, 1).
        interval: Steps between decisions, an integer >= 1.

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> from lbbsp_core import Limits, Proportional
        >>> policy, constraints = LoadBalanced(), BatchConstraints(12, (Limits(), Limits()))
        >>> state = policy.init(constraints)
        >>> state.sizes
        (6, 6)
        >>> costs = (Proportional(20.0), Proportional(10.0))  # predicted samples per second
        >>> ran = Observation(0, (6, 6), (0.3, 0.6), (), costs)
        >>> policy.update(state, constraints, ran).sizes
        (8, 4)

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch Sizing,
        arXiv 1806.02508, 2018.
    """

    uses_costs: ClassVar[bool] = True
    accepts_narrower_limits: ClassVar[bool] = True

    min_gain: float = 0.02
    interval: int = 1

    def __post_init__(self) -> None:
        require_fraction("min_gain", self.min_gain)
        require_integer("interval", self.interval, 1)

    def init(self, constraints: BatchConstraints) -> LoadBalancedState:
        """Returns the even plan, which stays until every worker has been measured."""
        return LoadBalancedState(Even().init(constraints).sizes)

    def update(
        self, state: LoadBalancedState, constraints: BatchConstraints, observation: Observation
    ) -> LoadBalancedState:
        """Adopts the best plan for the predicted costs if it gains more than `min_gain`."""
        costs = observation.known_costs()
        if not constraints.allow(state.sizes):  # limits have become narrower
            if costs is None:
                costs = [Proportional(max(size, 1)) for size in state.sizes]
            return LoadBalancedState(constraints.plan(costs))
        if costs is None or (observation.step + 1) % self.interval:
            return state
        best = constraints.plan(costs)
        if not (gain := self._gain(costs, state.sizes, best)):
            return state
        first_uses = observation.first_uses
        price = extra_seconds(first_uses, best) if self.min_gain else 0.0
        if price <= gain:  # as on CPUs, where it is noise
            return LoadBalancedState(best, 0.0 if price else state.missed_seconds)
        below = (1 - self.min_gain) * slowest(costs, state.sizes)
        sizes = plan_of_used_sizes(first_uses, constraints, costs, best, below) or state.sizes
        missing = self.interval * self._gain(costs, sizes, best)
        missed = state.missed_seconds + missing
        if missing and missed >= price:
            return LoadBalancedState(best)
        return LoadBalancedState(sizes, missed)

    def _gain(self, costs: Sequence[Cost], old: Sizes, new: Sizes) -> float:
        """Returns by how much the predicted step becomes shorter; 0 if not by `min_gain`."""
        now = slowest(costs, old)
        gain = now - slowest(costs, new)
        return gain if gain > self.min_gain * now else 0.0
