"""Cluster description in the ``DMLC_*`` variables, checked before MXNet reads it."""

from __future__ import annotations

from lbbsp_mx import env

ROLES = ("worker", "server", "scheduler")
_REMEDY = (
    "set DMLC_ROLE (worker, server or scheduler), DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT (where "
    "the scheduler listens), DMLC_NUM_SERVER and DMLC_NUM_WORKER, or none of them to train with "
    "a single worker"
)


def check_cluster() -> None:
    """Raises an error if ``DMLC_*`` variables are set and wrong, because MXNet would abort or hang.

    Raises:
        ValueError: A variable is missing or wrong; names the variable, its value and the remedy.
    """
    given = env.cluster()
    if not given:
        return
    missing = [name for name in env.NAMES if name not in given]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be set together with {', '.join(given)}: {_REMEDY}"
        )
    if given["DMLC_ROLE"] not in ROLES:
        raise ValueError(
            f"DMLC_ROLE must be one of {', '.join(ROLES)}, got {given['DMLC_ROLE']!r}: {_REMEDY}"
        )
    maxima = {"DMLC_PS_ROOT_PORT": 65_535}
    for name in ("DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER"):
        text = given[name]
        if not text.isdecimal() or not 1 <= int(text) <= maxima.get(name, 1 << 20):
            kind = "a port" if name in maxima else "an integer >= 1"
            raise ValueError(f"{name} must be {kind}, got {text!r}: {_REMEDY}")


def in_cluster() -> bool:
    """Returns whether the variables describe a cluster; call `check_cluster` first."""
    return bool(env.cluster())


def counts() -> tuple[int, int]:
    """Returns the numbers of workers and servers; only in a cluster."""
    given = env.cluster()
    return int(given["DMLC_NUM_WORKER"]), int(given["DMLC_NUM_SERVER"])


def root() -> str:
    """Returns the address of the scheduler, for a message."""
    host, port = env.scheduler_address()
    return f"{host}:{port}"


def describe() -> str:
    """Describes the cluster, for a message."""
    workers, servers = counts()
    return f"{workers} workers and {servers} servers at {root()}"
