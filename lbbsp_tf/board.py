"""Rows that workers post on TensorFlow's coordination service, for heartbeats."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
from collections.abc import Sequence
from pathlib import Path

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
        service = _Service.of_process()
        if service is not None:
            service.delete(self._key)  # a key cannot be overwritten
            service.insert(self._key, text)
            return
        with contextlib.suppress(tf.errors.OpError):
            with contextlib.suppress(tf.errors.NotFoundError):
                context.context().delete_config_key_value(self._key)
            context.context().set_config_key_value(self._key, text)

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


class _Service:
    """Calls of TensorFlow's library that write keys, and let other threads of Python run meanwhile.

    TensorFlow's own functions do not, so that no thread could notice that the service does not
    respond, because its worker is suspended.

    Args:
        library: TensorFlow's library.
        handle: Handle of the eager context.
    """

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._insert, self._delete = (
            library.TFE_InsertConfigKeyValue,
            library.TFE_DeleteConfigKeyValue,
        )
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        self._insert.argtypes = [pointer, text, text, pointer]
        self._delete.argtypes = [pointer, text, pointer]
        self._insert.restype = self._delete.restype = None
        library.TF_NewStatus.restype = pointer
        self._handle, self._status = handle, library.TF_NewStatus()

    @classmethod
    @functools.cache
    def of_process(cls) -> _Service | None:
        """Returns the calls, or None if this build of TensorFlow does not have them."""
        try:
            library = ctypes.CDLL(str(Path(tf.sysconfig.get_lib()) / "libtensorflow_cc.so.2"))
            capsule = ctypes.py_object(context.context()._context_handle)
            name = ctypes.pythonapi.PyCapsule_GetName
            name.restype = ctypes.c_char_p
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            return cls(library, pointer(capsule, name(capsule)))
        except (OSError, AttributeError, ValueError):
            return None

    def insert(self, key: str, value: str) -> None:
        """Adds a key; an error has no effect."""
        self._insert(self._handle, key.encode(), value.encode(), self._status)

    def delete(self, key: str) -> None:
        """Removes a key; an error has no effect."""
        self._delete(self._handle, key.encode(), self._status)
