"""Rows that workers post on TensorFlow's coordination service, for heartbeats."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import tensorflow as tf

from lbbsp_core.runtime.exchange.handshake import compare_facts
from lbbsp_core.runtime.reliability.activity import Activity, describe
from lbbsp_core.runtime.reliability.heartbeat import WAITS, Beat
from lbbsp_tf import service

_READ_MILLISECONDS = 1000  # a row is missing for a moment while its worker replaces it
_FIRST_READ_MILLISECONDS = 20  # many workers may have no row yet
_ELSEWHERE_SECONDS = 5  # for which the last sums of a step may still travel

_BATCHES = "number of batches of evaluate, predict or validation"


class CoordinationBoard:
    """Board of heartbeats on the service that `MultiWorkerMirroredStrategy` runs."""

    holder = 0

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen: set[int] = set()

    def post(self, row: Sequence[int]) -> None:
        """Replaces this worker's row; if the service is gone, this has no effect."""
        with contextlib.suppress(tf.errors.OpError):
            with contextlib.suppress(tf.errors.NotFoundError):
                service.delete(_key(self._rank))  # a key cannot be overwritten
            service.write(_key(self._rank), " ".join(map(str, row)))

    def read(self, rank: int) -> Sequence[int] | None:
        """Returns the row of a worker, or None if there is none, or the service is gone."""
        patience = _READ_MILLISECONDS if rank in self._seen else _FIRST_READ_MILLISECONDS
        text = service.read(_key(rank), patience)
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
        if self._workers == 1:
            return
        board, begun, counts = CoordinationBoard(self._rank), time.monotonic(), list[int]()
        service.write(_meeting(self._number, self._rank), str(batches))
        while (other := len(counts)) < self._workers:
            text = service.read(_meeting(self._number, other), _READ_MILLISECONDS)
            if text is not None:
                counts.append(int(text))
                continue
            beat = Beat.of(board.read(other) or Beat().row())
            waits = beat.activity in WAITS and beat.seconds >= _ELSEWHERE_SECONDS
            late = time.monotonic() - begun >= _ELSEWHERE_SECONDS
            if (waits and late) or beat.activity == Activity.LEAVING:
                service.delete(_meeting(self._number, self._rank))
                raise RuntimeError(
                    f"worker {self._rank} has called evaluate or predict, and worker {other} is "
                    f"{describe(beat.activity, beat.step)}: call it on all workers, also in "
                    "callbacks and after fit"
                )
        if self._number:  # which all have read
            service.delete(_meeting(self._number - 1, self._rank))
        self._number += 1
        compare_facts([_BATCHES], [[count] for count in counts])


def _key(rank: int) -> str:
    return f"lbbsp/beat/{rank}"


def _meeting(number: int, rank: int) -> str:
    return f"lbbsp/meet/{number}/{rank}"
