"""Runs to compare: combinations of synchronisers, policies and predictors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from lbbsp_core.policy import Policy, require_asynchronous
from lbbsp_core.predict import Predictor
from lbbsp_core.registry import POLICIES, PREDICTORS, SYNCHRONISERS, Registry
from lbbsp_core.sim.cluster import SimulatedCluster
from lbbsp_core.sync import Synchroniser

T = TypeVar("T")

LOCKSTEP: Final = "bsp"
"""The synchroniser under which all workers are in the same step."""

PROFILED: Final = 5
"""The shares of ``fixed`` are the mean speeds in the first 1 / PROFILED of the steps."""


class Run(NamedTuple):
    """A policy with its predictor under a synchroniser; names of objects are their reprs.

    `predictor_name` is None where the policy uses no predictor.
    """

    policy: str
    given_policy: Policy | str
    sync: str
    synchroniser: Synchroniser
    predictor_name: str | None = None
    predictor: Predictor | None = None

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
) -> list[Run]:
    """Combines every synchroniser with every policy, and every predictor where one is used.

    Policies of None are all that a synchroniser allows. Predictors given by name are trained for
    `lag`. A policy that needs common steps is refused under a synchroniser without.

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
    for sync, given in _named(SYNCHRONISERS, syncs).items():
        synchroniser = SYNCHRONISERS.resolve(given)
        for name, kind in kinds.items():
            if sync != LOCKSTEP and kind.needs_common_steps:
                if policies is None:
                    continue
                require_asynchronous(kind, name, f"sync {sync}")
            used = built if kind.uses_costs else {None: None}
            runs += [Run(name, chosen[name], sync, synchroniser, *own) for own in used.items()]
    return runs


def _named(registry: Registry[T], given: Sequence[T | str]) -> dict[str, T | str]:
    """Returns components by the names that tables show, each once."""
    if not given:
        raise ValueError(f"no {registry.kind} is named: choose from {', '.join(registry)}")
    if isinstance(given, str):
        raise TypeError(f"give a list of {registry.kind} names, got {given!r}: write [{given!r}]")
    return {registry.name_of(one): one for one in given}


def _kind_of(given: Policy | str) -> Policy | type[Policy]:
    """Reads a policy and checks its options, but for those that depend on the cluster."""
    if not isinstance(given, str):
        return POLICIES.resolve(given)
    component = POLICIES.parse(given)
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
