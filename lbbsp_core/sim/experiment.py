"""Experiments: policies, predictors and synchronisers on simulated clusters in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lbbsp_core.policy import FixedShares, Policy, require_asynchronous
from lbbsp_core.predict import Predictor
from lbbsp_core.registry import POLICIES, PREDICTORS, SYNCHRONISERS, Registry
from lbbsp_core.sim import (
    AsyncRun,
    Communication,
    Curve,
    FixedTime,
    Preemption,
    Scenario,
    SimConfig,
    SimulatedCluster,
    Task,
    Timeline,
    Trace,
    learn,
    learned_in_step,
    lockstep,
    names_of,
    replay_trace,
    run_async,
    run_bsp,
    run_oracle,
)
from lbbsp_core.sim.backtest import DEFAULT
from lbbsp_core.sync import Synchroniser

T = TypeVar("T")
Floats = npt.NDArray[np.float64]

Progress = Callable[[str, str, int], None]
"""Called with a trace or scenario, the title of the run, and the number of new steps."""

_LOCKSTEP: Final = "bsp"
"""The synchroniser under which all workers are in the same step."""

STEPS_PER_EPOCH: Final = 50
"""Steps of an epoch of a trace, unless given."""

PROFILED: Final = 5
"""The shares of ``fixed`` are the mean speeds in the first 1 / PROFILED of the steps."""


def profiled_shares(cluster: SimulatedCluster, samples: int = 64) -> FixedShares:
    """Returns static shares as a profile made beforehand gives them: speeds in the first fifth.

    Speed is samples over seconds at a constant batch, the harmonic mean.

    Args:
        cluster: Cluster to profile.
        samples: Batch of each worker.
    """
    even = np.full(cluster.workers, max(1, samples))
    first = range(max(1, cluster.steps // PROFILED))
    spent = np.sum([cluster.seconds(step, even) for step in first], axis=0)
    return FixedShares(tuple((len(first) * even / spent).tolist()))


def build_policy(text: str, cluster: SimulatedCluster, samples: int = 64) -> Policy:
    """Creates a policy by name; one with a field ``shares`` gets those of a profile.

    Args:
        text: As `lbbsp_core.registry` reads it.
        cluster: Cluster on which it runs.
        samples: Mean batch of a worker, for the profile.

    Raises:
        ValueError: The text cannot be read, or a value is out of range.
    """
    component = POLICIES.parse(text)
    if not component.accepts("shares"):
        return component.build()
    return component.build(shares=profiled_shares(cluster, samples).shares)


@dataclass(frozen=True)
class Experiment:
    """A cluster on which policies, predictors and synchronisers are compared.

    Args:
        name: Name of its trace, recorded run or scenario.
        kind: ``trace`` (also for a recorded run) or ``scenario``.
        cluster: Times that the workers take.
        config: Configuration of all runs on it, without communication.
        communication: Cost of an exchange of gradients.
        preemption: Workers that leave and come back; None if all stay.
    """

    name: str
    kind: str
    cluster: SimulatedCluster
    config: SimConfig
    communication: Communication = field(default_factory=FixedTime)
    preemption: Preemption | None = None

    @property
    def together(self) -> SimConfig:
        """Configuration of runs in which all workers communicate in the same step."""
        return self._config(lambda: self.communication.seconds(self.cluster.workers))

    @property
    def alone(self) -> SimConfig:
        """Configuration of runs in which workers push and pull one by one."""
        return self._config(self.communication.seconds_alone)

    def _config(self, seconds: Callable[[], float]) -> SimConfig:
        """Returns the configuration with the links of servers if there are any, else `seconds`."""
        if (links := self.communication.links()) is not None:
            return replace(self.config, links=links)
        return replace(self.config, communication_seconds=seconds())


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one run.

    Args:
        trace: Trace file; None for a scenario.
        sync: Synchroniser by name, see `lbbsp_core.registry`.
        policy: Policy by name.
        predictor: Predictor by name; None where the policy uses none.
        workers: Number of workers, N.
        total_seconds: Virtual time until all samples of all steps had entered the model.
        waiting_share: Sum of waits / (N * total seconds).
        efficiency: Time of the oracle, which knows each step's speeds and waits in every step, /
            total_seconds. Workers without common steps may be faster than the oracle.
        time_to_accuracy_seconds: Virtual time to the target accuracy; None where nothing was
            learned, or the target was never reached.
        scenario: Name of the scenario; None for a trace.
    """

    trace: str | None
    sync: str
    policy: str
    predictor: str | None
    workers: int
    total_seconds: float
    waiting_share: float
    efficiency: float
    time_to_accuracy_seconds: float | None = None
    scenario: str | None = None

    @property
    def name(self) -> str:
        """Name of the trace or scenario."""
        return self.trace or self.scenario or ""

    @property
    def title(self) -> str:
        """Synchroniser (unless bsp), policy and predictor, to show."""
        return _title(self.sync, self.policy, self.predictor)


class Result(NamedTuple):
    """Result of one run.

    Args:
        row: Figures of the run.
        run: Times at which each worker computed and waited.
        curve: Accuracy by time; None where nothing was learned.
    """

    row: Row
    run: Timeline | AsyncRun
    curve: Curve | None = None


class LearningTarget(NamedTuple):
    """A task to learn during the runs, and the accuracy to reach.

    Args:
        task: Data, model and learning rate.
        accuracy: Target accuracy on the test set, in (0, 1].
    """

    task: Task
    accuracy: float


def simulate(
    traces: Sequence[Trace],
    *,
    policies: Sequence[Policy | str] | None = None,
    predictors: Sequence[Predictor | str] = (DEFAULT,),
    syncs: Sequence[Synchroniser | str] = (_LOCKSTEP,),
    global_batch_size: int | None = None,
    lag: int = 1,
    steps_per_epoch: int = STEPS_PER_EPOCH,
    communication_seconds: float = 0.0,
    progress: Progress | None = None,
) -> list[Row]:
    """Replays traces under every policy, and every predictor where the policy uses one.

    All steps count, including the first ones, in which no speed is known yet.

    Args:
        traces: From `lbbsp_core.sim.read_trace`, of two workers or more each.
        policies: Policies by name, see `lbbsp_core.registry`, or as objects; None: all that each
            synchroniser allows.
        predictors: Predictors by name, each trained for `lag`, or as objects.
        syncs: Synchronisers by name or as objects.
        global_batch_size: X; by default that of each recording.
        lag: Steps from a plan's decision to its use: decided after step k, it applies to step
            ``k + lag``.
        steps_per_epoch: Steps between two plans of ``dbs``.
        communication_seconds: Communication time of each step, in seconds.
        progress: Called after each step of each run.

    Returns:
        One row for each run.

    Raises:
        ValueError: A name is unknown, there are no traces, or no plan can satisfy the options.
        TraceError: A trace has a single worker, or too few steps that all workers have in common.
    """
    if not traces:
        raise ValueError("simulate needs at least one trace, got none: name a trace file")
    chosen = chosen_runs(policies, predictors, lag, syncs)
    experiments = [
        Experiment(
            name,
            "trace",
            cluster := replay_trace(trace),
            SimConfig(
                cluster.global_batch_size if global_batch_size is None else global_batch_size,
                lag,
                steps_per_epoch,
            ),
            FixedTime(communication_seconds),
        )
        for name, trace in zip(names_of(traces), traces, strict=True)
    ]
    return [result.row for result in run_experiments(experiments, chosen, progress=progress)]


def experiment_of(scenario: Scenario, lag: int = 1) -> Experiment:
    """Creates the experiment of a scenario.

    Balancers are given the known profiles of GPUs, as in training.

    Args:
        scenario: Scenario with cluster, communication and preemption.
        lag: Steps from a plan's decision to its use.
    """
    return Experiment(
        scenario.name,
        "scenario",
        scenario.cluster(),
        SimConfig(
            scenario.total,
            lag,
            scenario.steps_per_epoch,
            limits=scenario.limits(),
            cost=scenario.curves() if scenario.profiles else None,
            work=scenario.work,
            first_use_seconds=scenario.first_use_seconds,
        ),
        scenario.communication,
        scenario.preemption,
    )


def run_experiments(
    experiments: Iterable[Experiment],
    runs: Sequence[Run],
    *,
    goal: LearningTarget | None = None,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """Runs every combination on every cluster.

    Args:
        experiments: Clusters, read one by one.
        runs: From `chosen_runs`.
        goal: What to learn during the runs; None: nothing.
        progress: As in `simulate`.

    Yields:
        One result for each run on each cluster, in the order of clusters.

    Raises:
        ValueError: A combination is impossible, or a run can never finish.
    """
    if goal is not None and not 0 < goal.accuracy <= 1:
        raise ValueError(
            f"target_accuracy must be in (0, 1], got {goal.accuracy!r}: give the fraction of test "
            "samples to classify correctly"
        )
    for experiment in experiments:
        oracle_seconds = run_oracle(experiment.cluster, experiment.together).total_seconds
        cache: list[Floats] = []
        for run in runs:
            done = _play(experiment, run, _advance(progress, experiment.name, run.title))
            curve = None if goal is None else _learn(goal.task, done, experiment, cache)
            reached = curve.time_to(goal.accuracy) if curve and goal else None
            yield Result(_row(experiment, run, done, oracle_seconds, reached), done, curve)


def _play(
    experiment: Experiment, run: Run, advance: Callable[[int], None] | None
) -> Timeline | AsyncRun:
    cluster, x = experiment.cluster, experiment.config.global_batch_size
    policy = run.own_policy or build_policy(run.policy, cluster, x // cluster.workers)
    if run.has_common_steps and experiment.preemption is None:
        return run_bsp(cluster, experiment.together, policy, run.predictor, advance)
    alone = experiment.alone
    if alone.work is not None:
        raise ValueError(
            f"scenarios with [work] need common steps, and workers that stay, got sync {run.sync} "
            f"and preemption {experiment.preemption}: leave [work] out, or use sync bsp without "
            "preemption"
        )
    return run_async(
        cluster,
        experiment.together if run.has_common_steps else alone,
        run.own_synchroniser or SYNCHRONISERS.build(run.sync),
        policy,
        run.predictor,
        preemption=experiment.preemption,
        progress=advance,
    )


def _learn(
    task: Task, run: Timeline | AsyncRun, experiment: Experiment, cache: list[Floats]
) -> Curve:
    """Learns from a run; all runs with common steps make the same updates and share one result."""
    x = experiment.config.global_batch_size
    if isinstance(run, AsyncRun):
        return learn(task, run, x)
    if not cache:
        cache.append(learned_in_step(task, x, len(run.sizes)))
    return lockstep(cache[0], run)


class Run(NamedTuple):
    """A policy with its predictor under a synchroniser.

    Args:
        policy: Name of the policy; the repr of an object that has none.
        predictor_name: Name of the predictor, likewise; None where the policy uses none.
        predictor: The predictor itself.
        sync: Name of the synchroniser, likewise.
        own_policy: Policy that was given as an object.
        own_synchroniser: Synchroniser that was given as an object.
    """

    policy: str
    predictor_name: str | None = None
    predictor: Predictor | None = None
    sync: str = _LOCKSTEP
    own_policy: Policy | None = None
    own_synchroniser: Synchroniser | None = None

    @property
    def has_common_steps(self) -> bool:
        """True under plain BSP, where all workers are always in the same step."""
        return self.sync == _LOCKSTEP

    @property
    def title(self) -> str:
        """Synchroniser (unless bsp), policy and predictor, to show."""
        return _title(self.sync, self.policy, self.predictor_name)


def _title(sync: str, policy: str, predictor: str | None) -> str:
    return " ".join(filter(None, (None if sync == _LOCKSTEP else sync, policy, predictor)))


def chosen_runs(
    policies: Sequence[Policy | str] | None,
    predictors: Sequence[Predictor | str],
    lag: int = 1,
    syncs: Sequence[Synchroniser | str] = (_LOCKSTEP,),
) -> list[Run]:
    """Combines every synchroniser with every policy, and every predictor where one is used.

    Args:
        policies: Policies by name, see `lbbsp_core.registry`, or as objects; None: all that a
            synchroniser allows.
        predictors: Predictors by name or as objects.
        lag: Horizon for which predictors given by name are trained, in steps.
        syncs: Synchronisers by name or as objects.

    Returns:
        The combinations, each once, ordered by synchroniser.

    Raises:
        ValueError: A name is unknown (names the nearest one), or a given policy needs common
            steps and the synchroniser has none.
        TypeError: An object is of another kind, or one name is given in place of a list.

    Example:
        >>> [run.title for run in chosen_runs(["bsp", "lbbsp"], ["last", "ema0.2"])]
        ['bsp', 'lbbsp last', 'lbbsp ema0.2']
        >>> [run.title for run in chosen_runs(["lbbsp"], ["last"], syncs=["bsp", "ssp:3"])]
        ['lbbsp last', 'ssp:3 lbbsp last']
        >>> from lbbsp_core import Ema, LoadBalanced
        >>> [run.title for run in chosen_runs([LoadBalanced()], [Ema(0.5), Ema(0.1)])]
        ['lbbsp ema0.5', 'lbbsp Ema(alpha=0.1)']
    """
    chosen = _named(POLICIES, list(POLICIES) if policies is None else policies)
    kinds = {name: _kind_of(policy) for name, policy in chosen.items()}
    built = {
        name: PREDICTORS.resolve(predictor, horizon=max(lag, 1))
        for name, predictor in _named(PREDICTORS, predictors).items()
    }
    runs = []
    for sync, synchroniser in _named(SYNCHRONISERS, syncs).items():
        SYNCHRONISERS.resolve(synchroniser)
        for name, kind in kinds.items():
            if sync != _LOCKSTEP and kind.needs_common_steps:
                if policies is None:
                    continue
                require_asynchronous(kind, name, f"sync {sync}")
            run = Run(
                name, None, None, sync, _unless_text(chosen[name]), _unless_text(synchroniser)
            )
            if kind.uses_costs:
                runs += [run._replace(predictor_name=n, predictor=p) for n, p in built.items()]
            else:
                runs.append(run)
    return runs


def _named(registry: Registry[T], given: Sequence[T | str]) -> dict[str, T | str]:
    """Returns components by the names that tables show, each once."""
    if not given:
        raise ValueError(f"no {registry.kind} is named: choose from {', '.join(registry)}")
    if isinstance(given, str):
        raise TypeError(f"give a list of {registry.kind} names, got {given!r}: write [{given!r}]")
    return {registry.name_of(one): one for one in given}


def _unless_text(given: T | str) -> T | None:
    return None if isinstance(given, str) else given


def _kind_of(given: Policy | str) -> Policy | type[Policy]:
    """Reads a policy and checks its options, but for those that depend on the cluster.

    Raises:
        ValueError: The text cannot be read, or a value is out of range.
        TypeError: It is neither a policy nor a text.
    """
    if not isinstance(given, str):
        return POLICIES.resolve(given)
    component = POLICIES.parse(given)
    if not component.accepts("shares"):
        component.build()
    return component.cls


def figures(rows: Sequence[Row]) -> dict[str, list[dict[str, object]]]:
    """Returns what ``lbbsp simulate --json`` writes; a row has a ``trace`` or a ``scenario``."""
    kinds = ("trace", "scenario")
    return {
        "rows": [
            {key: value for key, value in asdict(row).items() if key not in kinds or value}
            for row in rows
        ]
    }


def _advance(progress: Progress | None, name: str, title: str) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda steps: progress(name, title, steps)


def _row(
    experiment: Experiment,
    run: Run,
    done: Timeline | AsyncRun,
    oracle_seconds: float,
    reached: float | None,
) -> Row:
    return Row(
        trace=experiment.name if experiment.kind == "trace" else None,
        sync=run.sync,
        policy=run.policy,
        predictor=run.predictor_name,
        workers=experiment.cluster.workers,
        total_seconds=done.total_seconds,
        waiting_share=done.waiting_share,
        efficiency=oracle_seconds / done.total_seconds,
        time_to_accuracy_seconds=reached,
        scenario=experiment.name if experiment.kind == "scenario" else None,
    )
