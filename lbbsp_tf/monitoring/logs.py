"""Waiting and speed-up in the logs of `fit`: progress bar, History, CSVLogger and others."""

from __future__ import annotations

import keras

from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.record.figures import RunningFigures
from lbbsp_tf import compat


class FigureLogs:
    """Adds ``waiting`` and ``speedup`` to the logs of a fit; see `runtime.record.figures`.

    After a step they are those of the recent steps, after an epoch those of the epoch. They are
    the same on all workers.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._figures = RunningFigures()
        self._callbacks: keras.callbacks.CallbackList | None = None
        session.observers.add(self._figures.add)

    def begin_fit(self) -> None:
        """Adds to the logs of the fit that begins, until `end_fit`."""
        figures = self._figures
        self._callbacks = compat.running_list()
        if self._callbacks is not None:
            compat.add_to_logs(
                self._callbacks, lambda: figures.recent._asdict(), lambda: figures.epoch._asdict()
            )

    def begin_epoch(self) -> None:
        """Begins the figures of an epoch."""
        self._figures.begin_epoch()

    def end_fit(self) -> None:
        """Leaves the logs of later fits alone."""
        if self._callbacks is not None:
            compat.stop_adding(self._callbacks)
            self._callbacks = None
