"""Environment variables: our own, and those that describe a cluster to the frameworks, checked.

``TF_CONFIG`` describes a cluster to TensorFlow, the ``DMLC_*`` variables to MXNet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MARKS: Final = "LBBSP_MARKS"  # the folder of a worker's marks, which the launcher reads


def run_dir() -> Path | None:
    """Returns ``LBBSP_RUN_DIR``, the folder of the run record set by ``lbbsp launch --run-dir``."""
    return _path("LBBSP_RUN_DIR")


def policy() -> str:
    """Returns ``LBBSP_POLICY``, the policy of scripts that choose none; empty if it is unset."""
    return os.environ.get("LBBSP_POLICY", "").strip()


def metrics_file() -> Path | None:
    """Returns ``LBBSP_METRICS_FILE``, the file for Prometheus' metrics of the run."""
    return _path("LBBSP_METRICS_FILE")


def restart() -> int:
    """Returns ``LBBSP_RESTART``, the number of restarts before this attempt; 0 without launcher."""
    text = os.environ.get("LBBSP_RESTART", "")
    return int(text) if text.isdecimal() else 0


def workers_at_first(workers: int) -> int:
    """Returns how many workers, or replicas, the first attempt of an elastic job had.

    ``LBBSP_ELASTIC`` is "before/now", as the launcher sets it: the result is `workers` times the
    first number over the second.
    """
    text = os.environ.get("LBBSP_ELASTIC", "")
    if not text:
        return workers
    before, _, now = text.partition("/")
    if not (before.isdecimal() and now.isdecimal() and int(before) > 0 < int(now)):
        raise ValueError(
            f"LBBSP_ELASTIC must be the numbers of workers before and now, got {text!r}: for "
            "example 3/2"
        )
    return workers * int(before) // int(now)


def host() -> str:
    """Returns ``LBBSP_HOST``, the name of this machine for users; empty if it is unset."""
    return os.environ.get("LBBSP_HOST", "").strip()


def marks() -> Path | None:
    """Returns ``LBBSP_MARKS``, the folder of this worker's marks for `lbbsp launch`."""
    return _path(MARKS)


def _path(name: str) -> Path | None:
    text = os.environ.get(name, "").strip()
    return Path(text) if text else None


TF_CONFIG_REMEDY: Final = (
    'it must look like {"cluster": {"worker": ["host0:port", "host1:port"]}, '
    '"task": {"type": "worker", "index": 0}}, or be unset to train with a single worker'
)

DMLC_NAMES: Final = (  # which each process of a cluster of MXNet needs
    "DMLC_ROLE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_NUM_SERVER",
    "DMLC_NUM_WORKER",
)

_ADDRESS: Final = re.compile(r"(\[.*\]|[^:]*):\d+")  # IPv6 addresses are in brackets

DMLC_ROLES: Final = ("worker", "server", "scheduler")

DMLC_REMEDY: Final = (
    "set DMLC_ROLE (worker, server or scheduler), DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT (where "
    "the scheduler listens), DMLC_NUM_SERVER and DMLC_NUM_WORKER, or none of them to train with "
    "a single worker"
)

# For GPUs and CPUs in one group of TensorFlow's collectives.
DEVICES_REMEDY: Final = (
    "set CUDA_VISIBLE_DEVICES=-1 for all workers to train on CPUs, or give each worker a GPU that "
    "its TensorFlow can use, see `lbbsp doctor`"
)


def tf_config_problem(text: str) -> str:
    """Returns what is wrong with a value of ``TF_CONFIG``, or an empty string."""
    if not text.strip():
        return ""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        return f"is not JSON ({error})"
    if not isinstance(config, dict):
        return "must be a JSON object"
    cluster, task = config.get("cluster", {}), config.get("task", {})
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        return "must have JSON objects as 'cluster' and 'task'"
    return _cluster_problem(cluster) or _task_problem(cluster, task)


def dmlc_problem(given: Mapping[str, str]) -> str:
    """Returns what is wrong with the ``DMLC_*`` variables that are set, or an empty string."""
    if not given:
        return ""
    missing = [name for name in DMLC_NAMES if name not in given]
    if missing:
        return f"{', '.join(missing)} must be set together with {', '.join(given)}"
    if given["DMLC_ROLE"] not in DMLC_ROLES:
        return f"DMLC_ROLE must be one of {', '.join(DMLC_ROLES)}, got {given['DMLC_ROLE']!r}"
    maxima = {"DMLC_PS_ROOT_PORT": 65_535}
    for name in ("DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER"):
        text = given[name]
        if not text.isdecimal() or not 1 <= int(text) <= maxima.get(name, 1 << 20):
            kind = "a port" if name in maxima else "an integer >= 1"
            return f"{name} must be {kind}, got {text!r}"
    return ""


def _cluster_problem(cluster: Mapping[str, object]) -> str:
    all_addresses: list[str] = []
    for kind, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(
            isinstance(entry, str) and _ADDRESS.fullmatch(entry) for entry in addresses
        ):
            return (
                f"must have a list of host:port strings as cluster[{kind!r}], with IPv6 addresses "
                "in brackets"
            )
        all_addresses += addresses
    for address in all_addresses:
        if all_addresses.count(address) > 1:
            return f"names the address {address!r} twice"
    return ""


def _task_problem(cluster: Mapping[str, list[str]], task: Mapping[str, object]) -> str:
    kind, index = task.get("type"), task.get("index")
    if not cluster or kind == "evaluator":
        return ""
    if not isinstance(kind, str) or kind not in cluster:
        return f"has the task type {kind!r}, which is not in the cluster {sorted(cluster)}"
    if not isinstance(index, int) or not 0 <= index < len(cluster[kind]):
        count = len(cluster[kind])
        return f"must have a task index in [0, {count}), one for each {kind!r}, got {index!r}"
    return ""


AUTO_JIT_REMEDY: Final = (
    "unset TF_XLA_FLAGS, or keep the sizes few (granularity=, interval= of the balancer)"
)

_OFF: Final = ("", "0", "-1", "off")


def auto_jit(flags: str, *, on_gpu: bool = True) -> str:
    """Returns the flag that turns on auto-clustering; empty if it is off.

    On CPUs, clustering needs another flag, too.

    Example:
        >>> [auto_jit("--tf_xla_auto_jit=2", on_gpu=on_gpu) for on_gpu in (True, False)]
        ['--tf_xla_auto_jit=2', '']
    """
    values = re.findall(r"--tf_xla_auto_jit=(\S*)", flags)
    if not values or values[-1] in _OFF or not (on_gpu or "--tf_xla_cpu_global_jit" in flags):
        return ""
    return f"--tf_xla_auto_jit={values[-1]}"
