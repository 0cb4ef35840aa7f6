"""For tests: an exchange within one process, and plans that change in every step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lbbsp_core.cost import Proportional
from lbbsp_core.policy import BatchConstraints, FixedState, Observation, Policy, Sizes
from lbbsp_core.runtime.exchange.protocol import WIDTH, StepMessage, decode, encode
from lbbsp_core.runtime.planning.balancer import Balancer


@dataclass(frozen=True)
class ChangingPlans(Policy[FixedState]):
    """Policy whose uneven plan changes in every step, whatever is measured.

    With it a test shows that a job learns what one process learns.

    Args:
        plans: Plans that follow each other again and again. None given: as if workers had the
            speeds 1, 5, 9, ... in turns, within limits and granularity.

    Example:
        >>> two = [Balancer(rank=i, workers=2, global_batch_size=12, policy=ChangingPlans())
        ...        for i in (0, 1)]
        >>> for step in range(3):
        ...     print(two[0].sizes(step))
        ...     messages = exchange_in_process(two, [0.1, 0.1])
        (2, 10)
        (10, 2)
        (2, 10)
    """

    uses_costs: ClassVar[bool] = True
    needs_common_steps: ClassVar[bool] = True

    plans: tuple[Sizes, ...] = ()

    def init(self, constraints: BatchConstraints) -> FixedState:
        """Returns the first plan."""
        return self._planned(0, constraints)

    def update(
        self, state: FixedState, constraints: BatchConstraints, observation: Observation
    ) -> FixedState:
        """Returns the plan of the next step."""
        return self._planned(observation.step + 1, constraints)

    def _planned(self, step: int, constraints: BatchConstraints) -> FixedState:
        if self.plans:
            return FixedState(self.plans[step % len(self.plans)])
        workers = constraints.workers
        speeds = [1.0 + 4 * ((step + rank) % workers) for rank in range(workers)]
        return FixedState(constraints.plan([Proportional(speed) for speed in speeds]))


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
        own_drivers = drivers[rank] if drivers else ()
        message = balancer.report(busy, excluded=rank in excluded, drivers=own_drivers)
        slots[rank, rank] = encode(message)
    messages = tuple(map(decode, slots.sum(axis=0)))
    for balancer in balancers:
        balancer.receive(messages, wall_seconds)
    return messages
