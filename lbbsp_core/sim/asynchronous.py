"""Asynchronous synchronisers with batch sizes from a policy, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lbbsp_core.policy import Even, Policy
from lbbsp_core.predict import LastValue, Predictor
from lbbsp_core.predict.estimator import SpeedEstimator
from lbbsp_core.sim.cluster import SimulatedCluster
from lbbsp_core.sim.config import SimConfig
from lbbsp_core.sim.engine import batch_constraints
from lbbsp_core.sim.events import Change, Schedule, schedule
from lbbsp_core.sim.synthetic import Preemption
from lbbsp_core.sync import Synchroniser
from lbbsp_core.sync.rounds import Rounds
from lbbsp_core.types import Ints

MAX_IDLE_CHANGES = 100
"""Membership changes per worker without a single update, after which a run is given up."""


@dataclass(frozen=True)
class AsyncRun:
    """Simulated run in which workers need not be in the same iteration.

    Args:
        schedule: Start, push and release of every iteration.
        sizes: Batch size of each iteration of `schedule`, in samples, shape ``(pushes,)``.
        workers: Number of workers, N.
        total_seconds: Virtual seconds until the model had received as many samples as the run
            asked for.
        notices: Notices of the policy, each with the round of all workers from which on it holds.
    """

    schedule: Schedule
    sizes: Ints
    workers: int
    total_seconds: float
    notices: tuple[str, ...] = ()

    @property
    def waiting_share(self) -> float:
        """Sum of waits / (N * total seconds)."""
        return self.schedule.waiting_seconds / (self.workers * self.total_seconds)


def run_async(
    cluster: SimulatedCluster,
    config: SimConfig,
    synchroniser: Synchroniser,
    policy: Policy | None = None,
    predictor: Predictor | None = None,
    *,
    preemption: Preemption | None = None,
    progress: Callable[[int], None] | None = None,
) -> AsyncRun:
    """Runs until the model has received ``steps * X`` samples, from whichever workers.

    A fast worker does more iterations than a slow one; after the cluster's last iteration a
    worker continues with its first one. An iteration takes its busy seconds, then
    `SimConfig.communication_seconds` to push and pull; with `SimConfig.links`, a worker pulls the
    model when it is released, computes, and pushes, and both transfers wait in the queues of the
    links.

    A policy that changes its sizes (LB + SSP, LB + ASP) is updated whenever the model has received
    one more gradient from every worker since the last update of the policy. A worker that starts an
    iteration draws the batch size that is current at this moment (ours: there is no common step
    by which a plan could be keyed). `SimConfig.lag` has no effect here. When a worker leaves or
    returns, such a policy divides X among the workers that are present; static batches stay.

    Args:
        cluster: Busy seconds of each worker's iterations.
        config: Global batch size and communication.
        synchroniser: Decides which workers wait for which.
        policy: Decides batch sizes. It must need no common steps. Default: even batches.
        predictor: Forecasts each worker's speed, if the policy uses costs.
        preemption: Departures and returns of workers. Default: none.
        progress: Called with the number of further global batches (X samples) done.

    Returns:
        The schedule, with the batch size of each iteration.

    Raises:
        ValueError: The policy needs common steps or workers that stay, those that are present
            cannot take X samples, or the run can never finish.

    Example:
        >>> from lbbsp_core import ASP
        >>> from lbbsp_core.sim.synthetic import cores, synthetic_cluster
        >>> cluster = synthetic_cluster(cores([1, 3], samples_per_second=4.0), steps=6)
        >>> run_async(cluster, SimConfig(16), ASP()).total_seconds     # 96 samples, 16 a second
        6.0
    """
    policy = policy or Even()
    if preemption is not None and not allows_preemption(policy):
        raise ValueError(
            f"{type(policy).__name__} plans for all workers, and with preemption some are away: "
            "use bsp, fixed or lbbsp, or leave out preemption"
        )
    run = _AsyncSimulation(cluster, config, policy, predictor or LastValue(), progress)
    finished = schedule(
        synchroniser,
        run.start_iteration,
        workers=cluster.workers,
        changes=() if preemption is None else run.checked_changes(preemption),
        on_update=run.record_update,
        links=config.links,
    )
    if run.end_seconds is None:
        raise ValueError(
            f"the scenario can never finish: all workers have left with {run.samples_done} of "
            f"{run.samples_needed} samples done: let them come back "
            "(preemption.mean_down_seconds), or lower steps"
        )
    pairs = zip(finished.worker.tolist(), finished.iteration.tolist(), strict=True)
    sizes = np.array([run.batch_sizes[pair] for pair in pairs], np.int64)
    return AsyncRun(finished, sizes, cluster.workers, run.end_seconds, tuple(run.rounds.notices))


def allows_preemption(policy: Policy | type[Policy]) -> bool:
    """Returns whether workers may leave and return under a policy."""
    return policy.is_static or policy.accepts_narrower_limits


@dataclass
class _AsyncSimulation:
    """Sample counts and batch sizes of one run, updated by the event loop's callbacks."""

    _cluster: SimulatedCluster
    _config: SimConfig
    _policy: Policy
    _predictor: Predictor
    _progress: Callable[[int], None] | None
    _idle_changes: int = 0
    samples_done: int = 0
    end_seconds: float | None = None

    def __post_init__(self) -> None:
        workers = self._cluster.workers
        flags = [True] * workers if self._config.first_use_seconds else None
        self.rounds = Rounds(batch_constraints(self._cluster, self._config), self._policy, flags)
        used = self._predictor if self._policy.uses_costs else None
        shapes = [self._config.shape(worker, workers) for worker in range(workers)]
        self._estimators = [SpeedEstimator(used, shape) for shape in shapes]
        self._states = [estimator.init() for estimator in self._estimators]
        self._used: set[tuple[int, int]] = set()  # workers and batch sizes
        self._latest: dict[int, tuple[int, float]] = {}  # samples and busy seconds, by worker
        self.batch_sizes: dict[tuple[int, int], int] = {}  # by worker and iteration
        self.samples_needed = self._cluster.steps * self._config.global_batch_size

    def start_iteration(self, worker: int, iteration: int) -> float:
        """Draws a batch and returns the seconds until its gradient is ready to be pushed."""
        size = self.rounds.sizes[worker]
        busy_seconds = float(self._cluster.cost(worker, iteration % self._cluster.steps)(size))
        if (worker, size) not in self._used:
            busy_seconds += self._config.first_use_seconds
            self._used.add((worker, size))
        self.batch_sizes[worker, iteration] = size
        self._latest[worker] = size, busy_seconds
        return busy_seconds + self._config.communication_seconds

    def record_update(self, worker: int, now: float) -> bool:
        """Counts a gradient's samples and returns whether the run is complete."""
        size, busy_seconds = self._latest[worker]
        started = self.samples_done % self._config.global_batch_size
        self.samples_done += size
        self._idle_changes = 0
        batches = (started + size) // self._config.global_batch_size
        if self._progress is not None and batches:
            self._progress(batches)
        if not self._policy.is_static:
            self._observe(worker, size, busy_seconds)
        if self.samples_done >= self.samples_needed:
            self.end_seconds = now
        return self.end_seconds is not None

    def checked_changes(self, preemption: Preemption) -> Iterator[Change]:
        """Yields the membership changes, and raises ValueError if no update occurs between them.

        Plans for the workers that are present. The event loop asks for the next change when it
        handles one, before any worker is released.
        """
        for change in preemption.changes(self._cluster.workers):
            self._idle_changes += 1
            if self._idle_changes > MAX_IDLE_CHANGES * self._cluster.workers:
                raise ValueError(
                    "the scenario can never finish: workers leave before they have done an "
                    f"iteration ({self._idle_changes} changes without an update, until second "
                    f"{change.time:.4g}): raise preemption.mean_up_seconds, or lower the batch"
                )
            yield change
            active = self.rounds.active
            self.rounds.use_present(active ^ {change.worker})

    def _observe(self, worker: int, samples: int, busy_seconds: float) -> None:
        """Learns from one finished iteration of `worker`."""
        estimator = self._estimators[worker]
        measured = self.rounds.measured(worker, samples, busy_seconds)
        state, accepted = estimator.learn(self._states[worker], samples, measured)
        self._states[worker] = state
        speed, overhead = estimator.predict(state)
        cost = estimator.cost_shape.cost_at(speed, overhead) if speed else None
        excluded = measured is not None and not accepted
        self.rounds.ran(worker, samples, busy_seconds, cost, excluded)
