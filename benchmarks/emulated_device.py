"""Emulated device of a worker, which sleeps instead of computing, beside bursty neighbours."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

PHASE_STEPS = 3.0
"""Steps for which neighbours go on, for each second of the schedules of `bursty`."""


class Device:
    """Emulated device that a worker shares with jobs of a neighbour, which start and stop.

    Args:
        sample_seconds: Time of a sample while no neighbour is there.
        rank: Number of the worker.
        seed: With the rank, decides about the neighbours; None: there are none.
        scale: Duration of a second of their schedule.
    """

    def __init__(self, sample_seconds: float, rank: int, seed: int | None, scale: float) -> None:
        self._sample_seconds = sample_seconds
        self._phases = self._schedule(rank, seed, scale)
        self._until, self._slowness = 0.0, 1

    @staticmethod
    def _schedule(rank: int, seed: int | None, scale: float) -> Iterator[tuple[float, int]]:
        """Yields the end of each phase, and by how much the device is slower in it."""
        from lbbsp_core.launch.contention import bursty

        now = time.monotonic()
        if seed is None:
            yield math.inf, 1
            return
        for seconds, demands in bursty(rank, seed):
            now += seconds * scale
            yield now, 1 + len(demands)

    def compute(self, samples: np.ndarray) -> np.ndarray:
        """Sleeps as long as the device needs for these samples."""
        self.sleep(len(samples))
        return samples

    def sleep(self, samples: float) -> None:
        """Sleeps as long as the device needs for so many samples."""
        work, now = samples * self._sample_seconds, time.monotonic()
        while True:
            while now >= self._until:
                self._until, self._slowness = next(self._phases)
            end = min(now + work * self._slowness, self._until)
            work -= (end - now) / self._slowness
            time.sleep(max(end - time.monotonic(), 0.0))
            if end < self._until:
                return
            now = end
