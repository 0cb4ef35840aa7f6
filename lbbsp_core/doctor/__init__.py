"""What will not work on this machine and in this cluster, why, and what to do about it.

    versions, frameworks (each in a process of its own) ──┐
    TF_CONFIG, DMLC_*, Slurm ──> addresses ──> peers ─────┼──> findings by topic
    machine ──────────────────────────────────────────────┘

Each check is a function that returns findings. None of them changes anything that lasts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from lbbsp_core.doctor.base import Diagnosis, Finding, count, figures, problem
from lbbsp_core.doctor.cluster import (
    check_addresses,
    check_dmlc,
    check_slurm,
    check_tf_config,
    dmlc_variables,
    tf_cluster,
)
from lbbsp_core.doctor.frameworks import FRAMEWORKS, check_framework
from lbbsp_core.doctor.machine import check_machine
from lbbsp_core.doctor.peers import check_peers
from lbbsp_core.doctor.scheduler import check_scheduler
from lbbsp_core.doctor.settings import check_settings
from lbbsp_core.doctor.versions import check_versions, framework_version
from lbbsp_core.runtime.cluster_variables import dmlc_problem

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
    topics: dict[str, Iterable[Finding]] = {
        "versions": check_versions(chosen),
        "settings": check_settings(environment),
        **_frameworks(framework, chosen, environment),
        "cluster": [
            *check_tf_config(environment.get("TF_CONFIG", "")),
            *check_dmlc(environment),
            *check_slurm(environment),
            *_addresses(environment, peers),
        ],
        "machine": check_machine(environment),
    }
    return {topic: list(findings) for topic, findings in topics.items()}


def _chosen(framework: str) -> list[str]:
    """Returns the names of the frameworks to check."""
    if framework == "installed":
        return [name for name, each in FRAMEWORKS.items() if framework_version(each.module)]
    return [] if framework == "none" else [framework]


def _frameworks(
    framework: str, chosen: Collection[str], environment: Mapping[str, str]
) -> dict[str, list[Finding]]:
    """Returns the findings of each framework, by its title."""
    if not chosen and framework != "none":
        remedy = "pip install 'lbbsp[tf]', 'lbbsp[tf-cpu]' or 'lbbsp[mx]'"
        return {"frameworks": [problem("frameworks", "none is installed", remedy)]}
    return {
        FRAMEWORKS[name].title: check_framework(FRAMEWORKS[name], environment) for name in chosen
    }


def _addresses(environment: Mapping[str, str], peers: float | None) -> Iterator[Finding]:
    """Yields the findings of the addresses of a cluster, and those of its peers if wanted."""
    cluster = tf_cluster(environment.get("TF_CONFIG", ""))
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
