"""View of a running job: its record is read as it grows."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lbbsp_core.files import open_regular
from lbbsp_core.report.causes import causes
from lbbsp_core.runtime.record import record
from lbbsp_core.runtime.record.events import ENDS, PLANNED, EventLine
from lbbsp_core.runtime.record.figures import (
    RECENT,
    Figures,
    StepTimes,
    TimesSoFar,
    predicted_over_measured,
    total,
)
from lbbsp_core.runtime.record.record import PushLine, RunHeader, StepLine
from lbbsp_core.validate import one_line, parse_json

_SLOW = 0.9
"""Speed, in terms of that of the fastest worker, below which causes are looked for."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """Worker over the recent steps, or over its recent pushes."""

    rank: int  # number of the worker
    host: str  # name of its machine; empty if unknown
    device: str  # its device as a short text; empty if unknown
    batch_size: int | None = None  # samples of its last batch; None before the first step
    busy_seconds: float | None = None  # mean busy time of a step
    # mean time of a step in which it waited for slower workers; None where workers need not be in
    # the same step
    waiting_seconds: float | None = None
    waiting: float | None = None  # the same as a share of the time of the steps, in [0, 1)
    prediction: float | None = None  # predicted over measured busy time; None without predictions
    # pushes of this worker so far, where workers need not be in the same step
    pushes: int | None = None
    # samples per second (or work) in terms of those of the fastest worker; None if unknown
    speed: float | None = None
    causes: tuple[str, ...] = ()  # why it is slower than the fastest one, as far as drivers show it
    # what extensions of the session have recorded of its last step, by name
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class View:
    """State of a run at one moment; *recent* is over the last `RECENT` regular steps."""

    framework: str
    workers: tuple[WorkerView, ...]  # workers by rank
    global_batch_size: int  # samples of a full step, X
    step: int | None  # last global step, or number of pushes; None before the first
    steps_per_second: float | None  # steps, or pushes, per second, recent
    samples_per_second: float | None  # samples per second, recent
    # rank of the worker that the others wait for, recent; None if unknown, or if several workers
    # are the slowest in turn
    slowest: int | None
    # see `runtime.record.figures`; None before the first step
    recent: Figures | None
    # the same over all steps since the number of workers last changed, as in reports
    so_far: Figures | None
    # time since the end, or else the last step, or else the start; None if unknown
    age_seconds: float | None
    # time from the last start to the end, or to the last step; None if unknown
    elapsed_seconds: float | None
    restarts: int  # number of times that the run was started again
    unreadable: int  # number of lines that could not be read
    stop: str | None = None  # why all workers stopped after the last step; None if they did not
    planned_steps: int | None = None  # step number at which the training ends; None if unknown
    remaining_seconds: float | None = None  # time until then; None if unknown
    end: str | None = None  # how the run ended, one of `ENDS`; None if it did not, or was killed

    @property
    def is_asynchronous(self) -> bool:
        """Whether the workers push, and need not be in the same step."""
        return any(worker.pushes is not None for worker in self.workers)

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        values = asdict(self)
        for name in ("recent", "so_far"):
            values[name] = values[name] and values[name]._asdict()
        return values


class LiveRun:
    """Run whose record grows. After a restart, and if the record is replaced, it continues.

    The record need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path if path.suffix == ".jsonl" or path.is_file() else path / "run.jsonl"
        self._tail = Tail(self.path)
        self._forget()

    def read(self) -> bool:
        """Reads what was appended since the last call; returns whether the run has started."""
        texts = self._tail.read()
        if self._tail.lines == len(texts):  # nothing was read before, or of another file
            self._forget()
        where, first = str(self.path), 1 + self._tail.lines - len(texts)
        for number, text in enumerate(texts, start=first):
            try:
                values = parse_json(text, where)
                if not record.is_header(values):
                    self._add(values, where)
                    continue
            except ValueError:
                self.unreadable += 1  # such as a line that a killed run has not finished
                continue
            self._start(record.parse_header(values, f"{where} line {number}"))
        return self.header is not None

    def view(self, now: float | None = None) -> View:
        """Returns the state of the run."""
        header, now = self.header, time.time() if now is None else now
        assert header is not None, "read() has found no header"
        started, last = header.started, self._last_time
        since = started if last is None else last
        stop = self.last_step and self.last_step.stop
        elapsed = None if last is None or started is None else max(0.0, last - started)
        steps, times = self._steps, total(map(StepTimes.of, self._steps))
        workers = [self._worker(header, rank, steps, times) for rank in range(header.workers)]
        workers = _with_causes(workers, steps)
        waits = [worker.waiting_seconds or 0.0 for worker in workers]
        steps_per_second, samples_per_second = self._rates(steps)
        return View(
            framework=one_line(header.framework),
            workers=tuple(workers),
            global_batch_size=header.global_batch_size,
            step=self._step,
            steps_per_second=steps_per_second,
            samples_per_second=samples_per_second,
            # It waits less than half as long as all workers do on average.
            slowest=waits.index(min(waits)) if 2 * min(waits) < fmean(waits) else None,
            recent=times.figures,
            so_far=self._so_far.figures,
            age_seconds=None if since is None else max(0.0, now - since),
            elapsed_seconds=elapsed,
            restarts=self._starts - 1,
            unreadable=self.unreadable,
            stop=one_line(stop) if stop else None,
            planned_steps=self._planned,
            remaining_seconds=self._remaining_seconds(),
            end=self._end,
        )

    def _forget(self) -> None:
        self.header: RunHeader | None = None
        self.unreadable = self._starts = 0
        self._so_far = TimesSoFar()

    def _start(self, header: RunHeader) -> None:
        self._starts += 1
        self.header = header
        self._steps: deque[StepLine] = deque(maxlen=RECENT)
        self.last_step: StepLine | None = None
        self._pushes: defaultdict[int, deque[PushLine]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._step: int | None = None
        self._last_time: float | None = None
        self._first: StepLine | None = None
        self._planned: int | None = None
        self._end: str | None = None

    def _add(self, values: object, where: str) -> None:
        """Adds a step, push or event."""
        if self.header is None:
            raise ValueError(f"{where} must begin with a header")
        line = record.parse_line(values, where, self.header.workers)
        if isinstance(line, EventLine):
            self._planned = line.steps if line.event == PLANNED else self._planned
            if line.event in ENDS:
                self._end, self._last_time = line.event, line.time
        elif isinstance(line, StepLine):
            self._so_far.add(line)
            self._end = None  # was that of another job which was started on the same record
            if self._steps and not self._steps[-1].is_regular:
                self._steps.clear()  # an irregular step counts only until there is another one
            if line.is_regular or not self._steps:
                self._steps.append(line)
            self._first, self.last_step = self._first or line, line
            self._step, self._last_time = line.step, line.time
        else:
            self._pushes[line.worker].append(line)
            started, self._step = self.header.started, line.push
            self._last_time = None if started is None else started + line.seconds

    def _remaining_seconds(self) -> float | None:
        """Returns the time left, at the pace since the first step, with all that is between steps.

        The end of the first step is the start: it has the compilation.
        """
        first, last, planned = self._first, self.last_step, self._planned
        if first is None or last is None or planned is None or self._end is not None:
            return None
        if planned <= last.step + 1:
            return 0.0
        if first.time is None or last.time is None or last.step <= first.step:
            return None
        pace = max(0.0, last.time - first.time) / (last.step - first.step)
        return pace * (planned - last.step - 1)

    def _rates(self, steps: Sequence[StepLine]) -> tuple[float | None, float | None]:
        """Returns steps and samples per second; of pushes, the sums of the workers' own rates."""
        if self._pushes:
            rates = [_rates_of(p) for p in self._pushes.values() if p[-1].seconds > p[0].seconds]
            return (sum(r[0] for r in rates), sum(r[1] for r in rates)) if rates else (None, None)
        count, seconds = len(steps), sum(line.wall_seconds for line in steps)
        samples = sum(sum(line.sizes) for line in steps)
        return (count / seconds, samples / seconds) if seconds > 0 else (None, None)

    def _worker(
        self, header: RunHeader, rank: int, steps: Sequence[StepLine], times: StepTimes
    ) -> WorkerView:
        worker = WorkerView(rank, _name(header.hosts, rank), _name(header.devices, rank))
        if pushes := self._pushes.get(rank):
            return replace(
                worker,
                batch_size=pushes[-1].samples,
                busy_seconds=fmean(push.busy_seconds for push in pushes),
                pushes=pushes[-1].iteration + 1,
            )
        if not steps:
            return worker if header.sync is None else replace(worker, pushes=0)
        last = self.last_step or steps[-1]
        busy = sum(line.busy_seconds[rank] for line in steps)
        waited = max(times.slowest - busy, 0.0)
        return replace(
            worker,
            batch_size=last.sizes[rank],
            busy_seconds=busy / len(steps),
            waiting_seconds=waited / len(steps),
            waiting=waited / times.seconds if times.seconds > 0 else 0.0,
            prediction=predicted_over_measured(steps, rank),
            values={one_line(name): x for name, x in last.values_of(rank).items()},
        )


def _rates_of(pushes: Sequence[PushLine]) -> tuple[float, float]:
    """Returns pushes and samples per second of a worker, after the first of these pushes."""
    first, *later_pushes = pushes
    seconds = later_pushes[-1].seconds - first.seconds
    return len(later_pushes) / seconds, sum(push.samples for push in later_pushes) / seconds


def _with_causes(workers: list[WorkerView], steps: Sequence[StepLine]) -> list[WorkerView]:
    """Adds speeds, and why workers are slow: what the fastest one does not suffer from."""
    busy = [sum(line.busy_seconds[worker.rank] for line in steps) for worker in workers]
    if not steps or min(busy) <= 0:
        return workers
    speeds = [sum(line.amounts[w.rank] for line in steps) / busy[w.rank] for w in workers]
    fastest = max(speeds)
    if not fastest > 0:
        return workers
    drivers = [_drivers(steps, worker.rank) for worker in workers]
    usual = drivers[speeds.index(fastest)]
    return [
        replace(
            worker,
            speed=(speed := speeds[worker.rank] / fastest),
            causes=tuple(text for _, text in causes(drivers[worker.rank], usual))
            if speed < _SLOW
            else (),
        )
        for worker in workers
    ]


def _drivers(steps: Sequence[StepLine], rank: int) -> dict[str, float]:
    """Returns means of a worker's driving factors."""
    values_by_name: defaultdict[str, list[float]] = defaultdict(list)
    for line in steps:
        for name, values in line.drivers.items():
            if (value := values[rank]) is not None:
                values_by_name[name].append(value)
    return {name: fmean(values) for name, values in values_by_name.items()}


def _name(names: Sequence[str], rank: int) -> str:
    return one_line(names[rank]) if rank < len(names) else ""


class Tail:
    """Reads the complete lines that were appended to a file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        """Number of lines read so far."""
        self._position = 0
        self._file: tuple[int, int] | None = None

    def read(self) -> list[bytes]:
        """Returns the lines that have been completed since the last call.

        `lines` starts from 0 again if the file was replaced by another one, or cut off.
        """
        try:
            with open_regular(self.path) as stream:
                status = os.fstat(stream.fileno())
                self._note((status.st_dev, status.st_ino), status.st_size)
                stream.seek(self._position)
                text = stream.read()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        lines = complete.split(b"\n")[:-1]
        self.lines += len(lines)
        return lines

    def _note(self, file: tuple[int, int], size: int) -> None:
        """Starts at the beginning if this is another file than before."""
        if self._file not in (None, file) or size < self._position:
            self._position = self.lines = 0
        self._file = file
