"""What will not work on this machine and in this cluster, why, and what to do about it.

    versions, frameworks (each in a process of its own) ──┐
    TF_CONFIG, DMLC_*, Slurm ──> addresses ──> peers ─────┼──> findings by topic
    machine ──────────────────────────────────────────────┘

Each check is a function that returns findings. None of them changes anything that lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from lbbsp_core.doctor.base import Diagnosis, Finding, count, figures, problem
from lbbsp_core.doctor.cluster import check_addresses, check_ports, check_tf_config, tf_cluster
from lbbsp_core.doctor.dmlc import check_dmlc, dmlc_variables
from lbbsp_core.doctor.frameworks import FRAMEWORKS, check_framework
from lbbsp_core.doctor.machine import check_machine
from lbbsp_core.doctor.peers import check_peers
from lbbsp_core.doctor.scheduler import check_scheduler
from lbbsp_core.doctor.settings import check_settings
from lbbsp_core.doctor.slurm import check_slurm
from lbbsp_core.doctor.versions import check_versions, framework_version
from lbbsp_core.runtime.options.cluster_variables import dmlc_problem

__all__ = ["CHOICES", "Diagnosis", "Finding", "count", "diagnose", "figures"]

CHOICES = ("installed", "none", *FRAMEWORKS)
"""Choices of the frameworks to check: those that are installed, none, or one of them."""


def diagnose(
    environment: Mapping[str, str], *, framework: str = "installed", peers: float | None = None
) -> Diagnosis:
    """Runs all checks.

    Args:
        environment: Environment variables.
        framework: One of `CHOICES`.
        peers: Seconds to wait for the doctors of the other tasks; None to connect to none.

    Returns:
        Findings by topic.
    """
    chosen = _chosen(framework)
    topics: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": lambda: check_versions(chosen),
        "settings": lambda: check_settings(environment, chosen),
        **_frameworks(framework, chosen, environment),
        "cluster": lambda: _cluster(environment, peers),
        "machine": lambda: check_machine(environment),
    }
    # First the cluster: all hosts meet when the command starts, however long their imports take.
    order = sorted(topics, key=lambda topic: topic != "cluster")
    found = {topic: list(_guarded(topic, topics[topic])) for topic in order}
    return {topic: found[topic] for topic in topics}


def _guarded(topic: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yields the findings of a check; one that fails does not prevent the others."""
    try:
        yield from check()
    except Exception as error:
        remedy = "report it as an error of lbbsp, with this line"
        yield problem(topic, f"a check has failed: {type(error).__name__}: {error}", remedy)


def _chosen(framework: str) -> list[str]:
    """Returns the names of the frameworks to check."""
    if framework == "installed":
        return [name for name, each in FRAMEWORKS.items() if framework_version(each.module)]
    return [] if framework == "none" else [framework]


def _frameworks(
    framework: str, chosen: Collection[str], environment: Mapping[str, str]
) -> dict[str, Callable[[], Iterable[Finding]]]:
    """Returns the checks of each framework, by its title."""
    if not chosen and framework != "none":
        remedy = "pip install 'lbbsp[tf]', 'lbbsp[tf-cpu]' or 'lbbsp[mx]'"
        return {"frameworks": lambda: [problem("frameworks", "none is installed", remedy)]}
    return {
        each.title: partial(check_framework, each, environment)
        for each in map(FRAMEWORKS.__getitem__, chosen)
    }


def _cluster(environment: Mapping[str, str], peers: float | None) -> Iterator[Finding]:
    """Yields what the variables say, and whether addresses and peers are as they say."""
    yield from check_tf_config(environment.get("TF_CONFIG", ""))
    yield from check_dmlc(environment)
    yield from check_slurm(environment)
    yield from _addresses(environment, peers)


def _addresses(environment: Mapping[str, str], peers: float | None) -> Iterator[Finding]:
    """Yields the findings of the addresses of a cluster, and those of its peers if wanted."""
    cluster = tf_cluster(environment.get("TF_CONFIG", ""))
    if cluster is not None and any(check_ports(cluster)):
        return  # reported with TF_CONFIG; sockets refuse such ports
    if cluster is not None and cluster.tasks:
        yield from check_addresses(cluster)
        if peers is not None:
            yield from check_peers(cluster, peers)
    elif peers is None:
        return
    elif (given := dmlc_variables(environment)) and not dmlc_problem(given):
        yield from check_scheduler(given, peers)
    else:
        remedy = "set TF_CONFIG or DMLC_* on each host, and run the same command on all of them"
        yield problem("peers", "cannot be met, because no variable describes a cluster", remedy)
