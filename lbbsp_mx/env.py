"""Environment variables that this package reads, one function each."""

from __future__ import annotations

import os
from contextlib import suppress

from lbbsp_core.runtime.options.defaults import SILENCE_SECONDS
from lbbsp_core.runtime.options.env import DMLC_NAMES


def cluster() -> dict[str, str]:
    """Returns the ``DMLC_*`` variables that are set, by the launcher or manually."""
    return {name: os.environ[name] for name in DMLC_NAMES if os.environ.get(name, "").strip()}


def role() -> str:
    """Returns ``DMLC_ROLE``; "worker" without a cluster."""
    return cluster().get("DMLC_ROLE", "worker")


def scheduler_address() -> tuple[str, int]:
    """Returns where the scheduler listens; only in a cluster."""
    variables = cluster()
    return variables["DMLC_PS_ROOT_URI"], int(variables["DMLC_PS_ROOT_PORT"])


def silence_seconds() -> float:
    """Returns ``LBBSP_SILENCE_SECONDS``: after so long without a sign of life a process is lost."""
    text = os.environ.get("LBBSP_SILENCE_SECONDS", "").strip()
    with suppress(ValueError):
        if 5 <= (seconds := float(text or SILENCE_SECONDS)) < float("inf"):
            return seconds
    raise ValueError(
        f"LBBSP_SILENCE_SECONDS must be a number of seconds >= 5, got {text!r}: set it for all "
        "processes of the job, or leave it out"
    )


def updates_on_store() -> bool:
    """Returns whether Module lets a store update, unless ``MXNET_UPDATE_ON_KVSTORE`` forbids it."""
    return os.environ.get("MXNET_UPDATE_ON_KVSTORE", "1").strip() != "0"


def enable_heartbeats() -> None:
    """Makes the transport of this process send a sign of life to the scheduler every second."""
    os.environ["PS_HEARTBEAT_INTERVAL"] = "1"


def allow_many_custom_operators() -> None:
    """Raises the number of threads on which MXNet runs operators written in Python.

    One that waits for the other workers occupies a thread. With too few of them, workers that
    have started different ones would wait for each other.
    """
    os.environ.setdefault("MXNET_CUSTOM_OP_NUM_THREADS", "256")
