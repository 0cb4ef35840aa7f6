"""Batch sizes for workers that are not in step: a policy asked once a round."""

from __future__ import annotations

from lbbsp_core.cost import Cost
from lbbsp_core.policy import BatchConstraints, Even, FixedShares, Observation, Policy, Sizes


class Rounds:
    """Asks a policy for new sizes whenever every worker has pushed once more since it was asked.

    Ours: a synchroniser that lets workers run ahead has no common step which a plan could be
    keyed by. A worker that begins an iteration draws by the sizes as they are then.

    Args:
        cluster: What does not change.
        policy: One that does not change its sizes, or one that predicts.

    Raises:
        ValueError: A policy that needs common steps.
    """

    def __init__(self, constraints: BatchConstraints, policy: Policy) -> None:
        check_policy(policy)
        self.constraints, self.policy = constraints, policy
        self._state = policy.init(constraints)
        self._latest: list[tuple[int, float, Cost | None]] = [(0, 0.0, None)] * constraints.workers
        self._there = set(range(constraints.workers))
        self._missing = set(self._there)
        self._round = 0

    @property
    def sizes(self) -> Sizes:
        """Samples of the next batch, by worker."""
        sizes: Sizes = self._state.sizes
        return sizes

    def ran(self, worker: int, samples: int, busy_seconds: float, cost: Cost | None) -> None:
        """One iteration more of `worker`, and what it predicts of its next one."""
        if not self.policy.uses_costs:
            return
        self._latest[worker] = samples, busy_seconds, cost
        self._missing.discard(worker)
        if not self._missing:
            self._decide()

    def left(self, worker: int) -> None:
        """`worker` will not push again: a round does not wait for it."""
        self._there.discard(worker)
        self._missing.discard(worker)

    def _decide(self) -> None:
        sizes, seconds, costs = zip(*self._latest, strict=True)
        seen = Observation(self._round, sizes, seconds, (), costs)
        self._state = self.policy.update(self._state, self.constraints, seen)
        self._round += 1
        self._missing = set(self._there)


def is_steady(policy: Policy) -> bool:
    """Whether its sizes never change."""
    return isinstance(policy, Even | FixedShares)


def check_policy(policy: Policy) -> None:
    """Raises ValueError where a policy cannot work without common steps; says why."""
    if not is_steady(policy) and not policy.uses_costs:
        raise ValueError(
            f"{type(policy).__name__} compares what all workers took in the same steps, and here "
            "they are in different ones: use bsp, fixed or lbbsp with this sync, or sync bsp"
        )
