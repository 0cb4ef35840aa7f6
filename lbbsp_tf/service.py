"""Keys of the coordination service of TensorFlow, on which workers leave texts for each other.

The constructor of `MultiWorkerMirroredStrategy` starts it. A key cannot be overwritten.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context


def write(key: str, text: str) -> None:
    """Sets a key."""
    context.context().set_config_key_value(key, text)


def delete(key: str) -> None:
    """Deletes a key."""
    context.context().delete_config_key_value(key)


def read(key: str, milliseconds: int) -> str | None:
    """Returns what is under a key, or None if nothing comes in time."""
    try:
        return wait_for(key, milliseconds)
    except tf.errors.OpError:
        return None


def wait_for(key: str, milliseconds: int) -> str | None:
    """Returns what is under a key, or None if nothing comes in time; fails without the service."""
    try:
        value = context.context().get_config_key_value(key, milliseconds)
    except tf.errors.DeadlineExceededError:
        return None
    return value.decode() if isinstance(value, bytes) else str(value)
