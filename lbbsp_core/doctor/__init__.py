"""What will not work on this machine and in this cluster, why, and what to do about it.

    packages (each framework in a process of its own), settings ──┐
    TF_CONFIG, DMLC_*, Slurm ──> addresses ───────────────────────┼──> findings by topic
    machine ──────────────────────────────────────────────────────┘

Each check is a function that returns findings. None of them changes anything that lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from lbbsp_core.doctor.finding import Diagnosis, Finding, count, figures, problem
from lbbsp_core.doctor.packages import (
    FRAMEWORKS,
    check_framework,
    check_settings,
    check_versions,
    framework_version,
)
from lbbsp_core.installation import extra, reinstall

__all__ = ["CHOICES", "Diagnosis", "Finding", "count", "diagnose", "figures"]

CHOICES = ("installed", "none", *FRAMEWORKS)
"""Choices of the frameworks to check: those that are installed, none, or one of them."""


def diagnose(environment: Mapping[str, str], *, framework: str = "installed") -> Diagnosis:
    """Runs all checks.

    Args:
        environment: Environment variables.
        framework: One of `CHOICES`.

    Returns:
        Findings by topic.
    """
    chosen = [framework] if framework in FRAMEWORKS else []
    if framework == "installed":
        chosen = list(filter(framework_version, FRAMEWORKS))
    topics: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": lambda: check_versions(chosen),
        "settings": lambda: check_settings(environment, chosen),
    }
    for name in chosen:
        topics[FRAMEWORKS[name].title] = partial(check_framework, FRAMEWORKS[name], environment)
    if not chosen and framework != "none":
        remedy = f"pip install {extra('tf')}, or with tf-cpu or mx in place of tf"
        topics["frameworks"] = lambda: [problem("frameworks", "none is installed", remedy)]
    topics["cluster"] = lambda: _cluster(environment)
    topics["machine"] = lambda: _machine(environment)
    return {topic: list(_guarded(topic, check)) for topic, check in topics.items()}


def _cluster(environment: Mapping[str, str]) -> Iterable[Finding]:
    from lbbsp_core.doctor.cluster import check_cluster  # needs packages that may be missing

    return check_cluster(environment)


def _machine(environment: Mapping[str, str]) -> Iterable[Finding]:
    from lbbsp_core.doctor.machine import check_machine

    return check_machine(environment)


def _guarded(topic: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yields the findings of a check; one that fails does not prevent the others."""
    try:
        yield from check()
    except Exception as error:
        remedy = "report it as an error of lbbsp, with this line"
        if isinstance(error, ImportError):
            remedy = reinstall(error, "cli")
        yield problem(topic, f"a check has failed: {type(error).__name__}: {error}", remedy)
