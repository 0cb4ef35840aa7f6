"""Rows that workers post on TensorFlow's coordination service, for heartbeats."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context

from lbbsp_core.runtime.activity import Activity, describe
from lbbsp_core.runtime.heartbeat import Beat

_READ_MILLISECONDS = 1000  # a row is missing for a moment while its worker replaces it
_FIRST_READ_MILLISECONDS = 20  # many workers may have no row yet
_ELSEWHERE_SECONDS = 5  # for which the last sums of a step may still travel


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


class Meetings:
    """Points of a script at which all workers wait for each other, outside of collectives.

    A collective would be taken for the one that another worker calls instead.
    """

    def __init__(self) -> None:
        self._number = 0

    def meet(self, rank: int, workers: int, text: str, *, call: str) -> list[str]:
        """Waits until all workers have called this as often; returns their texts by rank.

        Args:
            rank: Number of this worker.
            workers: Number of workers.
            text: What this worker tells the others.
            call: What all workers have to call, for the error.

        Raises:
            RuntimeError: A worker waits for the others elsewhere, or has reached its end.
        """
        service, board, begun = context.context(), CoordinationBoard(rank), time.monotonic()
        key = f"lbbsp/meet/{self._number}"
        service.set_config_key_value(f"{key}/{rank}", text)
        texts: list[str] = []
        while len(texts) < workers:
            other = len(texts)
            try:
                texts.append(service.get_config_key_value(f"{key}/{other}", _READ_MILLISECONDS))
            except tf.errors.DeadlineExceededError:
                beat = Beat.of(board.read(other) or Beat().row())
                waited = min(beat.seconds, time.monotonic() - begun) >= _ELSEWHERE_SECONDS
                waits = beat.activity in (Activity.WAITING, Activity.MEETING)
                if beat.activity == Activity.LEAVING or (waits and waited):
                    service.delete_config_key_value(f"{key}/{rank}")
                    raise RuntimeError(
                        f"worker {rank} has called {call}, and worker {other} is "
                        f"{describe(beat.activity, beat.step)}: call it on all workers, also in "
                        "callbacks and after fit"
                    ) from None
        if self._number:  # all have read the last texts
            service.delete_config_key_value(f"lbbsp/meet/{self._number - 1}/{rank}")
        self._number += 1
        return texts


def _key(rank: int) -> str:
    return f"lbbsp/beat/{rank}"
