"""Synchronous training in virtual time, with the objects that training uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import Cost, Proportional
from lbbsp_core.cost.online import CostShape
from lbbsp_core.policy import BatchConstraints, Observation, Policy
from lbbsp_core.predict import LastValue, Predictor
from lbbsp_core.runtime.loop.balancer import Balancer
from lbbsp_core.runtime.loop.bounds import BatchBounds
from lbbsp_core.runtime.options.naming import AnyCost, LimitsOrMaximum, read_cost
from lbbsp_core.sim.cluster import SimulatedCluster
from lbbsp_core.sim.links import ServerLinks
from lbbsp_core.sim.work import LognormalWork, SimulatedSamples
from lbbsp_core.validate import require_nonnegative

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SimConfig:
    """Options shared by all runs on one cluster.

    Args:
        global_batch_size: X, in samples, >= 1.
        lag: Steps between a plan's decision and its use, >= 1: a plan decided after step k
            applies to step ``k + lag``.
        steps_per_epoch: Steps in an epoch, >= 1, for policies that plan once per epoch.
        communication_seconds: Seconds of communication per step, after the last worker has
            arrived, >= 0.
        limits: Bounds of a batch: the same for all workers, or one entry per worker; as in
            `lbbsp_core.SessionOptions`, and `cost` likewise.
        granularity: Batch sizes are multiples of it, in samples.
        cost: Cost that the balancers assume before they have learned: the same for all workers,
            or one entry per worker. Default: as in training.
        links: Links of parameter servers, at which pushes and pulls queue. Default: none, each
            step or iteration takes `communication_seconds`.
        work: Work of the samples, where they differ; None: all are equal.
        first_use_seconds: Further seconds of a worker's step with a batch size that it has not run
            before, >= 0, as on GPUs. The oracle does not spend them.

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
    cost: AnyCost | Sequence[AnyCost] | None = None
    links: ServerLinks | None = None
    work: LognormalWork | None = None
    first_use_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "lag", "steps_per_epoch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)!r}")
        for name in ("communication_seconds", "first_use_seconds"):
            require_nonnegative(name, getattr(self, name))
        if self.links is not None and self.communication_seconds:
            raise ValueError(
                f"communication_seconds must be 0 with links, got {self.communication_seconds!r}: "
                "the time of every transfer follows from the links; leave out one of them"
            )

    def samples(self) -> SimulatedSamples:
        """Draws the samples of all steps."""
        return SimulatedSamples(self.global_batch_size, self.steps_per_epoch, self.work)

    def prior(self, rank: int) -> Cost | CostShape:
        """Returns the cost that worker `rank` assumes before it has learned."""
        if self.cost is None:
            return Proportional()
        if isinstance(self.cost, Sequence) and not isinstance(self.cost, str):
            return read_cost(self.cost[rank])
        return read_cost(self.cost)

    def shape(self, rank: int, workers: int) -> CostShape:
        """Returns that cost as a `CostShape`, made as `lbbsp_core.Balancer` makes it."""
        return CostShape.from_cost(self.prior(rank), self.global_batch_size, workers)


@dataclass(frozen=True)
class Timeline:
    """Synchronous run in virtual time.

    Args:
        sizes: Plans, in samples, shape ``(steps, workers)``.
        busy_seconds: Busy seconds of each worker in each step, of the same shape.
        communication_seconds: Seconds of communication per step, after the last worker.
        links: Links of parameter servers, at which pushes and pulls queue; None: none.
    """

    sizes: npt.NDArray[np.int64]
    busy_seconds: Floats
    communication_seconds: float = 0.0
    links: ServerLinks | None = None

    @cached_property
    def push_seconds(self) -> Floats:
        """Seconds from the barrier to each worker's push, shape ``(steps, workers)``.

        With `links`, to its arrival at the servers, pull and queues included.
        """
        if self.links is None:
            return self.busy_seconds
        return self.links.push_seconds(self.busy_seconds)

    @property
    def wall_seconds(self) -> Floats:
        """Seconds from barrier to barrier: last push, then communication; ``(steps,)``."""
        last: Floats = self.push_seconds.max(axis=1)
        return last + self.communication_seconds

    @property
    def total_seconds(self) -> float:
        """Sum of the wall seconds of all steps."""
        return float(self.wall_seconds.sum())

    @property
    def waiting_share(self) -> float:
        """Sum of waits for the last push / (N * sum of wall seconds)."""
        waits = self.push_seconds.max(axis=1, keepdims=True) - self.push_seconds
        return float(waits.sum() / (self.busy_seconds.shape[1] * self.wall_seconds.sum()))


def run_bsp(
    cluster: SimulatedCluster,
    config: SimConfig,
    policy: Policy,
    predictor: Predictor | None = None,
    progress: Callable[[int], None] | None = None,
) -> Timeline:
    """Simulates BSP: one `Balancer` per worker, and a barrier in every iteration.

    The balancers filter outliers, predict, exchange integers and plan as in training. Their
    policy is computed once per step instead of N times: it is pure, and its arguments are the
    same on all workers.

    Args:
        cluster: Busy seconds of each worker's iterations.
        config: Global batch size, lag, epochs, communication.
        policy: Decides batch sizes.
        predictor: Forecasts each worker's speed, if `policy` uses costs. Default: `LastValue`.
        progress: Called with 1 after each step.

    Returns:
        Plans and busy seconds of every step.

    Raises:
        ValueError: No plan can satisfy the options.

    Example:
        >>> from lbbsp_core import Even
        >>> from lbbsp_core.sim.cluster import ReplayedCluster
        >>> cluster = ReplayedCluster(np.array([[4.0, 2.0], [4.0, 1.0]]), (((), ()),) * 2, 8)
        >>> run_bsp(cluster, SimConfig(8), Even()).wall_seconds.tolist()
        [2.0, 4.0]
    """
    cached = cast(Policy, _CachedPolicy(policy))
    samples = config.samples()
    balancers = _balancers(cluster, config, cached, predictor or LastValue(), samples)
    sizes = np.zeros((cluster.steps, cluster.workers), np.int64)
    busy = np.zeros(sizes.shape)
    used: set[tuple[int, int]] = set()  # ranks and batch sizes
    for step in range(cluster.steps):
        plan = balancers[0].sizes(step)
        amounts = enumerate(samples.amounts(step, plan))
        seconds = [
            float(cluster.cost(rank, step)(amount))
            + config.first_use_seconds * ((rank, plan[rank]) not in used)
            for rank, amount in amounts
        ]
        used.update(enumerate(plan))
        sizes[step], busy[step] = plan, seconds
        next_step = min(step + 1, cluster.steps - 1)
        messages = [
            balancer.report(seconds[rank], drivers=cluster.drivers(rank, next_step))
            for rank, balancer in enumerate(balancers)
        ]
        for balancer in balancers:
            balancer.receive(messages, max(seconds) + config.communication_seconds)
        if progress is not None:
            progress(1)
    return Timeline(sizes, busy, config.communication_seconds, config.links)


def run_oracle(cluster: SimulatedCluster, config: SimConfig) -> Timeline:
    """Simulates the best possible policy: the exact plan for the true costs of each step.

    Where samples differ, it divides the work of each step as if it could be cut anywhere.
    """
    samples = config.samples() if config.work else None
    constraints = batch_constraints(cluster, config)
    sizes = np.zeros((cluster.steps, cluster.workers), np.int64)
    busy = np.zeros(sizes.shape)
    for step in range(cluster.steps):
        sizes[step] = constraints.plan(cluster.costs(step))
        amounts = sizes[step] if samples is None else sizes[step] * samples.mean_amount(step)
        busy[step] = cluster.seconds(step, amounts)
    return Timeline(sizes, busy, config.communication_seconds, config.links)


def batch_constraints(cluster: SimulatedCluster, config: SimConfig) -> BatchConstraints:
    """Returns the constraints that policies plan for."""
    return _balancer(cluster, config, None, LastValue(), 0).constraints


@dataclass(frozen=True, eq=False)
class _CachedPolicy:
    """Policy that caches its last update, for the other balancers of the same step."""

    policy: Policy
    cache: list[tuple[tuple[object, BatchConstraints, Observation], object]] = field(
        default_factory=list
    )

    def __getattr__(self, name: str) -> object:
        """Returns an attribute of the policy, such as `uses_costs`."""
        return getattr(self.policy, name)

    def init(self, constraints: BatchConstraints) -> object:
        return self.policy.init(constraints)

    def update(
        self, state: object, constraints: BatchConstraints, observation: Observation
    ) -> object:
        arguments = (state, constraints, observation)
        if not self.cache or self.cache[0][0] != arguments:
            self.cache[:] = [(arguments, self.policy.update(state, constraints, observation))]
        return self.cache[0][1]


def _balancers(
    cluster: SimulatedCluster,
    config: SimConfig,
    policy: Policy,
    predictor: Predictor,
    samples: SimulatedSamples,
) -> list[Balancer]:
    balancers = [
        _balancer(cluster, config, policy, predictor, rank) for rank in range(cluster.workers)
    ]
    peer_info = [balancer.static_info() for balancer in balancers]
    for balancer in balancers:
        balancer.set_peers(peer_info)
        balancer.use_order(samples.order)
    return balancers


def _balancer(
    cluster: SimulatedCluster,
    config: SimConfig,
    policy: Policy | None,
    predictor: Predictor,
    rank: int,
) -> Balancer:
    return Balancer(
        rank=rank,
        workers=cluster.workers,
        global_batch_size=config.global_batch_size,
        policy=policy,
        predictor=predictor,
        cost=config.prior(rank),
        limits=config.limits,
        granularity=config.granularity,
        lag=config.lag,
        bounds=BatchBounds(first_uses=config.first_use_seconds > 0),
    )
