"""What a plan must satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Cost
from lbbsp_core.types import Limits
from lbbsp_core.validate import require_integer

Sizes = tuple[int, ...]
"""A plan: samples of each worker by rank, summing to the global batch size."""


@dataclass(frozen=True, slots=True)
class BatchConstraints:
    """Static facts that a policy plans for.

    Args:
        global_batch_size: X, >= 1.
        limits: Bounds by rank; their number is the number of workers, N.
        granularity: Sizes are multiples of it, >= 1, except that one worker may take the
            remainder.

    Raises:
        ValueError: X or the granularity is no such integer, or the minima exceed X, so that no
            plan exists.

    Example:
        >>> BatchConstraints(64, (Limits(), Limits(8))).workers
        2
    """

    global_batch_size: int
    limits: tuple[Limits, ...]
    granularity: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("global_batch_size", 0), ("granularity", 1)):  # also NumPy's
            object.__setattr__(self, name, require_integer(name, getattr(self, name), minimum))
        min_total = sum(bounds.minimum for bounds in self.limits)
        if self.global_batch_size < min_total:
            raise ValueError(
                f"global_batch_size must be at least workers * minimum = {min_total}, got "
                f"{self.global_batch_size}: raise it, or lower Limits.minimum"
            )

    def __hash__(self) -> int:
        # Those of thousands of workers are looked up in each step, and few differ in the rest.
        return hash((self.global_batch_size, self.granularity, self.limits[:2]))

    @property
    def workers(self) -> int:
        """Number of workers, N."""
        return len(self.limits)

    def allow(self, sizes: Sizes) -> bool:
        """Returns whether a plan made under other constraints satisfies these."""
        return (
            self.divide(sizes)
            and sum(size % self.granularity > 0 for size in sizes) <= 1
            and all(map(Limits.allow, self.limits, sizes))
        )

    def divide(self, sizes: Sizes) -> bool:
        """Returns whether a plan gives all samples to the workers, and each at least its minimum.

        A plan that does not would lose samples; one that exceeds a maximum trains nevertheless.
        """
        return (
            len(sizes) == self.workers
            and sum(sizes) == self.global_batch_size
            and all(size >= bounds.minimum for size, bounds in zip(sizes, self.limits, strict=True))
        )

    def plan(self, costs: Sequence[Cost]) -> Sizes:
        """Returns the exact best plan for `costs`, see `lbbsp_core.allocate`.

        Args:
            costs: Cost of each worker by rank, shape ``(workers,)``.

        Raises:
            ValueError: No plan satisfies limits and granularity.
        """
        sizes = allocate(
            costs, total=self.global_batch_size, limits=self.limits, granularity=self.granularity
        )
        return tuple(sizes.tolist())
