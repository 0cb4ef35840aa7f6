"""Options of a simulation, and the work of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lbbsp_core.cost.online import CostShape
from lbbsp_core.order import GlobalOrder
from lbbsp_core.runtime.options.naming import AnyCost, LimitsOrMaximum, read_cost
from lbbsp_core.sim.communication import ServerLinks
from lbbsp_core.types import Floats, Ints
from lbbsp_core.validate import require_integer, require_nonnegative, shortened
from lbbsp_core.work import UNITS, Work

_LONGEST_LAG: Final = 1000
_MOST_SECONDS: Final = 1e12  # sums of more could overflow


@dataclass(frozen=True)
class SimConfig:
    """Options shared by all runs on one cluster.

    Args:
        global_batch_size: X, in samples, >= 1.
        lag: Steps between a plan's decision and its use, from 1 to 1,000: a plan decided after
            step k applies to step ``k + lag``.
        steps_per_epoch: Steps in an epoch, >= 1, for policies that plan once per epoch.
        communication_seconds: Seconds of communication per step, after the last worker has
            arrived, >= 0.
        limits: Bounds of a batch: the same for all workers, or one entry per worker; as in
            `lbbsp_core.SessionOptions`, and `cost` likewise.
        granularity: Batch sizes are multiples of it, in samples.
        cost: Cost that the balancers assume before they have learned: the same for all workers,
            or one entry per worker; read once.
        links: Links of parameter servers, at which pushes and pulls queue. Default: none, each
            step or iteration takes `communication_seconds`.
        work: Work of the samples, where they differ; None: all are equal.
        first_use_seconds: Further seconds of a worker's step with a batch size that it has not run
            before, >= 0, as on GPUs. The oracle does not spend them.
        part_overhead: Overhead of a claimed part of a reserve (`lbbsp_core.reserve`), as a fraction
            of an even batch, >= 0.
        claim_seconds: Seconds from a claim to its answer, >= 0.

    Raises:
        ValueError: An option is out of range, or both `communication_seconds` and `links` are
            given; the message names the value.
    """

    global_batch_size: int
    lag: int = 1
    steps_per_epoch: int = 50
    communication_seconds: float = 0.0
    limits: LimitsOrMaximum | Sequence[LimitsOrMaximum] | None = None
    granularity: int = 1
    cost: AnyCost | Sequence[AnyCost] = "proportional"
    links: ServerLinks | None = None
    work: LognormalWork | None = None
    first_use_seconds: float = 0.0
    part_overhead: float = 0.01
    claim_seconds: float = 0.001

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "lag", "steps_per_epoch"):
            require_integer(name, getattr(self, name), 1)
        if self.lag > _LONGEST_LAG:
            raise ValueError(
                f"lag must be at most {_LONGEST_LAG}, got {shortened(self.lag)}: plans are decided "
                "a few steps ahead"
            )
        names = ("communication_seconds", "first_use_seconds", "part_overhead", "claim_seconds")
        for name in names:
            if require_nonnegative(name, getattr(self, name)) >= _MOST_SECONDS:
                raise ValueError(
                    f"{name} must be below {_MOST_SECONDS:g}, got {getattr(self, name):g}"
                )
        if self.links is not None and self.communication_seconds:
            raise ValueError(
                f"communication_seconds must be 0 with links, got {self.communication_seconds!r}: "
                "the time of every transfer follows from the links; leave out one of them"
            )
        cost: Any = self.cost
        is_list = isinstance(cost, Sequence) and not isinstance(cost, str)
        read = tuple(map(read_cost, cost)) if is_list else read_cost(cost)
        object.__setattr__(self, "cost", read)

    def samples(self) -> SimulatedSamples:
        """Draws the samples of all steps."""
        return SimulatedSamples(self.global_batch_size, self.steps_per_epoch, self.work)

    def shape(self, rank: int, workers: int) -> CostShape:
        """Returns the cost that worker `rank` assumes before it has learned."""
        cost: Any = self.cost[rank] if isinstance(self.cost, tuple) else self.cost
        return CostShape.from_cost(cost, self.global_batch_size, workers)


@dataclass(frozen=True, slots=True)
class LognormalWork:
    r"""Lognormal work ``exp(sigma z)`` of each sample, with z standard normal.

    Costs count mean samples, whatever sigma is.

    Args:
        sigma: Standard deviation of the logarithm of work, >= 0.
        known: Whether steps are cut by the work, and not by the number of their samples; None
            for runs of both kinds.
        seed: Seed of the work and of the order of the samples, >= 0.

    Raises:
        ValueError: An option is out of range.
    """

    sigma: float = 1.0
    known: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_nonnegative("work.sigma", self.sigma)
        require_integer("work.seed", self.seed, 0)
        if self.known not in (True, False, None):
            raise ValueError(f"work.known must be true or false, got {self.known!r}")


class SimulatedSamples:
    """Samples of the steps of a simulation, and their work.

    Args:
        global_batch_size: X, in samples.
        steps_per_epoch: Steps in an epoch.
        work: Distribution of the work; None: all samples are equal.
    """

    def __init__(
        self, global_batch_size: int, steps_per_epoch: int, work: LognormalWork | None
    ) -> None:
        count, seed = global_batch_size * steps_per_epoch, work.seed if work else 0
        self.order = GlobalOrder(count, global_batch_size, seed=seed, shuffle=work is not None)
        self._work: Work | None = None
        if work is not None:
            normal = np.random.default_rng(seed).standard_normal(count)
            self._work = Work(np.exp(work.sigma * normal), count)
            self.order.work = None if work.known is False else self._work

    def amounts(self, step: int, sizes: Ints) -> Floats:
        """Returns the work of each worker in a step, in mean samples, by rank."""
        if self._work is None:
            return np.asarray(sizes, np.float64)
        work = self._work.units[self.order.indices(step)]
        ends = np.concatenate([[0], np.cumsum(work)])[np.cumsum([0, *sizes])]
        return np.asarray(np.diff(ends) / UNITS, np.float64)

    def mean_amount(self, step: int) -> float:
        """Returns the mean work of a sample in a step, in mean samples."""
        size = self.order.size(step)
        return float(self.amounts(step, np.array([size]))[0]) / size
