"""Cluster description in the ``DMLC_*`` variables, checked before MXNet reads it."""

from __future__ import annotations

from lbbsp_core.runtime.options.env import DMLC_REMEDY, dmlc_problem
from lbbsp_mx import env


def check_cluster() -> None:
    """Raises an error if ``DMLC_*`` variables are set and wrong, because MXNet would abort or hang.

    Raises:
        ValueError: A variable is missing or wrong; names the variable, its value and the remedy.
    """
    problem = dmlc_problem(env.cluster())
    if problem:
        raise ValueError(f"{problem}: {DMLC_REMEDY}")


def in_cluster() -> bool:
    """Returns whether the variables describe a cluster; call `check_cluster` first."""
    return bool(env.cluster())


def counts() -> tuple[int, int]:
    """Returns the numbers of workers and servers; only in a cluster."""
    variables = env.cluster()
    return int(variables["DMLC_NUM_WORKER"]), int(variables["DMLC_NUM_SERVER"])


def root() -> str:
    """Returns the address of the scheduler, for a message."""
    host, port = env.scheduler_address()
    return f"{host}:{port}"


def describe() -> str:
    """Describes the cluster, for a message."""
    workers, servers = counts()
    return f"{workers} workers and {servers} servers at {root()}"
