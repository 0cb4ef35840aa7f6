"""Bounds of batches that grow, where it is not known how many samples a worker's memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lbbsp_core.policy.constraints import BatchConstraints, Sizes
from lbbsp_core.policy.first_uses import FirstUses

_USABLE_PERCENT: Final = 95.0  # of a device's memory
_SETTLED_SECONDS: Final = 0.2  # the memory in use is read every 0.05 s


def bound_growth(
    constraints: BatchConstraints,
    workers: Sequence[FirstUses],
    sizes: Sizes,
    is_known: Sequence[bool],
    memory_percent: Sequence[float | None] = (),
) -> BatchConstraints:
    """Returns constraints in which no batch is much larger than any that its worker has run.

    Ours: a worker that is several times as fast as the others may have less memory, and would fail
    in its first step with a batch of its speed. Without any maximum, as of two workers, its batch
    is therefore at most 1.5 times the largest one that it has run, or that and one granule. Where
    the memory in use of its device is known, it grows at most by the factor by which 95 % of the
    memory exceed that: frameworks keep what the largest batch has needed, and a larger one needs at
    most in proportion, since weights need the same for all. The plan in force stays allowed.

    LB-BSP 2020 ("Semi-Dynamic Load Balancing", SoCC 2020) gives samples to leaders with memory to
    spare only.

    Args:
        constraints: Constraints without these bounds.
        workers: What is known of the batches of each worker, by rank.
        sizes: Plan in force.
        is_known: Whether a worker's largest batch is known otherwise, from its user or its profile.
        memory_percent: Percent of each device's memory in use; None where it is unknown.

    Example:
        >>> from lbbsp_core import Limits
        >>> constraints = BatchConstraints(128, (Limits(), Limits()))
        >>> ran = [FirstUses(largest=64, settled_seconds=1.0)] * 2
        >>> bounds = bound_growth(constraints, ran, (64, 64), (False, False), (None, 80.0)).limits
        >>> [limits.maximum for limits in bounds]
        [96, 76]
    """
    percents = memory_percent or (None,) * len(sizes)
    limits = list(constraints.limits)
    for rank, (bounds, used) in enumerate(zip(limits, percents, strict=True)):
        ran, maximum = workers[rank], bounds.maximum
        if is_known[rank] or not (used or maximum is None):
            continue
        if maximum is None:
            maximum = max(ran.largest * 3 // 2, ran.largest + constraints.granularity)
        if used:
            factor = _USABLE_PERCENT / used if ran.settled_seconds >= _SETTLED_SECONDS else 1.0
            maximum = min(maximum, max(ran.largest, int(ran.largest * factor)))
        limits[rank] = replace(bounds, maximum=max(sizes[rank], maximum))
    bounded = tuple(limits)
    return constraints if bounded == constraints.limits else replace(constraints, limits=bounded)
