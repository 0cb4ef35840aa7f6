"""Devices of the replicas of this process: their kind, and short texts for users."""

from __future__ import annotations

import os

import tensorflow as tf

from lbbsp_core.runtime.exchange.handshake import Devices, cpu


def devices_of(strategy: tf.distribute.Strategy) -> Devices:
    """Returns the device of each local replica, such as "cpu, 2 cores" or a GPU's name."""
    local = [tf.DeviceSpec.from_string(device) for device in strategy.extended.worker_devices]
    are_gpus = all(device.device_type == "GPU" for device in local)
    names = tuple(_text(device, len(local)) for device in local)
    # Only the memory of the first GPU is sampled.
    return Devices(names, are_gpus, are_gpus and len(local) == 1 and _memory_grows())


def _memory_grows() -> bool:
    """Returns whether TensorFlow takes memory as it needs it: by default it takes nearly all."""
    if os.environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        return True
    forced = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if forced in ("true", "false"):  # before what the script says
        return forced == "true"
    return all(map(tf.config.experimental.get_memory_growth, tf.config.get_visible_devices("GPU")))


def _text(device: tf.DeviceSpec, count: int) -> str:
    if device.device_type == "GPU":
        return _gpu_name(device.device_index) or f"GPU:{device.device_index}"
    return cpu() if count == 1 else f"{device.device_type}:{device.device_index} of {cpu()}"


def _gpu_name(index: int) -> str:
    """Returns the name of a GPU; empty if it is not known which one it is."""
    physical = tf.config.get_visible_devices("GPU")
    if len(physical) != len(tf.config.list_logical_devices("GPU")):
        return ""  # a GPU is split into several logical ones
    return str(tf.config.experimental.get_device_details(physical[index]).get("device_name", ""))
