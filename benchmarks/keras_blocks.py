"""Step times of Keras fits that are compared in interleaved blocks, inside one worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np


class Side(NamedTuple):
    """One of the fits that are compared.

    Args:
        model: Compiled model.
        data: Endless training data.
        callbacks: Callbacks of its fits.
    """

    model: keras.Model
    data: Any
    callbacks: tuple[keras.callbacks.Callback, ...] = ()


def step_seconds(
    sides: dict[str, Side],
    blocks: int,
    *,
    steps: int,
    steps_per_epoch: int,
    of_block: Callable[[list[float]], float] = np.median,
) -> dict[str, list[float]]:
    """Returns the wall seconds per step of each block, by the name of the side.

    The order of the sides alternates, because the load of the machine may depend on the position
    in a round of blocks. A first round, which includes tracing, is not counted.

    Args:
        sides: Fits to compare.
        blocks: Number of blocks of each side.
        steps: Steps in a block, a multiple of `steps_per_epoch`.
        steps_per_epoch: Steps of an epoch of every side.
        of_block: Median of the steps of a block, or another summary.
    """
    clock = _Clock()
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for block in range(blocks + 1):
        names.reverse()
        for name in names:
            model, data, callbacks = sides[name]
            model.fit(data, steps_per_epoch=steps_per_epoch, epochs=steps // steps_per_epoch,
                      callbacks=[*callbacks, clock], verbose=0)  # fmt: skip
            if block:
                times[name].append(float(of_block(clock.seconds)))
    return times


class _Clock(keras.callbacks.Callback):
    """Measures wall seconds from the end of a batch to the end of the next one."""

    def on_train_begin(self, logs=None):
        self.seconds, self.last = [], None

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append(now - self.last)
        self.last = now
