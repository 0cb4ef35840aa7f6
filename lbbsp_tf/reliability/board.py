"""Rows that workers post on TensorFlow's coordination service, for heartbeats."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context

from lbbsp_core.runtime.exchange.handshake import compare_facts
from lbbsp_core.runtime.reliability.activity import Activity, describe
from lbbsp_core.runtime.reliability.heartbeat import WAITS, Beat

_READ_MILLISECONDS = 1000  # a row is missing for a moment while its worker replaces it
_FIRST_READ_MILLISECONDS = 20  # many workers may have no row yet
_ELSEWHERE_SECONDS = 5  # for which the last sums of a step may still travel

_BATCHES = "number of batches of evaluate, predict or validation"


class CoordinationBoard:
    """Board of heartbeats on the service that `MultiWorkerMirroredStrategy` runs."""

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
        text = read_value(_key(rank), patience)
        if text is None:
            return None
        self._seen.add(rank)
        return [int(value) for value in text.split()]


class Meetings:
    """Points at which all workers wait for each other before they evaluate or predict.

    A collective that only some call would be taken for the one that the others call.
    """

    def __init__(self, rank: int, workers: int) -> None:
        self._rank, self._workers, self._number = rank, workers, 0

    def meet(self, batches: int) -> None:
        """Waits until all workers have called this as often, with as many batches.

        One that waits for the others elsewhere, or has reached its end, is named in an error.
        """
        if self._workers == 1 or not CoordinationBoard.is_available():
            return
        service, board, begun = context.context(), CoordinationBoard(self._rank), time.monotonic()
        key = f"lbbsp/meet/{self._number}"
        service.set_config_key_value(f"{key}/{self._rank}", str(batches))
        found: list[int] = []
        while (other := len(found)) < self._workers:
            text = read_value(f"{key}/{other}", _READ_MILLISECONDS)
            if text is not None:
                found.append(int(text))
                continue
            beat = Beat.of(board.read(other) or Beat().row())
            waits = beat.activity in WAITS and beat.seconds >= _ELSEWHERE_SECONDS
            late = time.monotonic() - begun >= _ELSEWHERE_SECONDS
            if (waits and late) or beat.activity == Activity.LEAVING:
                service.delete_config_key_value(f"{key}/{self._rank}")
                raise RuntimeError(
                    f"worker {self._rank} has called evaluate or predict, and worker {other} is "
                    f"{describe(beat.activity, beat.step)}: call it on all workers, also in "
                    "callbacks and after fit"
                )
        if self._number:  # which all have read
            service.delete_config_key_value(f"lbbsp/meet/{self._number - 1}/{self._rank}")
        self._number += 1
        compare_facts([_BATCHES], [[each] for each in found])


def read_value(key: str, milliseconds: int) -> str | None:
    """Returns what the coordination service has under a key, or None if nothing comes in time."""
    try:
        value = context.context().get_config_key_value(key, milliseconds)
    except tf.errors.OpError:
        return None
    return value.decode() if isinstance(value, bytes) else str(value)


def _key(rank: int) -> str:
    return f"lbbsp/beat/{rank}"
