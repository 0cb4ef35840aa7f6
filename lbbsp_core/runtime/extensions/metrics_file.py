"""Metrics of a run for Prometheus: a file for the textfile collector of the node exporter.

The format is Prometheus' text format, version 0.0.4. All metrics are gauges, and have the label
``run``, the name of the file without its suffix: the collector refuses two files with the same
series.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from lbbsp_core.files import write_whole
from lbbsp_core.runtime.extensions.base import Session, StepExtension
from lbbsp_core.runtime.record.figures import RECENT, Figures, RunningFigures
from lbbsp_core.runtime.record.record import RunHeader, StepLine
from lbbsp_core.runtime.reliability.exit import before_end, exit_status
from lbbsp_core.runtime.reliability.liveness import BackgroundThread

logger = logging.getLogger("lbbsp.metrics")

SECONDS: Final = 5.0
"""Shortest time between two writes; collectors read every 15 seconds or less often."""

_PATIENCE_SECONDS: Final = 2.0
"""Time for which `Metrics.flush` waits for a slow file system."""

_WINDOW: Final = f"over the last {RECENT} regular steps"
_HELP: Final = {
    "lbbsp_start_timestamp_seconds": "Unix time of the last start of the run.",
    "lbbsp_last_step_timestamp_seconds": "Unix time at the end of the last step.",
    "lbbsp_end_timestamp_seconds": "Unix time at which the process of worker 0 ended well.",
    "lbbsp_workers": "Number of workers.",
    "lbbsp_global_batch_size": "Samples of a full step over all workers.",
    "lbbsp_step": "Number of the last global step.",
    "lbbsp_step_seconds": "Time of the last step, from barrier to barrier.",
    "lbbsp_waiting_ratio": f"Share of time waiting for other workers, {_WINDOW}.",
    "lbbsp_waiting_and_communication_ratio": f"Share of time not computing, {_WINDOW}.",
    "lbbsp_speedup_ratio": f"Least estimate of the speed-up over even batches, {_WINDOW}.",
    "lbbsp_speedup_at_most_ratio": f"Largest estimate of the same, {_WINDOW}.",
    "lbbsp_hidden_communication_ratio": f"Share of time hiding communication, {_WINDOW}.",
    "lbbsp_batch_size": "Samples of the worker in the last step.",
    "lbbsp_busy_seconds": "Busy time of the worker in the last step.",
    "lbbsp_waiting_seconds": "Time in the last step until the slowest worker was done.",
    "lbbsp_extension_value": "What an extension has recorded of the worker in the last step.",
    "lbbsp_predicted_seconds": "Busy time that was predicted for the last step.",
}


_newest: WeakValueDictionary[Path | None, Metrics] = WeakValueDictionary()
"""By file, what had the last step: a process may train several models, one after the other."""


class Metrics(StepExtension):
    """Writes the metrics of the last step to a file, from a background thread of worker 0.

    The file is replaced as a whole, and has the last step when the process has ended. A failure to
    write is reported once, and never stops the training.
    """

    _header: RunHeader | None = None
    _latest: tuple[StepLine, Figures, float | None] | None = None  # and when the process ended
    _written: tuple[StepLine, Figures, float | None] | None = None
    _written_at: float | None = None
    _writing: Future[None] | None = None
    _warned = False

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(session)
        self._path = session.options.metrics_path()  # a wrong name is an error here
        self._clock = clock
        self._figures = RunningFigures()
        self._thread = BackgroundThread("lbbsp-metrics")

    def started(self, header: Callable[[], RunHeader]) -> None:
        """Opens the file in the first training, if one is wanted."""
        if self._path is not None and self.session.rank == 0 and self._header is None:
            self._header = header()
            self.session.observers.append(self.add)
            before_end(self._end)

    def add(self, line: StepLine) -> None:
        """Takes a step, and starts to write if the last write is some seconds ago."""
        self._figures.add(line)
        self._latest = line, self._figures.recent, None
        _newest[self._path] = self
        now = self._clock()
        is_due = self._written_at is None or now - self._written_at >= SECONDS
        if is_due and (self._writing is None or self._writing.done()):
            self._written_at = now
            self._writing = self._thread.start(self._write)

    def flush(self) -> None:
        """Writes the last step; waits for a slow file system only for a moment.

        Does nothing if another training of this process has written to the file since.
        """
        if not self._is_idle():
            return
        if self._latest is self._written or _newest.get(self._path) is not self:
            return
        self._writing = self._thread.start(self._write)
        self._is_idle()

    def _end(self) -> None:
        if self._latest is not None and exit_status() == 0:
            self._latest = (*self._latest[:2], time.time())
        self.flush()

    def _is_idle(self) -> bool:
        """Waits a moment for a running write, and returns whether there is none any more."""
        return self._writing is None or not wait([self._writing], _PATIENCE_SECONDS).not_done

    def _write(self) -> None:
        assert self._latest
        assert self._header
        assert self._path
        latest, path = self._latest, self._path
        try:
            write_whole(path, metrics_text(path.stem, self._header, *latest).encode())
            self._written = latest
        except Exception as error:  # such as names that UTF-8 does not have
            log = logger.debug if self._warned else logger.warning
            log(
                "metrics cannot be written to %s (%s): the training continues, and further "
                "failures are not reported",
                path,
                getattr(error, "strerror", None) or error,
            )
            self._warned = True


def metrics_text(
    run: str, header: RunHeader, line: StepLine, figures: Figures, ended: float | None = None
) -> str:
    """Returns the metrics of a run after a step, in Prometheus' text format."""
    of_run = {"run": run}
    slowest = max(line.busy_seconds)
    series: dict[str, list[tuple[Mapping[str, str], float | None]]] = {
        "lbbsp_start_timestamp_seconds": [(of_run, header.started)],
        "lbbsp_last_step_timestamp_seconds": [(of_run, line.time)],
        "lbbsp_end_timestamp_seconds": [(of_run, ended)],
        "lbbsp_workers": [(of_run, header.workers)],
        "lbbsp_global_batch_size": [(of_run, header.global_batch_size)],
        "lbbsp_step": [(of_run, line.step)],
        "lbbsp_step_seconds": [(of_run, line.wall_seconds)],
        **{f"lbbsp_{name}_ratio": [(of_run, x)] for name, x in figures._asdict().items()},
    }
    for rank, busy in enumerate(line.busy_seconds):
        host = header.hosts[rank] if rank < len(header.hosts) else ""
        labels = {**of_run, "worker": str(rank), "host": host}
        for name, value in (
            ("lbbsp_batch_size", line.sizes[rank]),
            ("lbbsp_busy_seconds", busy),
            ("lbbsp_waiting_seconds", slowest - busy),
            ("lbbsp_predicted_seconds", line.predicted_seconds[rank]),
        ):
            series.setdefault(name, []).append((labels, value))
        for name, recorded in line.values_of(rank).items():
            point = {**labels, "name": name}, recorded
            series.setdefault("lbbsp_extension_value", []).append(point)
    return "".join(text for name, values in series.items() for text in _metric(name, values))


def _metric(name: str, values: list[tuple[Mapping[str, str], float | None]]) -> Iterator[str]:
    """Yields the lines of a metric, unless none of its values is known."""
    known_values = [(labels, value) for labels, value in values if value is not None]
    if known_values:
        yield f"# HELP {name} {_HELP[name]}\n# TYPE {name} gauge\n"
    for labels, value in known_values:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {value!r}\n"


def _escaped(text: str) -> str:
    """Returns the value of a label in Prometheus' text format."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
