"""Simulate: policies, predictors and synchronisers on clusters in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from lbbsp_core.policy import (
    EpochBalanced,
    Even,
    FixedShares,
    LeaderStraggler,
    LoadBalanced,
    Policy,
    ProportionalControl,
)
from lbbsp_core.predict import Predictor
from lbbsp_core.registry import SCHEMES
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
    fits_vectorised,
    learn,
    learned_in_step,
    lockstep,
    names_of,
    replay_trace,
    run_async,
    run_bsp,
    run_oracle,
    run_vectorised,
    synchroniser,
)
from lbbsp_core.sim.backtest import DEFAULT, contenders
from lbbsp_core.validate import require_known

Progress = Callable[[str, str, int], None]
"""Told of a file, what runs on it and a number of steps just done."""

STEPS_PER_EPOCH: Final = 50
PROFILED: Final = 5
"""The shares of ``fixed`` are the mean speeds of the first 1 / PROFILED of a trace."""


class PolicySpec(NamedTuple):
    """A policy by its name on the command line.

    Args:
        build: Makes it for a cluster whose workers get so many samples each on average.
        predicts: Whether it uses predictions, that is, differs from predictor to predictor.
        relaxed: Whether it can do without steps that all workers have in common.
    """

    build: Callable[..., Policy]
    predicts: bool = False
    relaxed: bool = False


def profiled_shares(cluster: SimulatedCluster, samples: int = 64) -> FixedShares:
    """Static shares as a profile made beforehand gives them: by speed in the first fifth.

    Speed is samples over seconds at a batch that stays the same, the harmonic mean.
    """
    even = np.full(cluster.workers, max(1, samples))
    first = range(max(1, cluster.steps // PROFILED))
    spent = np.sum([cluster.seconds(step, even) for step in first], axis=0)
    return FixedShares(tuple((len(first) * even / spent).tolist()))


POLICIES: Final[Mapping[str, PolicySpec]] = MappingProxyType(
    {
        "bsp": PolicySpec(lambda *_: Even(), relaxed=True),
        "fixed": PolicySpec(profiled_shares, relaxed=True),
        "dbs": PolicySpec(lambda *_: EpochBalanced()),
        "proportional": PolicySpec(lambda *_: ProportionalControl()),
        "leader-straggler": PolicySpec(lambda *_: LeaderStraggler()),
        "lbbsp": PolicySpec(lambda *_: LoadBalanced(), predicts=True, relaxed=True),
        "lbbsp-every": PolicySpec(
            lambda *_: LoadBalanced(min_gain=0.0), predicts=True, relaxed=True
        ),
    }
)
"""``lbbsp-every`` adopts every change, as the paper does; ``lbbsp`` only what is worth it."""


@dataclass(frozen=True)
class Experiment:
    """A cluster on which schemes are compared.

    Args:
        name: Of its trace, run or scenario.
        kind: Which of the three: ``trace`` (a recorded run counts as one) or ``scenario``.
        cluster: How long workers take.
        setting: What all runs on it have in common, but for communication.
        communication: What an exchange of gradients costs.
        preemption: Who leaves and comes back.
    """

    name: str
    kind: str
    cluster: SimulatedCluster
    setting: SimConfig
    communication: Communication = field(default_factory=FixedTime)
    preemption: Preemption | None = None

    @property
    def together(self) -> SimConfig:
        """The setting where all workers communicate at once."""
        seconds = self.communication.seconds(self.cluster.workers)
        return replace(self.setting, communication_seconds=seconds)

    @property
    def alone(self) -> SimConfig:
        """The setting where they push and pull one by one."""
        return replace(self.setting, communication_seconds=self.communication.seconds_alone())


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Args:
        trace: File; None for a scenario.
        sync: How workers are synchronised.
        policy: Name in `POLICIES`.
        predictor: Name in `lbbsp_core.sim.backtest.contenders`; None where none is used.
        workers: N.
        total_seconds: In virtual time, until all samples of all steps had entered the model.
        waiting_share: Sum of waits / (N * total seconds).
        efficiency: Time of the oracle, which knows each step's speeds and is in step, /
            total_seconds. Workers that are not in step may beat it.
        time_to_accuracy_seconds: None where nothing was learned, or the target never reached.
        scenario: Its name; None for a trace.
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
        """Of the trace or scenario."""
        return self.trace or self.scenario or ""

    @property
    def title(self) -> str:
        """Of the scheme, for people."""
        return _title(self.sync, self.policy, self.predictor)


class Result(NamedTuple):
    """A run as a row, and in full.

    Args:
        row: Its figures.
        run: Who computed and waited when.
        curve: Accuracy by time; None where nothing was learned.
    """

    row: Row
    run: Timeline | AsyncRun
    curve: Curve | None = None


class LearningTarget(NamedTuple):
    """What is learned, and how well.

    Args:
        task: Data, model, learning rate.
        accuracy: On the test set, in (0, 1].
    """

    task: Task
    accuracy: float


def simulate(
    traces: Sequence[Trace],
    *,
    policies: Sequence[str] | None = None,
    predictors: Sequence[str] = (DEFAULT,),
    syncs: Sequence[str] = ("bsp",),
    global_batch_size: int | None = None,
    lag: int = 1,
    steps_per_epoch: int = STEPS_PER_EPOCH,
    communication_seconds: float = 0.0,
    progress: Progress | None = None,
) -> list[Row]:
    """Replays traces under every policy, and every predictor where the policy uses one.

    All steps count, the first ones too, in which nothing is known yet.

    Args:
        traces: From `lbbsp_core.sim.read_trace`, of two workers or more each.
        policies: Names in `POLICIES`; None: all that each sync allows.
        predictors: Names in `lbbsp_core.sim.backtest.contenders`, each trained for `lag`.
        syncs: As `lbbsp_core.sim.synchroniser` reads them.
        global_batch_size: X; by default that of each recording.
        lag: A plan decided after step k serves step ``k + lag``.
        steps_per_epoch: For ``dbs``.
        communication_seconds: Of each step.
        progress: Called after each step, once for each run of it.

    Raises:
        ValueError: An unknown name, no trace, or options that no plan can satisfy.
        TraceError: A trace of one worker, or with hardly a common step.
    """
    if not traces:
        raise ValueError("simulate needs at least one trace, got none: name a trace file")
    chosen = chosen_runs(policies, predictors, lag, syncs)
    arenas = [
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
    return [result.row for result in run_experiments(arenas, chosen, progress=progress)]


def arena_of(scenario: Scenario, lag: int = 1) -> Experiment:
    """The cluster of a scenario.

    GPUs of known profiles are told to their balancers, as in training.
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
        ),
        scenario.communication,
        scenario.preemption,
    )


def run_experiments(
    arenas: Iterable[Experiment],
    runs: Sequence[Run],
    *,
    goal: LearningTarget | None = None,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """Runs every scheme on every cluster.

    Args:
        arenas: Read one by one.
        runs: From `chosen_runs`.
        goal: Learn along; None: do not.
        progress: As in `simulate`.

    Raises:
        ValueError: A combination that cannot be, or a run that can never finish.
    """
    if goal is not None and not 0 < goal.accuracy <= 1:
        raise ValueError(
            f"target_accuracy must be in (0, 1], got {goal.accuracy!r}: no model ever reaches it"
        )
    for arena in arenas:
        best = run_oracle(arena.cluster, arena.together).total_seconds
        learned: list[Any] = []
        for run in runs:
            done = _played(arena, run, _told(progress, arena.name, run.title))
            curve = None if goal is None else _learned(goal.task, done, arena, learned)
            reached = curve.time_to(goal.accuracy) if curve and goal else None
            yield Result(_row(arena, run, done, best, reached), done, curve)


def _played(arena: Experiment, run: Run, told: Callable[[int], None] | None) -> Timeline | AsyncRun:
    x = arena.setting.global_batch_size
    policy = POLICIES[run.policy].build(arena.cluster, x // arena.cluster.workers)
    in_step = run.sync == "bsp"
    if in_step and arena.preemption is None:
        setting = arena.together
        play = run_vectorised if fits_vectorised(setting, policy, run.predictor) else run_bsp
        return play(arena.cluster, setting, policy, run.predictor, told)
    return run_async(
        arena.cluster,
        arena.together if in_step else arena.alone,
        synchroniser(run.sync),
        policy,
        run.predictor,
        preemption=arena.preemption,
        progress=told,
    )


def _learned(task: Task, run: Timeline | AsyncRun, arena: Experiment, cache: list[Any]) -> Curve:
    """All runs in step make the same updates: those are learned from once for each arena."""
    x = arena.setting.global_batch_size
    if isinstance(run, AsyncRun):
        return learn(task, run, x)
    if not cache:
        cache.append(learned_in_step(task, x, len(run.sizes)))
    return lockstep(cache[0], run)


class Run(NamedTuple):
    """A policy with its predictor (None where it uses none) under a synchroniser."""

    policy: str
    predictor_name: str | None = None
    predictor: Predictor | None = None
    sync: str = "bsp"

    @property
    def title(self) -> str:
        """For people."""
        return _title(self.sync, self.policy, self.predictor_name)


def _title(sync: str, policy: str, predictor: str | None) -> str:
    return " ".join(filter(None, (None if sync == "bsp" else sync, policy, predictor)))


def chosen_runs(
    policies: Sequence[str] | None,
    predictors: Sequence[str],
    lag: int = 1,
    syncs: Sequence[str] = ("bsp",),
) -> list[Run]:
    """Every policy under every sync, once, or once for each predictor.

    Args:
        policies: Names in `POLICIES`; None: all that a sync allows.
        predictors: Names in `lbbsp_core.sim.backtest.contenders`.
        lag: That they are trained for.
        syncs: As `lbbsp_core.sim.synchroniser` reads them.

    Raises:
        ValueError: An unknown name (says which known one is nearest), or a policy that needs
            common steps under a sync without.

    Example:
        >>> [run.title for run in chosen_runs(["bsp", "lbbsp"], ["last", "ema0.2"])]
        ['bsp', 'lbbsp last', 'lbbsp ema0.2']
        >>> [run.title for run in chosen_runs(["lbbsp"], ["last"], syncs=["bsp", "ssp:3"])]
        ['lbbsp last', 'ssp:3 lbbsp last']
    """
    known = contenders(max(lag, 1))
    if "arima" in predictors and "arima" not in known:
        raise ValueError("the predictor arima needs statsmodels: pip install 'lbbsp[arima]'")
    named = list(POLICIES) if policies is None else policies
    for what, names, choice in (
        ("policy", named, POLICIES),
        ("predictor", predictors, known),
        ("sync", syncs, SCHEMES),
    ):
        if not names:
            raise ValueError(f"no {what} is named: choose from {', '.join(choice)}")
    for policy in named:
        require_known("policy", policy, POLICIES)
    for predictor in predictors:
        require_known("predictor", predictor, known)
    runs = []
    for sync in dict.fromkeys(syncs):
        synchroniser(sync)
        for policy in dict.fromkeys(named):
            if not _allowed(sync, policy, policies is not None):
                continue
            if POLICIES[policy].predicts:
                runs += [Run(policy, name, known[name], sync) for name in dict.fromkeys(predictors)]
            else:
                runs.append(Run(policy, sync=sync))
    return runs


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """What ``lbbsp simulate --json`` writes: a row has a ``trace`` or a ``scenario``."""
    kinds = ("trace", "scenario")
    return {
        "rows": [
            {key: value for key, value in asdict(row).items() if key not in kinds or value}
            for row in rows
        ]
    }


def _allowed(sync: str, policy: str, named: bool) -> bool:
    """Whether the two go together; if not, and the user has named them, an error says why."""
    if sync == "bsp" or POLICIES[policy].relaxed:
        return True
    if named:
        raise ValueError(
            f"sync {sync} and policy {policy} do not go together: {policy} compares what all "
            "workers took in the same steps, and without a barrier there are none; use "
            f"{', '.join(name for name, one in POLICIES.items() if one.relaxed)}, or sync bsp"
        )
    return False


def _told(progress: Progress | None, file: str, title: str) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda steps: progress(file, title, steps)


def _row(
    arena: Experiment, run: Run, done: Timeline | AsyncRun, best: float, reached: float | None
) -> Row:
    return Row(
        trace=arena.name if arena.kind == "trace" else None,
        sync=run.sync,
        policy=run.policy,
        predictor=run.predictor_name,
        workers=arena.cluster.workers,
        total_seconds=done.total_seconds,
        waiting_share=done.waiting_share,
        efficiency=best / done.total_seconds,
        time_to_accuracy_seconds=reached,
        scenario=arena.name if arena.kind == "scenario" else None,
    )
