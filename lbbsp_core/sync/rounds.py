"""Batch sizes for workers without common steps: a policy that decides once per round."""

from __future__ import annotations

from lbbsp_core.cost import Cost
from lbbsp_core.policy import BatchConstraints, Observation, Policy, Sizes, require_asynchronous


class Rounds:
    """Calls a policy whenever every worker has pushed once more since the last decision.

    Ours: under a synchroniser that lets workers run ahead there is no common step by which a plan
    could be keyed. A worker that starts an iteration draws by the sizes at that moment. The policy
    observes the latest iteration of each worker, also of one that had drawn by an older plan.

    Args:
        constraints: Static facts that the policy plans for.
        policy: A policy that needs no common steps.

    Raises:
        ValueError: The policy needs common steps, or no plan exists.

    Example:
        >>> from lbbsp_core import Limits, LoadBalanced, Proportional
        >>> rounds = Rounds(BatchConstraints(12, (Limits(), Limits())), LoadBalanced())
        >>> rounds.ran(0, 6, 0.3, Proportional(20.0))
        >>> rounds.sizes
        (6, 6)
        >>> rounds.ran(1, 6, 0.6, Proportional(10.0))
        >>> rounds.sizes
        (8, 4)
    """

    def __init__(self, constraints: BatchConstraints, policy: Policy) -> None:
        require_asynchronous(policy)
        self.constraints, self.policy = constraints, policy
        self._state = policy.init(constraints)
        nothing = (0, 0.0, None, True)
        self._latest: list[tuple[int, float, Cost | None, bool]] = [nothing] * constraints.workers
        self._active = set(range(constraints.workers))
        self._missing = set(self._active)
        self._round = 0

    @property
    def sizes(self) -> Sizes:
        """Samples of the next batch, by rank."""
        sizes: Sizes = self._state.sizes
        return sizes

    def ran(
        self,
        worker: int,
        samples: int,
        busy_seconds: float,
        cost: Cost | None,
        excluded: bool = False,
    ) -> None:
        """Takes in one iteration of `worker`; decides if it completes a round.

        Args:
            worker: Rank of the worker.
            samples: Size of its batch.
            busy_seconds: Busy time of the iteration, in seconds.
            cost: Predicted cost of its next iteration; None where it has no estimate.
            excluded: Whether its time must not be learned from.
        """
        if self.policy.is_static:
            return
        self._latest[worker] = samples, busy_seconds, cost, excluded
        self._missing.discard(worker)
        if not self._missing:
            self._decide()

    def remove(self, worker: int) -> None:
        """Removes a worker that has left: no round waits for it any more."""
        self._active.discard(worker)
        self._missing.discard(worker)

    def _decide(self) -> None:
        sizes, seconds, costs, flags = zip(*self._latest, strict=True)
        excluded = tuple(rank for rank, flag in enumerate(flags) if flag)
        observation = Observation(self._round, sizes, seconds, excluded, costs)
        self._state = self.policy.update(self._state, self.constraints, observation)
        self._round += 1
        self._missing = set(self._active)
