"""Cluster description in ``TF_CONFIG``, checked before TensorFlow reads it."""

from __future__ import annotations

import contextlib
import functools
import json
from typing import TYPE_CHECKING, Any

from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_core.runtime.options.env import DEVICES_REMEDY, TF_CONFIG_REMEDY, tf_config_problem
from lbbsp_tf import env

if TYPE_CHECKING:  # TF_CONFIG is checked before TensorFlow is imported
    import tensorflow as tf

_PEER_MILLISECONDS = 60_000


def check_tf_config() -> None:
    """Raises an error if ``TF_CONFIG`` is set and wrong.

    Raises:
        ValueError: A part is wrong; names the part, its value and the remedy.
    """
    text = env.tf_config()
    problem = tf_config_problem(text)
    if problem:
        raise ValueError(f"TF_CONFIG {problem}: {text}; {TF_CONFIG_REMEDY}")


def cluster_size() -> int:
    """Returns the number of workers in a valid ``TF_CONFIG``, chief included; 0 if it is unset."""
    cluster = json.loads(env.tf_config() or "{}").get("cluster", {})
    return len(cluster.get("chief", ())) + len(cluster.get("worker", ()))


def rank_and_workers(
    resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
) -> tuple[int, int]:
    """Returns this worker's rank, chief first, and N; ``(0, 1)`` without a cluster."""
    if resolver is None or len(workers := addresses(resolver)) < 2:
        return 0, 1
    if resolver.task_type not in ("chief", "worker"):
        raise ValueError(
            f"the task of this process in TF_CONFIG is {resolver.task_type!r}, which does not "
            "train: evaluate saved models there, without TF_CONFIG and LoadBalancer"
        )
    address = resolver.cluster_spec().task_address(resolver.task_type, int(resolver.task_id))
    return workers.index(address), len(workers)


def addresses(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> list[str]:
    """Returns the addresses of the workers by rank, chief first."""
    spec = resolver.cluster_spec().as_dict()
    return [*spec.get("chief", ()), *spec.get("worker", ())]


@functools.cache
def check_devices(rank: int, workers: int, devices: tuple[str, ...]) -> None:
    """Raises an error unless all workers have the same number of devices, of the same type.

    TensorFlow's collectives fail for different types, and wait for each other indefinitely for
    different numbers. Every worker must call it; one that does not is not waited for longer than a
    minute.
    """
    import tensorflow as tf

    from lbbsp_tf import service

    text = json.dumps([tf.DeviceSpec.from_string(devices[0]).device_type, len(devices)])
    with contextlib.suppress(tf.errors.AlreadyExistsError):  # keys cannot be overwritten
        service.write(f"lbbsp/devices/{rank}", text)
    workers_devices: list[list[Any]] = []
    while len(workers_devices) < workers:
        answer = service.read(f"lbbsp/devices/{len(workers_devices)}", _PEER_MILLISECONDS)
        if answer is None:
            return  # a worker without a LoadBalancer fails in the handshake
        workers_devices.append(json.loads(answer))
    types, counts = map(list, zip(*workers_devices, strict=True))
    if len(set(types)) > 1:
        ranks = {kind: [i for i, other in enumerate(types) if other == kind] for kind in types}
        texts = (f"{kind} (rank {', '.join(map(str, of_kind))})" for kind, of_kind in ranks.items())
        raise DisagreementError(
            "workers must have devices of the same type, because TensorFlow's collectives need "
            f"it, got {', '.join(texts)}: {DEVICES_REMEDY}"
        )
    if len(set(counts)) > 1:
        raise ValueError(
            f"workers must have the same number of devices, got {counts} by rank: start one worker "
            "for each device, with CUDA_VISIBLE_DEVICES"
        )
