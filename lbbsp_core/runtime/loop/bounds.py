"""Largest batch of a worker whose memory is not known."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from lbbsp_core.cost import Proportional
from lbbsp_core.policy import BatchConstraints, Policy
from lbbsp_core.runtime.options.naming import LimitsOrMaximum
from lbbsp_core.validate import require_integer

_TIMES = 2


def default_cap(
    limits: LimitsOrMaximum | Sequence[LimitsOrMaximum] | None,
    policy: Policy,
    *,
    workers: int,
    global_batch_size: int,
    granularity: int = 1,
) -> int | None:
    """Returns the largest batch of each worker unless its user says otherwise.

    Ours: a batch that is many times what the user has tried may exceed the memory. Without `limits`
    a batch is therefore at most twice its even share, rounded up to the granularity. The arguments
    are the same on all workers. N such batches have at least X samples; where the memory of some
    workers holds less, see `with_cap`. Neither a single worker nor shares that the user has chosen
    have a cap; nor is there one that would not exclude any plan.

    Example:
        >>> from lbbsp_core import LoadBalanced
        >>> default_cap(None, LoadBalanced(), workers=4, global_batch_size=102, granularity=8)
        56
    """
    workers = require_integer("workers", workers, 1)
    global_batch_size = require_integer("global_batch_size", global_batch_size, 0)
    granularity = require_integer("granularity", granularity, 1)
    if limits is not None or policy.is_static or workers == 1:
        return None
    samples = _TIMES * -(-global_batch_size // workers)
    cap = -(-samples // granularity) * granularity
    return cap if cap < global_batch_size - (workers - 1) else None


def with_cap(constraints: BatchConstraints, cap: int | None) -> tuple[BatchConstraints, int | None]:
    """Returns constraints in which the cap bounds workers without a maximum, and that cap.

    If the maxima of the other workers leave no plan within the cap, it is raised to the smallest
    number for which there is one. The result is the same on all workers if the arguments are. If
    there is no plan without the cap either, returns the constraints as given, and None.

    Example:
        >>> from lbbsp_core import Limits
        >>> constraints = BatchConstraints(96, (Limits(1, 10), Limits(1, 10), Limits()))
        >>> bounded, cap = with_cap(constraints, 64)
        >>> bounded.limits[2].maximum, cap
        (76, 76)
    """
    if cap is None or all(each.maximum is not None for each in constraints.limits):
        return constraints, cap
    if not has_plan(_within(constraints, cap)):
        if not has_plan(constraints):
            return constraints, None
        larger = range(cap + 1, constraints.global_batch_size)
        cap = cap + 1 + bisect_left(larger, True, key=lambda n: has_plan(_within(constraints, n)))
    return _within(constraints, cap), cap


def _within(constraints: BatchConstraints, cap: int) -> BatchConstraints:
    limits = (
        replace(each, maximum=max(cap, each.minimum)) if each.maximum is None else each
        for each in constraints.limits
    )
    return replace(constraints, limits=tuple(limits))


def has_plan(constraints: BatchConstraints) -> bool:
    """Returns whether any plan satisfies the constraints."""
    try:
        constraints.plan([Proportional(1.0)] * constraints.workers)
    except ValueError:
        return False
    return True
