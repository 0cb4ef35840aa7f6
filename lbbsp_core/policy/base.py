"""The contract of a policy: observations in, plans out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import AffineArray, Cost
from lbbsp_core.types import Limits

Sizes = tuple[int, ...]
"""A plan: samples of each worker by rank, summing to the global batch size."""


@dataclass(frozen=True, slots=True)
class BatchConstraints:
    """The static facts a policy plans for.

    Args:
        total: X, the global batch size.
        limits: Bounds by rank; their number is the number of workers.
        granularity: Sizes are multiples of it (one worker may take a remainder).

    Raises:
        ValueError: No plan exists under these limits.
    """

    global_batch_size: int
    limits: tuple[Limits, ...]
    granularity: int = 1

    def __post_init__(self) -> None:
        least = sum(bounds.minimum for bounds in self.limits)
        if self.global_batch_size < least:
            raise ValueError(
                f"global_batch_size must be at least workers * minimum = {least}, got "
                f"{self.global_batch_size}: raise it, or lower Limits.minimum"
            )

    @property
    def workers(self) -> int:
        """N."""
        return len(self.limits)

    def plan(self, costs: Sequence[Cost]) -> Sizes:
        """The exact best plan for `costs`, see `lbbsp_core.allocate`."""
        sizes = allocate(
            costs,
            total=self.global_batch_size,
            limits=self.limits,
            granularity=self.granularity,
        )
        return tuple(sizes.tolist())


@dataclass(frozen=True, slots=True)
class Observation:
    """What every worker knows, in the same bits, once step `step` has been exchanged.

    Args:
        step: Global step just finished.
        sizes: The plan that this step ran with.
        busy_seconds: Measured, by rank.
        held: Ranks whose measurement is not to be learned from.
        costs: Predicted curve of each worker for the step now planned; None where a worker
            has no estimate yet. A tuple, or `AffineArray` in a large simulation.
        last_of_epoch: Whether an epoch of the data ends with this step.
    """

    step: int
    sizes: Sizes
    busy_seconds: tuple[float, ...]
    excluded: tuple[int, ...]
    costs: Sequence[Cost | None]
    last_of_epoch: bool = False

    def measured(self, rank: int) -> bool:
        """Whether this worker's busy seconds are there, and to be learned from."""
        return rank not in self.excluded and 0 < self.busy_seconds[rank] < math.inf

    def known_costs(self) -> Sequence[Cost] | None:
        """The predicted curve of every worker; None as long as somebody has none."""
        if isinstance(self.costs, AffineArray):
            return self.costs
        known = [cost for cost in self.costs if cost is not None]
        return known if len(known) == len(self.costs) else None


@runtime_checkable
class Policy(Protocol):
    """Decides batch sizes: frozen options, an explicit small state, no clock, no thread.

    Every state has a field `sizes`, the plan now in force. All workers run the same policy on
    the same observations, so a decision may use integers and scalar ``+ - * /`` only (rule 3).
    """

    uses_costs: ClassVar[bool]
    """Whether it reads `Observation.costs`; where it does not, no worker predicts any."""

    def init(self, constraints: BatchConstraints) -> Any:
        """The state, with the plan for the first steps."""
        ...

    def update(self, state: Any, constraints: BatchConstraints, observation: Observation) -> Any:
        """The next state, with the plan to use from now on."""
        ...
