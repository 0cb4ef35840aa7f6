"""A run in the trace-event format of Chrome, which Perfetto shows as well.

The file is a JSON object with one event on each line of its list. Times are microseconds since the
first start that is known, by the clock of rank 0. Within a step, a worker computes first, then
waits for the slowest one, then all communicate: where in the step its busy time lies, the record
does not say.

References:
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

from lbbsp_core.files import write_whole
from lbbsp_core.runtime.record.record import PREEMPTED, REQUESTED, PushLine, Run, StepLine

Event = dict[str, Any]
"""Trace event: the phase ``ph`` is X for a slice, C for counters, i for a moment, M for names."""

_WORKERS, _COUNTERS = 1, 2
"""Processes of the trace: Perfetto shows the tracks of each together. For it, 0 is the idle one."""

_STOPS: Final = {REQUESTED: "stopped", PREEMPTED: "preempted"}


def write_trace(run: Run, path: Path) -> int:
    """Writes the trace of a run to a file, whose folder is created; returns the number of events.

    Raises:
        ValueError: The run has no steps or pushes.
    """
    if not (run.steps or run.pushes):
        raise ValueError("the run must have at least one step, got none: train for longer")
    count = 0

    def write(file: BinaryIO) -> None:
        nonlocal count
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        for event in trace_events(run):
            text = json.dumps(event, allow_nan=False, separators=(",", ":"))
            file.write(f"{',' * bool(count)}\n{text}".encode(errors="replace"))
            count += 1
        file.write(b"\n]}\n")

    write_whole(path, write)
    return count


def trace_events(run: Run) -> Iterator[Event]:
    """Yields the events of a run: names of tracks, slices of workers, counters, and moments."""
    workers = max([run.header.workers, *(len(line.sizes) for line in run.steps)])
    yield from _names(run, workers)
    start = run.header.started
    firsts = [line.time - line.wall_seconds for line in run.steps if line.time is not None]
    zero = min([moment for moment in (start, *firsts) if moment is not None], default=0.0)
    yield from chain(_steps(run, zero), _pushes(run.pushes))
    for event in run.events:
        yield _moment(event.event, event.time - zero, {"steps": event.steps})


def _names(run: Run, workers: int) -> Iterator[Event]:
    header = run.header
    yield _meta("process_name", _WORKERS, 1, name=f"workers of {header.framework}")
    yield _meta("process_name", _COUNTERS, 1, name="batch sizes and drivers")
    for rank in range(workers):
        details = [names[rank] for names in (header.hosts, header.devices) if rank < len(names)]
        text = f"worker {rank}" + (f" ({', '.join(details)})" if details else "")
        yield _meta("thread_name", _WORKERS, 1 + rank, name=text)
        yield _meta("thread_sort_index", _WORKERS, 1 + rank, sort_index=rank)


def _steps(run: Run, zero: float) -> Iterator[Event]:
    """Yields the slices and counters of all steps; steps without a time follow each other."""
    # Steps that a later start has repeated are not shown, nor is a restart among them.
    later = [min(run.restarts[k + 1 :], default=math.inf) for k in range(len(run.restarts))]
    restarts = {step for step, next_one in zip(run.restarts, later, strict=True) if step < next_one}
    now = 0.0
    for line in run.steps:
        ended = None if line.time is None else line.time - zero
        begin = now if ended is None else max(now, ended - line.wall_seconds)
        now = begin + line.wall_seconds if ended is None else max(begin, ended)
        if line.step in restarts:
            yield _moment("restart", begin, {"step": line.step})
        yield from _slices(line, begin, now)
        yield _counters("batch size", begin, line.sizes)
        for name, values in (*line.drivers.items(), *line.values.items()):
            yield _counters(name, begin, values)
        if line.stop is not None:
            yield _moment(_STOPS.get(line.stop, line.stop), now, {"step": line.step})


def _slices(line: StepLine, begin: float, end: float) -> Iterator[Event]:
    """Yields what each worker does in a step; busy times, by other clocks, may exceed it."""
    slowest = max(line.busy_seconds)
    for rank, busy in enumerate(line.busy_seconds):
        facts: Event = {"step": line.step, "samples": line.sizes[rank], "busy_seconds": busy}
        if (predicted := line.predicted_seconds[rank]) is not None:
            facts["predicted_seconds"] = predicted
        if rank in line.excluded:
            facts["excluded"] = True
        if not busy > 0:
            yield _slice("not measured", rank, begin, end, facts)
            continue
        computed, arrived = min(begin + busy, end), min(begin + slowest, end)
        yield _slice("compute", rank, begin, computed, facts)
        if arrived > computed:
            yield _slice("waiting", rank, computed, arrived, {"step": line.step})
        if end > arrived:
            yield _slice("communication", rank, arrived, end, {"step": line.step})


def _pushes(pushes: Sequence[PushLine]) -> Iterator[Event]:
    """Yields the iterations of workers that need not be in the same step."""
    free: dict[int, float] = {}
    for push in sorted(pushes, key=lambda push: push.seconds):
        before = free.get(push.worker, 0.0)
        begin = max(before, push.seconds - push.busy_seconds)
        end = max(begin, push.seconds)
        if push.worker in free and begin > before:
            yield _slice("waiting and communication", push.worker, before, begin, {})
        facts = {"iteration": push.iteration, "samples": push.samples, "lead": push.lead}
        yield _slice("compute", push.worker, begin, end, {**facts, "staleness": push.staleness})
        yield {**_event("C", "staleness", _COUNTERS, 1, end),
               "args": {f"worker {push.worker}": push.staleness}}  # fmt: skip
        free[push.worker] = end


def _event(phase: str, name: str, process: int, thread: int, seconds: float) -> Event:
    return {"ph": phase, "name": name, "pid": process, "tid": thread, "ts": round(seconds * 1e6, 3)}


def _slice(name: str, rank: int, begin: float, end: float, facts: Event) -> Event:
    event = _event("X", name, _WORKERS, 1 + rank, begin)
    microseconds = round(round(end * 1e6, 3) - event["ts"], 3)  # it ends where the next one begins
    return {**event, "dur": microseconds, "cat": "step", "args": facts}


def _counters(name: str, seconds: float, values: Sequence[float | None]) -> Event:
    """Returns the values of all workers; those of None are left out."""
    series = {f"worker {rank}": value for rank, value in enumerate(values) if value is not None}
    return {**_event("C", name, _COUNTERS, 1, seconds), "args": series}


def _moment(name: str, seconds: float, facts: Mapping[str, object]) -> Event:
    """Returns a moment that all tracks show."""
    known_facts = {key: value for key, value in facts.items() if value is not None}
    return {**_event("i", name, _WORKERS, 1, max(0.0, seconds)), "s": "g", "args": known_facts}


def _meta(name: str, process: int, thread: int, /, **values: object) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": values}
