"""Static shares of the global batch: the open loop, of which plain BSP is the even case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.cost import Proportional
from lbbsp_core.policy.base import Observation, Policy
from lbbsp_core.policy.constraints import BatchConstraints, Sizes
from lbbsp_core.validate import require_positive


class FixedState(NamedTuple):
    """State with a plan that never changes.

    Args:
        sizes: Plan in force.
    """

    sizes: Sizes


@dataclass(frozen=True)
class FixedShares(Policy[FixedState]):
    r"""Static batches in proportion to ratings, ``x_i = X r_i / sum r``.

    Paper: the static, open-loop form of variable batching (Tyagi and Sharma, arXiv 2305.12213),
    with r the cores of CPU workers, or half-precision FLOP/s of mixed ones.

    Args:
        shares: r, one positive rating per worker by rank: cores (a container's quota may be a
            fraction), *half-precision* FLOP/s from data sheets, or any other.

    Raises:
        ValueError: There are no shares, or one is not finite and > 0.

    Example:
        >>> from lbbsp_core import Limits
        >>> FixedShares((2.0, 1.0)).init(BatchConstraints(12, (Limits(), Limits()))).sizes
        (8, 4)
    """

    is_static: ClassVar[bool] = True

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", check_ratings("FixedShares.shares", self.shares))

    def init(self, constraints: BatchConstraints) -> FixedState:
        """Returns the plan for the whole run.

        Raises:
            ValueError: The number of shares is not the number of workers.
        """
        return FixedState(rated_plan("FixedShares.shares", self.shares, constraints))

    def update(
        self, state: FixedState, constraints: BatchConstraints, observation: Observation
    ) -> FixedState:
        """Returns `state`: the plan never changes."""
        return state


def check_ratings(name: str, ratings: Sequence[float]) -> tuple[float, ...]:
    """Returns ratings, which must be finite and > 0, as floats."""
    values = tuple(require_positive(name, float(rating)) for rating in ratings)
    if not values:
        raise ValueError(f"{name} must have one value per worker, got none: give their ratings")
    return values


def rated_plan(name: str, ratings: Sequence[float], constraints: BatchConstraints) -> Sizes:
    """Returns the plan in proportion to ratings, within limits and granularity."""
    if len(ratings) != constraints.workers:
        raise ValueError(
            f"{name} must have one value for each of the {constraints.workers} workers, got "
            f"{len(ratings)}: {tuple(ratings)}"
        )
    return constraints.plan([Proportional(rating) for rating in ratings])
