"""The contract of a policy: observations in, plans out."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from lbbsp_core.cost import AffineArray, Cost
from lbbsp_core.policy.constraints import BatchConstraints, Sizes
from lbbsp_core.policy.first_uses import FirstUses
from lbbsp_core.validate import shortened

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # plain `Policy` stands for one with any state (PEP 696)

    S = TypeVar("S", bound="PolicyState", default=Any)
else:
    from typing import TypeVar

    S = TypeVar("S")

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Observation:
    """Facts about step `step` that are bit-identical on all workers after its exchange.

    Where the work of samples is known (`lbbsp_core.work`), a worker's batch has other numbers of
    samples than the plan, which then counts mean samples of the data set: `busy_seconds` are
    scaled by planned / actual work, as if the step had had exactly the planned work. Policies thus
    compare sizes and seconds as they do without it.

    Args:
        step: Global step that has just finished.
        sizes: Plan that this step ran with, scaled down in a short step.
        busy_seconds: Measured busy time by rank, in seconds, for `sizes`; 0 where they
            say nothing, as those of a compilation or of a costly first use of a size.
        excluded: Ranks whose measurement must not be learned from.
        costs: Predicted cost of each worker in the step being planned; None where a worker has
            no estimate yet. A tuple, or `AffineArray` in a large simulation.
        last_of_epoch: Whether an epoch of the data ends with this step.
        first_uses: What first uses of batch sizes cost each worker, by rank; empty where it is
            not known, because nothing measures it or because batches are cut by work.
        lag: Steps from this one to the step being planned, >= 1.
    """

    step: int
    sizes: Sizes
    busy_seconds: tuple[float, ...]
    excluded: tuple[int, ...]
    costs: Sequence[Cost | None]
    last_of_epoch: bool = False
    first_uses: tuple[FirstUses, ...] = ()
    lag: int = 1

    def measured(self, rank: int) -> bool:
        """Returns whether the busy time of `rank` is valid and may be learned from."""
        return rank not in self.excluded and 0 < self.busy_seconds[rank] < math.inf

    def added(self, totals: tuple[N, ...], values: Sequence[N]) -> tuple[N, ...]:
        """Returns totals by rank, with the values of the workers that were measured added."""
        pairs = enumerate(zip(totals, values, strict=True))
        return tuple(old + new if self.measured(rank) else old for rank, (old, new) in pairs)

    def known_costs(self) -> Sequence[Cost] | None:
        """Returns the predicted costs of all workers, or None while any of them is missing."""
        if isinstance(self.costs, AffineArray):
            return self.costs
        costs = [cost for cost in self.costs if cost is not None]
        return costs if len(costs) == len(self.costs) else None


class PolicyState(Protocol):
    """Protocol of the state of every policy.

    It may also have a property `notice`: what the user should know about the plans since a turn
    of the run; empty before. The text stays the same until the next turn.
    """

    @property
    def sizes(self) -> Sizes:
        """Plan in force."""
        ...


class Notices(list[str]):
    """Notices of a policy in a run, see `PolicyState`, one for each turn."""

    _latest = ""

    @property
    def level(self) -> int:
        """Level at which the latest one is logged: warnings are two, as there may be many turns."""
        return logging.WARNING if len(self) <= 2 else logging.INFO

    def of(self, state: PolicyState, since: str) -> str:
        """Returns the notice of a state if it is new, with the step that it holds from; or ""."""
        text = getattr(state, "notice", "")
        if text in ("", self._latest):
            return ""
        self._latest = text
        self.append(f"from {since} on, {text}")
        return self[-1]


@runtime_checkable
class Policy(Protocol[S]):
    """Decides batch sizes: frozen options, an explicit small state, no clock, no thread.

    The type parameter S is the type of the state. Every state has a field `sizes`, the plan in
    force. All workers run the same policy on the same observations, so a decision may use
    integers and scalar ``+ - * /`` only (rule 3).

    `lbbsp_core.testing.check_policy` checks this contract.
    """

    __slots__ = ()  # so that those of a subclass count

    uses_costs: ClassVar[bool] = False
    """Whether the policy reads `Observation.costs`; if not, no worker predicts its speed."""

    is_static: ClassVar[bool] = False
    """Whether the sizes never change after `init`."""

    needs_common_steps: ClassVar[bool] = False
    """Whether it works only where all workers are always in the same step, as with plain BSP.

    Without common steps (SSP, ASP) an observation holds the *latest* iteration of each worker, see
    `lbbsp_core.sync.rounds.Rounds`: their times are from different moments, and their sizes may
    belong to different plans. A policy that compares a worker's own times under the plan in force
    does not need common steps, nor does one that plans by predicted costs. One that counts how
    often a worker was the slowest of a step does, and so does one that adds up epochs.
    """

    accepts_narrower_limits: ClassVar[bool] = False
    """Whether limits may be narrower in an update than in `init`.

    Such a policy makes a new plan if that in force is not allowed any more. Its batches stay near
    even shares while steps are short, see `lbbsp_core.runtime.planning.short_steps`.
    """

    def init(self, constraints: BatchConstraints) -> S:
        """Returns the first state, with the plan for the first steps.

        Args:
            constraints: Global batch size, limits and granularity of the run.

        Raises:
            ValueError: No plan exists, or the policy's options do not fit the constraints.
        """
        ...

    def update(self, state: S, constraints: BatchConstraints, observation: Observation) -> S:
        """Returns the next state, with the plan to use from now on.

        Args:
            state: Last state, which is left unchanged.
            constraints: As in `init`, but maxima may be lower, never below the plan in force; see
                `bound_growth`.
            observation: Measurements and predictions of the step that has just finished.
        """
        ...


def first_state(policy: Policy[S], constraints: BatchConstraints) -> S:
    """Returns the first state of a policy, as `next_state` returns the next one."""
    return _checked(policy, policy.init(constraints), constraints)


def next_state(
    policy: Policy[S], state: S, constraints: BatchConstraints, observation: Observation
) -> S:
    """Returns the next state of a policy, see `Policy.update`.

    Raises:
        ValueError: Its plan would lose samples, or gives a worker too few.
    """
    new = policy.update(state, constraints, observation)
    return new if new.sizes is state.sizes else _checked(policy, new, constraints)


def _checked(policy: Policy[S], state: S, constraints: BatchConstraints) -> S:
    if not constraints.divide(state.sizes):
        raise ValueError(
            f"policy {shortened(policy)} made the plan {shortened(state.sizes)}, but it must give "
            f"{constraints.workers} workers {constraints.global_batch_size} samples, and none of "
            "them less than its minimum: check the policy with lbbsp_core.testing.check_policy"
        )
    return state


def require_asynchronous(
    policy: Policy | type[Policy], name: str = "", sync: str = "this synchroniser"
) -> None:
    """Raises an error if a policy cannot be used by workers that have no common steps.

    Args:
        policy: Policy to check, or its class.
        name: Name to show; by default that of the class.
        sync: Name of the synchroniser to show.

    Raises:
        ValueError: The policy needs common steps, see `Policy.needs_common_steps`.
    """
    if policy.needs_common_steps:
        kind = policy if isinstance(policy, type) else type(policy)
        raise ValueError(
            f"policy {name or kind.__name__} and {sync} cannot be combined: the policy compares "
            "the times of all workers in the same step, and without a barrier in every step "
            "workers are in different steps. Use a static policy (bsp, fixed), a policy that "
            "predicts (lbbsp), proportional control, or the synchroniser bsp"
        )
