"""LB-BSP: batch sizes follow predicted speeds so that all workers finish together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from lbbsp_core.cost import Cost, Proportional, least_slowest, slowest, slowest_instead
from lbbsp_core.policy.base import Observation, Policy
from lbbsp_core.policy.constraints import BatchConstraints, Sizes
from lbbsp_core.policy.even import even_plan
from lbbsp_core.policy.first_uses import extra_seconds, plan_of_used_sizes
from lbbsp_core.validate import require_fraction, require_integer

_MEMORY: Final = 1 - 1 / 100  # of the comparison with even batches, in steps
_FEWEST_STEPS: Final = 10  # before it counts
_CLEAR: Final = 0.003  # gain or loss, as a share of the time of even batches


class LoadBalancedState(NamedTuple):
    """State of `LoadBalanced`.

    Sums are of the compared steps; earlier ones count less and less.

    Args:
        sizes: Plan in force.
        missed_seconds: What plans with new sizes would have gained since one was last adopted.
        balanced: Balanced plans of the coming steps in order, whether in force or not.
        gained_seconds: By how much balanced plans were faster than even ones.
        even_seconds: Time of the even plans.
        compared_steps: Number of compared steps.
        turn: Share of the time of even batches that balance had gained when batches became even
            (< 0) or balanced again (> 0) the last time; 0 before.
    """

    sizes: Sizes
    missed_seconds: float = 0.0
    balanced: tuple[Sizes, ...] = ()
    gained_seconds: float = 0.0
    even_seconds: float = 0.0
    compared_steps: int = 0
    turn: float = 0.0

    @property
    def is_even(self) -> bool:
        """Whether batches are even because balance loses time."""
        return self.turn < 0

    @property
    def notice(self) -> str:
        """Says that batches are even because balance loses time, or that they were."""
        if not self.turn:
            return ""
        if self.is_even:
            return (
                "batches are even: by the times of the latest steps, balanced ones take "
                f"{_percent(-self.turn)} longer, because speeds change otherwise than predicted; "
                f"they are balanced again once that gains {_percent(_CLEAR)}"
            )
        return (
            "batches are balanced again: by the times of the latest steps, even ones take "
            f"{_percent(self.turn / (1 - self.turn))} longer"
        )


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

    Ours: where speeds change otherwise than predicted, a balanced plan may be slower than an even
    one. After each step, the measured times tell what both would have taken; once balanced plans
    were slower by 0.3 % over the latest steps (about 100), the plan is even until they are as much
    faster.

    Ours, too: where the first step with a new batch size takes longer (`FirstUses`), the best plan
    of sizes that all workers have run is adopted instead, and a plan with a new size only once the
    gains that were missed without it add up to its price (rent or buy), at once if it gains as much
    in a step. ``min_gain=0`` has neither such a price nor the comparison with even batches.

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
        return LoadBalancedState(even_plan(constraints))

    def update(
        self, state: LoadBalancedState, constraints: BatchConstraints, observation: Observation
    ) -> LoadBalancedState:
        """Adopts the best plan for the predicted costs if it gains more than `min_gain`."""
        plans = state.balanced or (state.sizes,)
        now = plans[-1] if state.is_even else state.sizes
        even = even_plan(constraints)
        if self.min_gain:
            state = _compared(state, plans[0], even, observation)
        balanced, missed = self._balance(now, state.missed_seconds, constraints, observation)
        return state._replace(
            sizes=even if state.is_even else balanced,
            missed_seconds=missed,
            balanced=(*plans, balanced)[-observation.lag :],
        )

    def _balance(
        self, now: Sizes, missed: float, constraints: BatchConstraints, observation: Observation
    ) -> tuple[Sizes, float]:
        """Returns the next balanced plan, and what plans with new sizes would have gained."""
        costs = observation.known_costs()
        if not constraints.allow(now):  # limits have become narrower
            if costs is None:
                costs = [Proportional(max(size, 1)) for size in now]
            return constraints.plan(costs), 0.0
        if costs is None or (observation.step + 1) % self.interval:
            return now, missed
        bound = (1 - self.min_gain) * slowest(costs, now)
        minima = [bounds.minimum for bounds in constraints.limits]
        if bound <= least_slowest(costs, constraints.global_batch_size, minima):
            return now, missed  # no plan gains enough
        best = constraints.plan(costs)
        if not (gain := self._gain(costs, now, best)):
            return now, missed
        first_uses = observation.first_uses
        price = extra_seconds(first_uses, best) if self.min_gain else 0.0
        if price <= gain:  # as on CPUs, where it is noise
            return best, 0.0 if price else missed
        sizes = plan_of_used_sizes(first_uses, constraints, costs, best, bound) or now
        missing = self.interval * self._gain(costs, sizes, best)
        if missing and missed + missing >= price:
            return best, 0.0
        return sizes, missed + missing

    def _gain(self, costs: Sequence[Cost], old: Sizes, new: Sizes) -> float:
        """Returns by how much the predicted step becomes shorter; 0 if not by `min_gain`."""
        now = slowest(costs, old)
        gain = now - slowest(costs, new)
        return gain if gain > self.min_gain * now else 0.0


def _compared(
    state: LoadBalancedState, balanced: Sizes, even: Sizes, observation: Observation
) -> LoadBalancedState:
    """Adds what balanced and even plans take in a step, by its times; decides between them."""
    costs, sizes, busy = observation.known_costs(), observation.sizes, observation.busy_seconds
    # Where few workers are excluded, their times are outliers: those of the slowest ones decide.
    are_usual = 10 * len(observation.excluded) < len(sizes)
    if costs is None or not (are_usual and all(sizes) and all(busy)):
        return state
    even_seconds, seconds = slowest_instead(costs, sizes, busy, even, balanced)
    gained = _MEMORY * state.gained_seconds + even_seconds - seconds
    total = _MEMORY * state.even_seconds + even_seconds
    steps, turn = state.compared_steps + 1, state.turn
    pays = gained >= (_CLEAR if state.is_even else -_CLEAR) * total
    if steps > _FEWEST_STEPS and pays == state.is_even:
        turn = gained / total
    return state._replace(
        gained_seconds=gained, even_seconds=total, compared_steps=steps, turn=turn
    )


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %"
