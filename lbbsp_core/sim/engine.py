"""Synchronous training in virtual time, with the objects that training uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lbbsp_core.cost import Cost
from lbbsp_core.policy import BatchConstraints, Notices, Policy, PolicyState, Sizes
from lbbsp_core.predict import LastValue, Predictor
from lbbsp_core.reserve import Hindsight, HindsightState, Pace, replay
from lbbsp_core.runtime.planning.balancer import Balancer
from lbbsp_core.runtime.planning.bounds import BatchBounds
from lbbsp_core.sim.arrays import ArrayPlanner, fits_arrays
from lbbsp_core.sim.cluster import SimulatedCluster
from lbbsp_core.sim.communication import ServerLinks
from lbbsp_core.sim.config import SimConfig, SimulatedSamples
from lbbsp_core.types import Floats, Ints


@dataclass(frozen=True)
class Timeline:
    """Synchronous run in virtual time.

    Args:
        sizes: Plans, in samples, shape ``(steps, workers)``.
        busy_seconds: Busy seconds of each worker in each step, of the same shape.
        communication_seconds: Seconds of communication per step, after the last worker.
        links: Links of parameter servers, at which pushes and pulls queue; None: none.
        notices: Notices of the policy (`PolicyState`), each with the step from which on it holds.
    """

    sizes: Ints
    busy_seconds: Floats
    communication_seconds: float = 0.0
    links: ServerLinks | None = None
    notices: tuple[str, ...] = ()

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
    *,
    shares_work: bool = False,
) -> Timeline:
    """Simulates BSP: a barrier in every iteration, and plans as workers make them in training.

    There is one `Balancer` per worker, and they filter outliers, predict, exchange integers and
    plan as in training; or `lbbsp_core.sim.arrays` does the same with all workers in arrays, where
    that gives the same bits. The policy is computed once per step instead of N times: it is pure,
    and its arguments are the same on all workers.

    Args:
        cluster: Busy seconds of each worker's iterations.
        config: Global batch size, lag, epochs, communication.
        policy: Decides batch sizes.
        predictor: Forecasts each worker's speed, if `policy` uses costs. Default: `LastValue`.
        progress: Called with 1 after each step.
        shares_work: Whether workers share work inside a step by a reserve.

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
    predictor = predictor or LastValue()
    samples = config.samples()
    planner: ArrayPlanner | _Balancers
    if fits_arrays(config, policy, predictor):
        planner = ArrayPlanner(batch_constraints(cluster, config), config, policy, predictor)
    else:
        planner = _Balancers(cluster, config, policy, predictor, samples)
    sizes = np.zeros((cluster.steps, cluster.workers), np.int64)
    busy = np.zeros(sizes.shape)
    used: set[tuple[int, int]] = set()  # ranks and batch sizes
    notices = Notices()
    reserve = _Reserve(cluster, config) if shares_work else None
    for step in range(cluster.steps):
        sizes[step] = planner.sizes(step)
        alone = cluster.seconds(step, samples.amounts(step, sizes[step]))
        busy[step] = alone if reserve is None else reserve.seconds(step, sizes[step].tolist())
        if config.first_use_seconds:
            pairs = set(enumerate(sizes[step].tolist()))
            busy[step, [rank for rank, _ in pairs - used]] += config.first_use_seconds
            used |= pairs
        # A pace shows in any number of samples.
        planner.finish(step, busy[step] if reserve is None else alone)
        notices.of(planner.policy_state, f"step {step + config.lag}")
        if progress is not None:
            progress(1)
    return Timeline(sizes, busy, config.communication_seconds, config.links, tuple(notices))


def run_oracle(cluster: SimulatedCluster, config: SimConfig) -> Timeline:
    """Simulates the best possible policy: the exact plan for the true costs of each step.

    Where samples differ, it divides the work of each step as if it could be cut anywhere.
    """
    samples = config.samples()
    constraints = batch_constraints(cluster, config)
    sizes = np.zeros((cluster.steps, cluster.workers), np.int64)
    busy = np.zeros(sizes.shape)
    for step in range(cluster.steps):
        sizes[step] = constraints.plan(cluster.costs(step))
        amounts = sizes[step] * samples.mean_amount(step) if config.work else sizes[step]
        busy[step] = cluster.seconds(step, amounts)
    return Timeline(sizes, busy, config.communication_seconds, config.links)


def batch_constraints(cluster: SimulatedCluster, config: SimConfig) -> BatchConstraints:
    """Returns the constraints that policies plan for."""
    return _balancer(cluster, config).constraints


class _Reserve:
    """Work sharing in the steps of a run: the fraction that hindsight chooses, and its effect."""

    def __init__(self, cluster: SimulatedCluster, config: SimConfig) -> None:
        if config.work is not None or config.first_use_seconds:
            raise ValueError(
                "work sharing needs samples of equal work and free first uses of batch sizes, got "
                f"work {config.work} and first_use_seconds {config.first_use_seconds:g}: leave "
                "them out, or compare policies without +reserve"
            )
        self._cluster, self._config = cluster, config
        self._overhead = config.part_overhead * config.global_batch_size / cluster.workers
        self._hindsight, self._state = Hindsight(), HindsightState()
        self._percents = deque([0] * config.lag)

    def seconds(self, step: int, sizes: Sequence[int]) -> tuple[float, ...]:
        """Returns the busy seconds of every worker in a step, and learns from it."""
        claim, grain = self._config.claim_seconds, self._config.granularity
        paces = [
            _pace(cost, size, self._overhead)
            for cost, size in zip(self._cluster.costs(step), sizes, strict=True)
        ]
        percent = self._percents.popleft()
        expected = self._state.step_seconds or None
        shared = replay(sizes, percent, paces, claim, expected, grain)
        self._state = self._hindsight.update(self._state, sizes, paces, claim, grain)
        self._percents.append(self._state.percent)
        return shared.seconds


def _pace(cost: Cost, size: int, part_overhead: float) -> Pace:
    fixed = float(cost(0))
    total = float(cost(max(size, 1)))
    per_sample = max((total - fixed) / max(size, 1), 1e-9 * total)  # > 0, also of a flat cost
    return Pace(per_sample, fixed / per_sample, part_overhead)


class _CachedPolicy:
    """Policy that keeps its last update, for the other balancers of the same step."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._arguments: tuple[object, ...] = ()
        self._state: object = None

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the policy, such as `uses_costs` or `init`."""
        return getattr(self._policy, name)

    def __repr__(self) -> str:
        return repr(self._policy)

    def update(self, *arguments: Any) -> object:
        if self._arguments != arguments:
            self._arguments, self._state = arguments, self._policy.update(*arguments)
        return self._state


class _Balancers:
    """Plans of real balancers, one per worker."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        config: SimConfig,
        policy: Policy,
        predictor: Predictor,
        samples: SimulatedSamples,
    ) -> None:
        cached = _CachedPolicy(policy)
        self._cluster, self._communication = cluster, config.communication_seconds
        self._balancers = [
            _balancer(cluster, config, rank, policy=cached, predictor=predictor)
            for rank in range(cluster.workers)
        ]
        peer_info = [balancer.static_info() for balancer in self._balancers]
        for balancer in self._balancers:
            balancer.set_peers(peer_info)
            balancer.schedule.use_order(samples.order)

    @property
    def policy_state(self) -> PolicyState:
        return self._balancers[0].policy_state

    def sizes(self, step: int) -> Sizes:
        return self._balancers[0].sizes(step)

    def finish(self, step: int, seconds: Floats) -> None:
        next_step = min(step + 1, self._cluster.steps - 1)
        messages = [
            balancer.report(float(seconds[rank]), drivers=self._cluster.drivers(rank, next_step))
            for rank, balancer in enumerate(self._balancers)
        ]
        wall_seconds = float(seconds.max()) + self._communication
        for balancer in self._balancers:
            balancer.receive(messages, wall_seconds)


def _balancer(
    cluster: SimulatedCluster, config: SimConfig, rank: int = 0, **chosen: Any
) -> Balancer:
    return Balancer(
        rank=rank,
        workers=cluster.workers,
        global_batch_size=config.global_batch_size,
        cost=config.shape(rank, cluster.workers),
        limits=config.limits,
        granularity=config.granularity,
        lag=config.lag,
        bounds=BatchBounds(first_uses=config.first_use_seconds > 0),
        **chosen,
    )
