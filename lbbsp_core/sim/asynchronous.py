"""Synchronisers that let workers run ahead, with batches from a policy, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lbbsp_core.policy import BatchConstraints, Even, Policy, require_asynchronous
from lbbsp_core.predict import LastValue, Predictor
from lbbsp_core.predict.estimator import SpeedEstimator
from lbbsp_core.sim.cluster import SimulatedCluster
from lbbsp_core.sim.engine import SimConfig, facts
from lbbsp_core.sim.events import Change, Schedule, schedule
from lbbsp_core.sim.synthetic import Preemption
from lbbsp_core.sync import Synchroniser
from lbbsp_core.sync.rounds import Rounds

Ints = npt.NDArray[np.int64]

PATIENCE = 100
"""Changes of membership for each worker without a single update: the run gets nowhere."""


@dataclass(frozen=True)
class AsyncRun:
    """A run in which workers need not be in the same iteration.

    Args:
        schedule: Who computed, pushed and waited when.
        sizes: Samples of each of its iterations.
        workers: N.
        total_seconds: Until as many samples had entered the model as the run asked for.
    """

    schedule: Schedule
    sizes: Ints
    workers: int
    total_seconds: float

    @property
    def waiting_share(self) -> float:
        """Sum of waits / (N * total seconds)."""
        return self.schedule.waiting_seconds / (self.workers * self.total_seconds)


def run_async(
    cluster: SimulatedCluster,
    setting: SimConfig,
    synchroniser: Synchroniser,
    policy: Policy | None = None,
    predictor: Predictor | None = None,
    *,
    preemption: Preemption | None = None,
    progress: Callable[[int], None] | None = None,
) -> AsyncRun:
    """Runs until ``steps * X`` samples have entered the model, whoever computed them.

    A fast worker does more iterations than a slow one; beyond the cluster's last iteration a
    worker begins with its first again. Each iteration takes its busy seconds, then
    `SimConfig.communication_seconds` to push and pull.

    A policy that predicts (LB + SSP, LB + ASP) is asked whenever every worker's gradient has
    entered once more since it was asked last; who begins an iteration from then on draws the new
    batch (ours: there is no common step which a plan could be keyed by). `SimConfig.lag` means
    nothing here.

    Args:
        cluster: How long workers take.
        setting: Batch and communication.
        synchroniser: Who waits for whom.
        policy: Sizes; one that does not change, or one that predicts. Default even.
        predictor: Of each worker's speed, where the policy uses one.
        preemption: Who leaves and comes back.
        progress: Told of each X samples done.

    Raises:
        ValueError: A policy that needs common steps; preemption with changing batches; a run
            that can never finish.

    Example:
        >>> from lbbsp_core import ASP
        >>> from lbbsp_core.sim.synthetic import cores, synthetic_cluster
        >>> cluster = synthetic_cluster(cores([1, 3], samples_per_second=4.0), steps=6)
        >>> run_async(cluster, SimConfig(16), ASP()).total_seconds     # 96 samples, 16 a second
        6.0
    """
    policy = policy or Even()
    check_relaxed(policy, preemption)
    shares = _Shares(facts(cluster, setting), setting, policy, predictor or LastValue())
    run = _Relaxed(cluster, setting, shares, progress)
    changes = iter(()) if preemption is None else run.watched(preemption)
    played = schedule(
        synchroniser, run.begin, workers=cluster.workers, changes=changes, on_update=run.on_update
    )
    if run.ended is None:
        raise ValueError(
            f"the scenario can never finish: all workers have left with {run.done} of {run.goal} "
            "samples done: let them come back (preemption.mean_down_seconds), or lower steps"
        )
    pairs = zip(played.worker.tolist(), played.iteration.tolist(), strict=True)
    sizes = np.array([run.drawn[pair] for pair in pairs], np.int64)
    return AsyncRun(played, sizes, cluster.workers, run.ended)


def check_relaxed(policy: Policy, preemption: Preemption | None = None) -> None:
    """Raises ValueError where a policy cannot work without common steps; says why."""
    require_asynchronous(policy)
    if preemption is not None and not policy.is_static:
        raise ValueError(
            f"{type(policy).__name__} plans for all workers, and with preemption some are away: "
            "use bsp or fixed, or leave out preemption"
        )


class _Relaxed:
    """The clock, the counters and the batches of one run."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        setting: SimConfig,
        shares: _Shares,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._cluster, self._setting, self._shares = cluster, setting, shares
        self._progress = progress
        self._latest: dict[int, tuple[int, float]] = {}  # samples and busy seconds, by worker
        self._changes = 0
        self.drawn: dict[tuple[int, int], int] = {}
        self.goal = cluster.steps * setting.global_batch_size
        self.done = 0
        self.ended: float | None = None

    def begin(self, worker: int, iteration: int) -> float:
        """Draws a batch; seconds until the push."""
        size = self._shares.sizes[worker]
        cost = self._cluster.cost(worker, iteration % self._cluster.steps)
        busy = float(cost(size))
        self.drawn[worker, iteration] = size
        self._latest[worker] = size, busy
        return busy + self._setting.communication_seconds

    def on_update(self, worker: int, now: float) -> bool:
        """Counts the samples and learns; whether that is enough."""
        size, busy = self._latest[worker]
        before = self.done // self._setting.global_batch_size
        self.done, self._changes = self.done + size, 0
        if self._progress is not None and self.done // self._setting.global_batch_size > before:
            self._progress(self.done // self._setting.global_batch_size - before)
        self._shares.learn(worker, size, busy)
        if self.done < self.goal:
            return False
        self.ended = now
        return True

    def watched(self, preemption: Preemption) -> Iterator[Change]:
        """Its changes, unless they never let anything be done."""
        for change in preemption.changes(self._cluster.workers):
            self._changes += 1
            if self._changes > PATIENCE * self._cluster.workers:
                raise ValueError(
                    "the scenario can never finish: workers leave before they have done an "
                    f"iteration ({self._changes} changes without an update, until second "
                    f"{change.time:.4g}): raise preemption.mean_up_seconds, or lower the batch"
                )
            yield change


class _Shares:
    """Who draws how much: rounds of the policy, with a forecaster for each worker."""

    def __init__(
        self, cluster: BatchConstraints, setting: SimConfig, policy: Policy, predictor: Predictor
    ) -> None:
        self._rounds = Rounds(cluster, policy)
        shapes = [setting.shape(worker, cluster.workers) for worker in range(cluster.workers)]
        used = predictor if policy.uses_costs else None
        self._forecasters = [SpeedEstimator(used, shape) for shape in shapes]
        self._known = [forecaster.init() for forecaster in self._forecasters]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of the next batch, by worker."""
        return self._rounds.sizes

    def learn(self, worker: int, samples: int, seconds: float) -> None:
        """One iteration more of `worker`."""
        if not self._rounds.policy.uses_costs:
            return
        forecaster = self._forecasters[worker]
        known, _ = forecaster.learn(self._known[worker], samples, seconds)
        self._known[worker] = known
        speed, overhead = forecaster.predict(known)
        cost = forecaster.cost_shape.cost_at(speed, overhead) if speed else None
        self._rounds.ran(worker, samples, seconds, cost)
