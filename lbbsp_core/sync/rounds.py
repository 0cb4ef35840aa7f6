"""Batch sizes for workers without common steps: a policy that decides once per round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from lbbsp_core.cost import Cost, Proportional
from lbbsp_core.policy import (
    BatchConstraints,
    FirstUses,
    Notices,
    Observation,
    Policy,
    Sizes,
    bound_growth,
    require_asynchronous,
)
from lbbsp_core.policy.base import first_state, next_state
from lbbsp_core.types import Limits

_AWAY: Final = 1, 1.0, Proportional(1.0), False  # of a worker that is away: no samples, no time
_NO_USES: Final = FirstUses(frozenset({0}))


class Rounds:
    """Calls a policy whenever every worker has pushed once more since the last decision.

    Ours: under a synchroniser that lets workers run ahead there is no common step by which a plan
    could be keyed. A worker that starts an iteration draws by the sizes at that moment. The policy
    observes the latest iteration of each worker, also of one that had drawn by an older plan.
    `is_known` tells whether the largest batch of each worker is known, see `bound_growth`; None:
    batch sizes that are new cost and need nothing.

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

    def __init__(
        self, constraints: BatchConstraints, policy: Policy, is_known: Sequence[bool] | None = None
    ) -> None:
        require_asynchronous(policy)
        self.constraints, self.policy = constraints, policy
        self._limits = constraints.limits
        self._state = first_state(policy, constraints)
        self.notices = Notices()
        """Notices of the policy."""
        nothing = (0, 0.0, None, True)
        self._latest: list[tuple[int, float, Cost | None, bool]] = [nothing] * constraints.workers
        self._is_known = is_known
        self._first_uses = [FirstUses()] * (0 if is_known is None else constraints.workers)
        self.active = set(range(constraints.workers))
        """Ranks of the workers that have not left."""
        self._missing = set(self.active)
        self._round = 0

    @property
    def sizes(self) -> Sizes:
        """Samples of the next batch, by rank."""
        sizes: Sizes = self._state.sizes
        return sizes

    def measured(self, worker: int, samples: int, busy_seconds: float) -> float | None:
        """Returns the seconds of an iteration to learn from, before `ran`; None: a first use."""
        if not self._first_uses:
            return busy_seconds
        predicted = self._predicted(worker, samples)
        return self._first_uses[worker].measured(samples, busy_seconds, predicted)

    def ran(
        self,
        worker: int,
        samples: int,
        busy_seconds: float,
        cost: Cost | None,
        excluded: bool = False,
    ) -> None:
        """Takes in one iteration of `worker`; decides if it completes a round.

        A cost of None means no estimate; `excluded` is for another reason than a first use of a
        batch size.
        """
        if self.policy.is_static:
            return
        measured = self.measured(worker, samples, busy_seconds)
        if self._first_uses:
            first_uses = self._first_uses[worker].after(
                samples, busy_seconds, self._predicted(worker, samples), excluded=excluded
            )
            self._first_uses[worker] = first_uses.ran(samples, busy_seconds)
        excluded = excluded or measured is None
        self._latest[worker] = samples, measured or 0.0, cost, excluded
        self._missing.discard(worker)
        if not self._missing:
            self._decide()

    def use_present(self, present: Collection[int]) -> None:
        """Divides X among the workers that are present, by a policy that accepts narrower limits.

        The others get no samples. Other policies keep the sizes of all workers.
        """
        self.active = set(present)
        self._missing &= self.active
        if present and self.policy.accepts_narrower_limits:
            limits = (
                bounds if rank in present else Limits(0, 0)
                for rank, bounds in enumerate(self._limits)
            )
            self.constraints = replace(self.constraints, limits=tuple(limits))
            self._decide(learns=False)

    def remove(self, worker: int) -> None:
        """Removes a worker that has left: no round waits for it any more."""
        self.active.discard(worker)
        self._missing.discard(worker)

    def _predicted(self, worker: int, samples: int) -> float | None:
        cost = self._latest[worker][2]
        return None if cost is None else float(cost(samples))

    def _decide(self, *, learns: bool = True) -> None:
        pairs = zip(self._latest, self.constraints.limits, strict=True)
        latest = (_AWAY if bounds.maximum == 0 else iteration for iteration, bounds in pairs)
        sizes, seconds, costs, flags = zip(*latest, strict=True)
        excluded = tuple(rank for rank, flag in enumerate(flags) if flag or not learns)
        constraints = self.constraints
        by_worker = zip(self._first_uses, constraints.limits, strict=False)
        uses = tuple(_NO_USES if bounds.maximum == 0 else entry for entry, bounds in by_worker)
        observation = Observation(self._round, sizes, seconds, excluded, costs, first_uses=uses)
        if self._is_known is not None:
            constraints = bound_growth(constraints, uses, self.sizes, self._is_known)
        self._state = next_state(self.policy, self._state, constraints, observation)
        self.notices.of(self._state, f"round {self._round + 1}")
        self._round += 1
        self._missing = set(self.active)
