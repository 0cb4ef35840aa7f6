"""Runs the loop in virtual time, with the very objects that training uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import Cost, Proportional
from lbbsp_core.cost.online import CostShape
from lbbsp_core.order import GlobalOrder
from lbbsp_core.policy import BatchConstraints, Observation, Policy
from lbbsp_core.predict import LastValue, Predictor
from lbbsp_core.runtime.balancer import Balancer
from lbbsp_core.sim.cluster import SimulatedCluster
from lbbsp_core.types import Limits

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SimConfig:
    """What all runs on one cluster have in common.

    Args:
        global_batch_size: X.
        lag: A plan decided after step k serves step ``k + lag``, >= 1.
        steps_per_epoch: For policies that plan once an epoch, >= 1.
        communication_seconds: Of each step, after the last worker has arrived.
        limits: One for all workers, or one each.
        granularity: Sizes are multiples of it.
        cost: What the balancers assume before they learn, one for all or one each; by default as
            in training.

    Raises:
        ValueError: An option out of range; names the value.
    """

    global_batch_size: int
    lag: int = 1
    steps_per_epoch: int = 50
    communication_seconds: float = 0.0
    limits: Limits | Sequence[Limits] | None = None
    granularity: int = 1
    cost: Cost | CostShape | Sequence[Cost | CostShape] | None = None

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "lag", "steps_per_epoch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)!r}")
        if not 0 <= self.communication_seconds < float("inf"):
            raise ValueError(
                f"communication_seconds must be finite and >= 0, got {self.communication_seconds!r}"
            )

    def prior(self, rank: int) -> Cost | CostShape:
        """What worker `rank` assumes of its own cost."""
        if isinstance(self.cost, Sequence):
            return self.cost[rank]
        return self.cost or Proportional()

    def shape(self, rank: int, workers: int) -> CostShape:
        """The same as `lbbsp_core.Balancer` makes a `CostShape` of it."""
        return CostShape.from_cost(self.prior(rank), self.global_batch_size, workers)


@dataclass(frozen=True)
class Timeline:
    """A synchronous run in virtual time.

    Args:
        sizes: Plans, shape ``(steps, workers)``.
        busy_seconds: Of the same shape.
        communication_seconds: Of each step.
    """

    sizes: npt.NDArray[np.int64]
    busy_seconds: Array
    communication_seconds: float = 0.0

    @property
    def wall_seconds(self) -> Array:
        """From barrier to barrier: the slowest worker, then communication; ``(steps,)``."""
        slowest: Array = self.busy_seconds.max(axis=1)
        return slowest + self.communication_seconds

    @property
    def total_seconds(self) -> float:
        """Of all steps."""
        return float(self.wall_seconds.sum())

    @property
    def waiting_share(self) -> float:
        """Sum of waits for the slowest / (N * sum of wall seconds)."""
        waits = self.busy_seconds.max(axis=1, keepdims=True) - self.busy_seconds
        return float(waits.sum() / (self.busy_seconds.shape[1] * self.wall_seconds.sum()))


def run_bsp(
    cluster: SimulatedCluster,
    setting: SimConfig,
    policy: Policy,
    predictor: Predictor | None = None,
    progress: Callable[[int], None] | None = None,
) -> Timeline:
    """Replays BSP: a `Balancer` a worker, every iteration a barrier.

    The balancers measure, gate, predict, exchange integers and plan as in training. Their policy
    is asked once a step instead of N times, since it is pure and all ask the same.

    Args:
        cluster: How long workers take.
        setting: Batch, lag, epochs, communication.
        policy: Decides sizes.
        predictor: Of each worker's speed; for a policy that uses none, None.
        progress: Told of each step done.

    Raises:
        ValueError: Options that no plan can satisfy.

    Example:
        >>> from lbbsp_core import Even
        >>> from lbbsp_core.sim.cluster import ReplayedCluster
        >>> cluster = ReplayedCluster(np.array([[4.0, 2.0], [4.0, 1.0]]), (((), ()),) * 2, 8)
        >>> run_bsp(cluster, SimConfig(8), Even()).wall_seconds.tolist()
        [2.0, 4.0]
    """
    balancers = _balancers(
        cluster, setting, cast(Policy, _Shared(policy)), predictor or LastValue()
    )
    ranks = range(cluster.workers)
    sizes = np.zeros((cluster.steps, cluster.workers), np.int64)
    busy = np.zeros(sizes.shape)
    for step in range(cluster.steps):
        plan = balancers[0].sizes(step)
        seconds = [float(cluster.cost(rank, step)(plan[rank])) for rank in ranks]
        sizes[step], busy[step] = plan, seconds
        after = min(step + 1, cluster.steps - 1)
        messages = [
            balancer.report(seconds[rank], drivers=cluster.drivers(rank, after))
            for rank, balancer in enumerate(balancers)
        ]
        for balancer in balancers:
            balancer.receive(messages, max(seconds) + setting.communication_seconds)
        if progress is not None:
            progress(1)
    return Timeline(sizes, busy, setting.communication_seconds)


def run_oracle(cluster: SimulatedCluster, setting: SimConfig) -> Timeline:
    """The best that any policy can do: the exact plan for the speeds that each step will have."""
    known = facts(cluster, setting)
    sizes = np.zeros((cluster.steps, cluster.workers), np.int64)
    busy = np.zeros(sizes.shape)
    for step in range(cluster.steps):
        sizes[step] = known.plan(cluster.costs(step))
        busy[step] = cluster.seconds(step, sizes[step])
    return Timeline(sizes, busy, setting.communication_seconds)


def facts(cluster: SimulatedCluster, setting: SimConfig) -> BatchConstraints:
    """What policies plan for.

    Raises:
        ValueError: Options that no plan can satisfy.
    """
    return _balancer(cluster, setting, None, LastValue(), 0).constraints


@dataclass(frozen=True, eq=False)
class _Shared:
    """A policy that remembers its last answer, for the other balancers of the same step."""

    policy: Policy
    last: list[Any] = field(default_factory=list)

    @property
    def uses_costs(self) -> bool:
        return self.policy.uses_costs

    def init(self, cluster: BatchConstraints) -> Any:
        return self.policy.init(cluster)

    def update(self, state: Any, cluster: BatchConstraints, observation: Observation) -> Any:
        asked = (state, cluster, observation)
        if not self.last or self.last[0] != asked:
            self.last[:] = [asked, self.policy.update(state, cluster, observation)]
        return self.last[1]


def _balancers(
    cluster: SimulatedCluster, setting: SimConfig, policy: Policy, predictor: Predictor
) -> list[Balancer]:
    x, epoch = setting.global_batch_size, setting.steps_per_epoch
    balancers = [
        _balancer(cluster, setting, policy, predictor, rank) for rank in range(cluster.workers)
    ]
    peer_info = [balancer.static_info() for balancer in balancers]
    for balancer in balancers:
        balancer.set_peers(peer_info)
        balancer.use_order(GlobalOrder(x * epoch, x, shuffle=False))
    return balancers


def _balancer(
    cluster: SimulatedCluster,
    setting: SimConfig,
    policy: Policy | None,
    predictor: Predictor,
    rank: int,
) -> Balancer:
    return Balancer(
        rank=rank,
        workers=cluster.workers,
        global_batch_size=setting.global_batch_size,
        policy=policy,
        predictor=predictor,
        cost=setting.prior(rank),
        limits=setting.limits,
        granularity=setting.granularity,
        lag=setting.lag,
    )
