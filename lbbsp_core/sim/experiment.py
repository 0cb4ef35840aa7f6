"""Experiments: policies, predictors and synchronisers on simulated clusters in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from lbbsp_core.policy import Policy, require_asynchronous
from lbbsp_core.predict import Predictor
from lbbsp_core.registry import POLICIES, PREDICTORS, SYNCHRONISERS, Registry
from lbbsp_core.sim.asynchronous import AsyncRun, allows_preemption, run_async
from lbbsp_core.sim.cluster import SimulatedCluster
from lbbsp_core.sim.communication import Communication, FixedTime, ServerLinks
from lbbsp_core.sim.config import SimConfig
from lbbsp_core.sim.engine import Timeline, run_bsp, run_oracle
from lbbsp_core.sim.scenario import Scenario
from lbbsp_core.sim.synthetic import Preemption
from lbbsp_core.sync import Synchroniser

Progress = Callable[[str, str, int], None]
"""Called with a trace or scenario, the title of the run, and the number of new steps."""

T = TypeVar("T")

LOCKSTEP: Final = "bsp"
"""The synchroniser under which all workers are in the same step."""

SHARING: Final = "+reserve"
"""What follows the name of a policy under which workers share work inside a step."""

PROFILED: Final = 5
"""The shares of ``fixed`` are the mean speeds in the first 1 / PROFILED of the steps."""


@dataclass(frozen=True)
class Experiment:
    """A cluster on which policies, predictors and synchronisers are compared."""

    name: str  # name of its trace, recorded run or scenario
    kind: str  # `trace` (also for a recorded run) or `scenario`
    cluster: SimulatedCluster  # times that the workers take
    config: SimConfig  # configuration of all runs on it, without communication
    # cost of an exchange of gradients
    communication: Communication = field(default_factory=FixedTime)
    preemption: Preemption | None = None  # workers that leave and come back; None if all stay

    @property
    def together(self) -> SimConfig:
        """Configuration of runs in which all workers communicate in the same step."""
        return self._config(self.communication.together(self.cluster.workers))

    @property
    def alone(self) -> SimConfig:
        """Configuration of runs in which workers push and pull one by one."""
        return self._config(self.communication.alone())

    def _config(self, time: float | ServerLinks) -> SimConfig:
        if isinstance(time, ServerLinks):
            return replace(self.config, links=time)
        return replace(self.config, communication_seconds=time)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one run."""

    kind: str  # `trace` or `scenario`
    name: str
    sync: str  # synchroniser by name, see `lbbsp_core.registry`
    policy: str
    predictor: str | None  # predictor by name; None where the policy uses none
    workers: int
    total_seconds: float  # virtual time until all samples of all steps had entered the model
    waiting_share: float  # sum of waits / (N * total seconds)
    # time of the oracle, which knows each step's speeds and waits in every step, / total_seconds.
    # Workers without common steps may be faster than the oracle
    efficiency: float
    notices: list[str] = field(default_factory=list)  # of the policy

    @property
    def title(self) -> str:
        """Synchroniser (unless bsp), policy and predictor, to show."""
        return title_of(self.sync, self.policy, self.predictor)


class Result(NamedTuple):
    """Figures of a run, and when each worker computed and waited."""

    row: Row
    run: Timeline | AsyncRun


def experiment_of(scenario: Scenario, lag: int = 1, **costs: Any) -> Experiment:
    """Creates the experiment of a scenario; `costs` are further fields of its `SimConfig`.

    Balancers are given the known profiles of GPUs, as in training.
    """
    config = SimConfig(
        scenario.total,
        lag,
        scenario.steps_per_epoch,
        limits=scenario.limits(),
        cost=scenario.curves() if scenario.profiles else "proportional",
        work=scenario.work,
        first_use_seconds=scenario.first_use_seconds,
        **costs,
    )
    cluster, paid = scenario.cluster(), scenario.communication
    return Experiment(scenario.name, "scenario", cluster, config, paid, scenario.preemption)


def run_experiments(
    experiments: Iterable[Experiment], runs: Sequence[Run], *, progress: Progress | None = None
) -> Iterator[Result]:
    """Runs every combination on every cluster, and yields the results in the order of clusters.

    Clusters are read one by one.
    """
    for experiment in experiments:
        oracle_seconds = run_oracle(experiment.cluster, experiment.together).total_seconds
        for run in runs:
            done = _play(experiment, run, progress)
            row = Row(
                kind=experiment.kind,
                name=experiment.name,
                sync=run.sync,
                policy=run.policy,
                predictor=run.predictor_name,
                workers=experiment.cluster.workers,
                total_seconds=done.total_seconds,
                waiting_share=done.waiting_share,
                efficiency=oracle_seconds / done.total_seconds,
                notices=list(done.notices),
            )
            yield Result(row, done)


def _play(experiment: Experiment, run: Run, progress: Progress | None) -> Timeline | AsyncRun:
    advance = None if progress is None else partial(progress, experiment.name, run.title)
    cluster, preemption = experiment.cluster, experiment.preemption
    even = experiment.config.global_batch_size // cluster.workers
    policy = build_policy(run.given_policy, cluster, even)
    config = experiment.together if run.sync == LOCKSTEP else experiment.alone
    if run.sync == LOCKSTEP and preemption is None:
        return run_bsp(cluster, config, policy, run.predictor, advance, shares_work=run.shares_work)
    if config.work is not None:
        raise ValueError(
            f"scenarios with [work] need common steps, and workers that stay, got sync {run.sync} "
            f"and preemption {preemption}: leave [work] out, or use sync bsp without preemption"
        )
    return run_async(
        cluster,
        config,
        run.synchroniser,
        policy,
        run.predictor,
        preemption=preemption,
        progress=advance,
    )


def figures(rows: Sequence[Row]) -> dict[str, list[dict[str, object]]]:
    """Returns what ``lbbsp simulate --json`` writes; a row has a ``trace`` or a ``scenario``."""
    values = map(asdict, rows)
    return {"rows": [{row.pop("kind"): row.pop("name"), **row} for row in values]}


class Run(NamedTuple):
    """A policy with its predictor under a synchroniser; names of objects are their reprs.

    `predictor_name` is None where the policy uses no predictor. With `shares_work`, workers share
    work inside a step.
    """

    policy: str
    given_policy: Policy | str
    sync: str
    synchroniser: Synchroniser
    predictor_name: str | None = None
    predictor: Predictor | None = None
    shares_work: bool = False

    @property
    def title(self) -> str:
        """Synchroniser (unless bsp), policy and predictor, to show."""
        return title_of(self.sync, self.policy, self.predictor_name)


def title_of(sync: str, policy: str, predictor: str | None) -> str:
    """Returns the names of a run, to show."""
    return " ".join(filter(None, (None if sync == LOCKSTEP else sync, policy, predictor)))


def chosen_runs(
    policies: Sequence[Policy | str] | None,
    predictors: Sequence[Predictor | str],
    lag: int = 1,
    syncs: Sequence[Synchroniser | str] = (LOCKSTEP,),
    *,
    preemption: bool = False,
) -> list[Run]:
    """Combines every synchroniser with every policy, and every predictor where one is used.

    Policies of None are all that a synchroniser allows, with `preemption` if workers leave, but
    `Observe`, whose plans are those of plain BSP. Predictors given by name are trained for `lag`. A
    policy that needs common steps is refused under a synchroniser without. With `SHARING` after the
    name of a policy, workers share work inside a step.

    Example:
        >>> [run.title for run in chosen_runs(["bsp", "lbbsp"], ["last", "ema0.2"])]
        ['bsp', 'lbbsp last', 'lbbsp ema0.2']
        >>> [run.title for run in chosen_runs(["lbbsp+reserve"], ["last"])]
        ['lbbsp+reserve last']
        >>> [run.title for run in chosen_runs(["lbbsp"], ["last"], syncs=["bsp", "ssp:3"])]
        ['lbbsp last', 'ssp:3 lbbsp last']
        >>> from lbbsp_core import Ema, LoadBalanced
        >>> [run.title for run in chosen_runs([LoadBalanced()], [Ema(0.5), Ema(0.1)])]
        ['lbbsp ema0.5', 'lbbsp Ema(alpha=0.1)']
    """
    chosen = _named(POLICIES, _different() if policies is None else policies)
    shares = {name: alone for name in chosen if (alone := name.removesuffix(SHARING)) != name}
    chosen = {**chosen, **shares}
    kinds = {name: _kind_of(policy) for name, policy in chosen.items()}
    built = {
        name: PREDICTORS.resolve(predictor, horizon=max(lag, 1))
        for name, predictor in _named(PREDICTORS, predictors).items()
    }
    runs = []
    for sync, choice in _named(SYNCHRONISERS, syncs).items():
        synchroniser = SYNCHRONISERS.resolve(choice)
        for name, kind in kinds.items():
            if name in shares and (preemption or sync != LOCKSTEP):
                raise ValueError(
                    f"{name} shares work inside common steps of workers that stay, got sync {sync}"
                    f"{' and preemption' if preemption else ''}: compare {shares[name]} instead"
                )
            if policies is None and preemption and not allows_preemption(kind):
                continue
            if sync != LOCKSTEP and kind.needs_common_steps:
                if policies is None:
                    continue
                require_asynchronous(kind, name, f"sync {sync}")
            used = built if kind.uses_costs else {None: None}
            runs += [
                Run(name, chosen[name], sync, synchroniser, text, predictor, name in shares)
                for text, predictor in used.items()
            ]
    return runs


def _different() -> list[str]:
    """Returns the policies, but for those that only observe, which are alike in virtual time."""
    kinds = {name: component.cls for name, component in POLICIES.items()}
    return [name for name, kind in kinds.items() if not (kind.is_static and kind.uses_costs)]


def _named(registry: Registry[T], components: Sequence[T | str]) -> dict[str, T | str]:
    """Returns components by the names that tables show, each once."""
    if not components:
        raise ValueError(f"no {registry.kind} is named: choose from {', '.join(registry)}")
    if isinstance(components, str):
        raise TypeError(
            f"give a list of {registry.kind} names, got {components!r}: write [{components!r}]"
        )
    return {registry.name_of(component): component for component in components}


def _kind_of(policy: Policy | str) -> Policy | type[Policy]:
    """Reads a policy and checks its options, but for those that depend on the cluster."""
    if not isinstance(policy, str):
        return POLICIES.resolve(policy)
    component = POLICIES.parse(policy)
    if not component.accepts("shares"):
        component.build()
    return component.cls


def build_policy(given: Policy | str, cluster: SimulatedCluster, samples: int = 64) -> Policy:
    """Creates a policy by name; one with a field ``shares`` gets those of a profile.

    `samples` is the mean batch of a worker, for the profile.
    """
    if not isinstance(given, str) or not POLICIES.parse(given).accepts("shares"):
        return POLICIES.resolve(given)
    return POLICIES.build(given, shares=profiled_shares(cluster, samples))


def profiled_shares(cluster: SimulatedCluster, samples: int = 64) -> tuple[float, ...]:
    """Returns static shares as a profile made beforehand gives them: speeds in the first fifth.

    Speed is samples over seconds at a constant batch, the harmonic mean.
    """
    even = np.full(cluster.workers, max(1, samples))
    first = range(max(1, cluster.steps // PROFILED))
    spent = np.sum([cluster.seconds(step, even) for step in first], axis=0)
    return tuple((len(first) * even / spent).tolist())
