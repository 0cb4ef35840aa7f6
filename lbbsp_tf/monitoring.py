"""Curves of each worker for TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import keras
import numpy as np
import tensorflow as tf

from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.record.figures import figures_of, predicted_over_measured
from lbbsp_core.runtime.record.record import StepLine, counted

logger = logging.getLogger("lbbsp.tf")

_MOST = 1000
"""Steps of an epoch after which a point is written in any case."""


class WorkerScalars:
    """Writes scalars of the workers where the user's TensorBoard callback writes, on the chief.

    Each worker has a run ``lbbsp/worker_2`` in the callback's folder, so that its curves lie over
    those of the others: ``batch_size``, ``busy_seconds``, ``waiting_seconds``,
    ``predicted_over_measured``, and the names of what extensions have recorded. The run
    ``lbbsp/all`` has the figures of `lbbsp_core.runtime.record.figures` and ``plan_changes``. A
    point is written after ``update_freq`` steps, and after each epoch; it is over the regular steps
    since the last one, or over all if none is regular: their mean, the ratio of their sums, or the
    number of changed plans; extensions' values are the latest. It is at the last global step.

    Summaries are written by TensorFlow itself, since ``tf.summary.scalar`` needs the package
    ``tensorboard``.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._lines: list[StepLine] = []
        self._sizes: tuple[int, ...] | None = None
        self._folder: str | None = None
        self._every = _MOST
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        if session.rank == 0:
            session.observers.append(self._add)

    def begin_fit(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the user's TensorBoard callback; without one, nothing is written."""
        self.end_fit()
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.TensorBoard):
                self._folder = f"{callback.log_dir}/lbbsp"  # may be a URL
                frequency = callback.update_freq
                self._every = frequency if isinstance(frequency, int) else _MOST

    def end_step(self) -> None:
        """Writes a point if it is due."""
        if len(self._lines) >= self._every:
            self._write()

    def end_epoch(self) -> None:
        """Writes a point of the steps since the last one."""
        self._write()
        for writer in self._writers.values():
            writer.flush()

    def end_fit(self) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._lines.clear()
        self._folder = None

    def _add(self, line: StepLine) -> None:
        """Takes a step, in the middle of the training step: nothing is written here."""
        if self._folder is not None:
            self._lines.append(line)

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if self._folder is None or not lines:
            return
        step = lines[-1].step
        try:
            for rank in range(len(lines[-1].sizes)):
                self._write_scalars(f"worker_{rank}", step, scalars_of(lines, rank))
            figures = figures_of(lines)
            scalars = {} if figures is None else figures._asdict()
            if not lines[-1].work:  # with known work the samples are divided again in each step
                scalars["plan_changes"] = self._changes(lines)
            self._write_scalars("all", step, scalars)
        except (OSError, tf.errors.OpError) as error:
            logger.warning("scalars for TensorBoard cannot be written any more: %s", error)
            self._folder = None

    def _write_scalars(self, run: str, step: int, scalars: dict[str, float]) -> None:
        if run not in self._writers:
            self._writers[run] = tf.summary.create_file_writer(f"{self._folder}/{run}")
        with self._writers[run].as_default(step), tf.summary.record_if(True):
            metadata = tf.compat.v1.SummaryMetadata(data_class=1)  # DATA_CLASS_SCALAR
            metadata.plugin_data.plugin_name = "scalars"
            for name, value in scalars.items():
                tf.summary.write(f"lbbsp/{name}", np.float32(value), metadata=metadata)

    def _changes(self, lines: Sequence[StepLine]) -> float:
        """Returns in how many full steps the plan is another one than in the full step before."""
        plans = [self._sizes, *(line.sizes for line in lines if not line.short)]
        self._sizes = plans[-1]
        return float(sum(last not in (None, plan) for last, plan in pairwise(plans)))


def scalars_of(lines: Sequence[StepLine], rank: int) -> dict[str, float]:
    """Returns means over steps of a worker, by name: over the regular ones, if there are any."""
    recorded = {name: x for line in lines for name, x in line.values_of(rank).items()}
    lines = counted(lines)
    busy = [line.busy_seconds[rank] for line in lines]
    scalars = {
        "batch_size": fmean(line.sizes[rank] for line in lines),
        "busy_seconds": fmean(busy),
        "waiting_seconds": fmean(max(line.busy_seconds) for line in lines) - fmean(busy),
    }
    if (ratio := predicted_over_measured(lines, rank)) is not None:
        scalars["predicted_over_measured"] = ratio
    return {**scalars, **recorded}
