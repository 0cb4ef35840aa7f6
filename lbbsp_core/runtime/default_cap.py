"""Largest batch of a worker whose memory is not known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lbbsp_core.policy import Policy
from lbbsp_core.runtime.naming import LimitsOrMaximum
from lbbsp_core.types import Limits
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

    Ours: a batch that is many times what the user has tried may exceed the memory. Without
    `limits` a batch is therefore at most twice its even share, rounded up to the granularity. The
    arguments are the same on all workers. N such batches have at least X samples, so that
    there always is a plan.

    Args:
        limits: Limits that the user has given; then there is no cap.
        policy: Policy of the session; shares that the user has chosen are not capped.
        workers: N; a single worker has no cap.
        global_batch_size: X, in samples.
        granularity: Sizes are multiples of it.

    Returns:
        The cap in samples; None if there is none, or it would not exclude any plan.

    Raises:
        ValueError: A number is not an integer, or is out of range.

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


def capped(limits: Limits, cap: int | None) -> Limits:
    """Returns the limits of a worker, with the cap as maximum if there is no other one."""
    if limits.maximum is not None or cap is None:
        return limits
    return replace(limits, maximum=max(cap, limits.minimum))
