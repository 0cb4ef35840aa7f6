"""Balancers of all workers of a job, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lbbsp_core import Balancer, Cost, CostShape
from lbbsp_core.testing import exchange_in_process

Sizes = tuple[int, ...]


def team(
    workers: int, total: int, costs: Sequence[Cost | CostShape | None] = (), **options: Any
) -> list[Balancer]:
    """One balancer for each worker, with a cost of its own where `costs` are given."""
    own = [{"cost": cost} for cost in costs] or [{}] * workers
    return [
        Balancer(rank=rank, workers=workers, global_batch_size=total, **own[rank], **options)
        for rank in range(workers)
    ]


def meet(balancers: Sequence[Balancer], **options: Any) -> None:
    """Lets all workers tell each other what the handshake tells."""
    rows = [each.static_info() for each in balancers]
    for each in balancers:
        each.set_peers(rows, **options)


def plan(balancers: Sequence[Balancer], step: int | None = None) -> Sizes:
    """The plan of a step (the running one), the same on all workers."""
    step = balancers[0].step if step is None else step
    (sizes,) = {balancer.sizes(step) for balancer in balancers}
    return sizes


def play(balancers: Sequence[Balancer], costs: Sequence[Any], steps: int = 1) -> Iterator[Sizes]:
    """Runs steps in which worker i is busy for ``costs[i](x_i)``; yields the plan of each."""
    for _ in range(steps):
        sizes = plan(balancers)
        yield sizes
        busy = [float(cost(x)) for cost, x in zip(costs, sizes, strict=True)]
        exchange_in_process(balancers, busy)


def run(balancers: Sequence[Balancer], costs: Sequence[Any], steps: int = 1) -> list[Sizes]:
    """Runs steps as `play` does; returns the plans they ran with."""
    return [*play(balancers, costs, steps)]
