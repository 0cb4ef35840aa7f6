"""Rows that workers post on TensorFlow's coordination service, for heartbeats."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context

_READ_MILLISECONDS = 1000  # a row is missing for a moment while its worker replaces it
_FIRST_READ_MILLISECONDS = 20  # many workers may have no row yet


class CoordinationBoard:
    """Board of heartbeats on the service that `MultiWorkerMirroredStrategy` runs.

    Args:
        rank: Number of this worker.
    """

    holder = 0

    def __init__(self, rank: int) -> None:
        self._key = _key(rank)
        self._seen: set[int] = set()

    @staticmethod
    def is_available() -> bool:
        """Returns whether reads of this version of TensorFlow have a time limit (2.19)."""
        read = context.context().get_config_key_value
        return "timeout_in_ms" in inspect.signature(read).parameters

    def post(self, row: Sequence[int]) -> None:
        """Replaces this worker's row; if the service is gone, this has no effect."""
        text = " ".join(map(str, row))
        service = context.context()
        with contextlib.suppress(tf.errors.OpError):
            with contextlib.suppress(tf.errors.NotFoundError):
                service.delete_config_key_value(self._key)  # a key cannot be overwritten
            service.set_config_key_value(self._key, text)

    def read(self, rank: int) -> Sequence[int] | None:
        """Returns the row of a worker, or None if there is none, or the service is gone."""
        patience = _READ_MILLISECONDS if rank in self._seen else _FIRST_READ_MILLISECONDS
        try:
            text = context.context().get_config_key_value(_key(rank), patience)
        except tf.errors.OpError:
            return None
        self._seen.add(rank)
        return [int(value) for value in text.split()]


def _key(rank: int) -> str:
    return f"lbbsp/beat/{rank}"
