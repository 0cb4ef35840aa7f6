"""Fake for tests: an exchange within one process."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from lbbsp_core.runtime.exchange.protocol import WIDTH, StepMessage, decode, encode
from lbbsp_core.runtime.loop.balancer import Balancer


def exchange_in_process(
    balancers: Sequence[Balancer],
    busy_seconds: Sequence[float],
    wall_seconds: float | None = None,
    *,
    excluded: Collection[int] = (),
    drivers: Sequence[tuple[float, ...]] | None = None,
) -> tuple[StepMessage, ...]:
    """Runs one step of several balancers in one process, as a framework's all-reduce does it.

    Each worker's message becomes a row of a float32 array that is zero elsewhere; all balancers
    receive the sum of these arrays. Before their first step they exchange `Balancer.static_info`.

    Args:
        balancers: Balancers of all workers, by rank.
        busy_seconds: Busy time that each worker measured by rank, in seconds.
        wall_seconds: Time from barrier to barrier, in seconds; by default the busy time of the
            slowest worker.
        excluded: Ranks that exclude this step.
        drivers: Driving factors of each worker's next step, by rank.

    Returns:
        Messages that all workers received, by rank.

    Example:
        >>> both = [Balancer(rank=i, workers=2, global_batch_size=12) for i in (0, 1)]
        >>> messages = exchange_in_process(both, [0.1, 0.2])
        >>> [balancer.sizes(1) for balancer in both]
        [(8, 4), (8, 4)]
    """
    if wall_seconds is None:
        wall_seconds = max((busy for busy in busy_seconds if 0 < busy < math.inf), default=0.0)
    if balancers[0].step == 0:
        peer_info = [balancer.static_info() for balancer in balancers]
        for balancer in balancers:
            balancer.set_peers(peer_info)
    slots = np.zeros((len(balancers), len(balancers), WIDTH), np.float32)
    for rank, (balancer, busy) in enumerate(zip(balancers, busy_seconds, strict=True)):
        own = drivers[rank] if drivers else ()
        message = balancer.report(busy, excluded=rank in excluded, drivers=own)
        slots[rank, rank] = encode(message)
    messages = tuple(map(decode, slots.sum(axis=0)))
    for balancer in balancers:
        balancer.receive(messages, wall_seconds)
    return messages
