"""Devices of replicas, and whether the memory of a GPU shows what batches need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

from lbbsp_core.runtime.exchange.handshake import Devices, cpu
from lbbsp_tf import devices


def devices_of(*names: str) -> Devices:
    return devices.devices_of(SimpleNamespace(extended=SimpleNamespace(worker_devices=names)))  # type: ignore[arg-type]


def test_a_replica_on_the_cpu() -> None:
    assert devices_of("/device:CPU:0") == Devices((cpu(),))


@pytest.mark.parametrize(
    ("variables", "growth", "shows"),
    [
        ({}, False, False),
        ({"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, False, True),
        ({"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, False, False),
        ({"TF_GPU_ALLOCATOR": "cuda_malloc_async"}, False, True),
        ({}, True, True),
    ],
)
def test_memory_is_shown_unless_tensorflow_has_taken_it(
    variables: dict[str, str], growth: bool, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda device: growth)
    monkeypatch.setattr(devices, "_gpu_name", lambda index: "some GPU")
    assert devices_of("/device:GPU:0") == Devices(("some GPU",), True, shows)
    assert devices_of("/device:GPU:0", "/device:GPU:1") == Devices(("some GPU",) * 2, True, False)
