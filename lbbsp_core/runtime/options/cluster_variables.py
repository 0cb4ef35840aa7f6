"""Environment variables that describe a cluster to the frameworks, checked without a framework.

``TF_CONFIG`` is that of TensorFlow, the ``DMLC_*`` variables are those of MXNet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

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
            isinstance(each, str) and _ADDRESS.fullmatch(each) for each in addresses
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
