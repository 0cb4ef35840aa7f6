"""Devices of the replicas of this process, as short texts for users."""

from __future__ import annotations

import tensorflow as tf

from lbbsp_core.runtime.identity import cpu


def device_texts(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the device of each replica of this process, such as "cpu, 2 cores" or a GPU's name.

    Args:
        strategy: Strategy of the replicas.
    """
    local = strategy.extended.worker_devices
    return tuple(_text(tf.DeviceSpec.from_string(device), len(local)) for device in local)


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
