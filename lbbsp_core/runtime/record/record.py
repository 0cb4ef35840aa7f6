"""Run record ``run.jsonl``: a header line, then one JSON line per step or per push.

Rank 0 writes it. Keys are the field names of `RunHeader`, `StepLine` and `PushLine`; a field that
is empty by default is left out while it is empty. Times are in seconds and always finite. A run
that starts again appends another header line and the lines that follow.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from lbbsp_core.validate import parse_json, shortened

logger = logging.getLogger("lbbsp.record")

SCHEMA: Final = 2

REQUESTED: Final = "requested"
"""A worker asked all of them to stop: the script, or a callback in the middle of an epoch."""

PREEMPTED: Final = "preempted"
"""A worker had to leave, after SIGTERM: all of them saved a checkpoint."""

_MOST_WORKERS: Final = 1_000_000
"""A file that claims more is damaged; views have a row for each worker."""

_LARGEST: Final = 1e15
"""Sums of smaller numbers are exact, or do not overflow."""

_NANOSECONDS: Final = {"per_second": 10**9}
_MICROSECONDS: Final = {"per_second": 10**6}


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """Facts of a run that never change; see `run_header`, which fills them in.

    Args:
        schema: Version of the file format.
        framework: Name of the training framework.
        workers: Number of workers, N.
        global_batch_size: Samples of a full step, X.
        num_samples: Samples of an epoch, if known.
        seed: Seed of the sample order, if known.
        lag: Steps between a measurement and the plan that follows from it.
        policy: Policy, as its repr.
        predictor: Predictor, as its repr.
        cost: Prior cost of a worker, as its repr.
        sync: Synchroniser, as its repr, of a run whose workers need not be in the same step.
        servers: Number of parameter servers.
        batch_size: Samples of an iteration, where all iterations have the same number.
        drivers: Names of the sampled resources, the exogenous inputs of the predictor.
        started: Unix time of the start, by the clock of rank 0.
        hosts: Host name of each worker, by rank, if known.
        devices: Device of each worker as a short text, by rank, if known.
        versions: Versions of lbbsp, Python and the framework's packages, by name.
    """

    schema: int = SCHEMA
    framework: str
    workers: int
    global_batch_size: int
    num_samples: int | None = None
    seed: int | None = None
    lag: int | None = None
    policy: str | None = None
    predictor: str | None = None
    cost: str | None = None
    sync: str | None = None
    servers: int | None = None
    batch_size: int | None = None
    drivers: tuple[str, ...] = ()
    started: float | None = None
    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """Step of a run whose workers are all in the same step; tuples are by rank.

    Args:
        step: Number of the global step.
        sizes: Batch size of each worker, in samples.
        busy_seconds: Busy time of each worker; 0 where it could not be measured.
        predicted_seconds: Time that each worker was predicted to take; None without a prediction.
        wall_seconds: Time from barrier to barrier, as rank 0 measures it.
        even_seconds: Estimate of the slowest worker's busy time with even batches, see
            `lbbsp_core.runtime.record.figures`; None if not estimated.
        excluded: Ranks whose measurement was excluded from learning.
        short: True if the step has fewer samples than the global batch size.
        drivers: Driving factors of each worker known before the step started, by name; None where
            a worker does not have one. Empty if none were known, as before the first step.
        values: What extensions of the session record, by name: a value of each worker.
        work: Work of each worker in mean samples of the data set, if it was known.
        time: Unix time at the end of the step, by the clock of rank 0, if known.
        stop: Why all workers stopped after the step: `REQUESTED` or `PREEMPTED`; None if they did
            not.
    """

    step: int
    sizes: tuple[int, ...]
    busy_seconds: tuple[float, ...]
    predicted_seconds: tuple[float | None, ...]
    wall_seconds: float
    even_seconds: float | None = None
    excluded: tuple[int, ...]
    short: bool = False
    drivers: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    work: tuple[float, ...] = ()
    time: float | None = None
    stop: str | None = None

    @property
    def amounts(self) -> tuple[float, ...]:
        """Work of each worker, or its samples where the work was not known."""
        return self.work or self.sizes

    @property
    def is_regular(self) -> bool:
        """True for a full step in which no measurement was excluded."""
        return not self.excluded and not self.short


@dataclass(frozen=True, kw_only=True)
class PushLine:
    """Push of gradients, in a run whose workers need not be in the same step.

    Args:
        push: Number of pushes before this one, by all workers.
        worker: Rank of the worker that pushed.
        iteration: Number of pushes before this one, by the same worker.
        samples: Batch size of the iteration.
        busy_seconds: Time of the iteration, without waiting for other workers.
        seconds: Time since the start of the run at which the push entered the model.
        staleness: Updates by other workers between the read of the model from which the gradient
            was computed, and this push.
        lead: Iterations by which the worker was ahead of the slowest one when it started this
            one, both counted since the last barrier.
    """

    push: int
    worker: int
    iteration: int
    samples: int
    busy_seconds: float = field(metadata=_NANOSECONDS)
    seconds: float = field(metadata=_MICROSECONDS)
    staleness: int
    lead: int

    def to_integers(self) -> list[int]:
        """Encodes the line for a transport that carries integers only.

        Returns:
            `PUSH_INTEGERS` integers in the order of the fields; ``busy_seconds`` in nanoseconds,
            ``seconds`` in microseconds.

        Example:
            >>> line = PushLine(push=7, worker=2, iteration=5, samples=16, busy_seconds=0.25,
            ...                 seconds=3.5, staleness=4, lead=1)
            >>> line.to_integers()
            [7, 2, 5, 16, 250000000, 3500000, 4, 1]
            >>> PushLine.from_integers(line.to_integers()) == line
            True
        """
        return [
            round(getattr(self, each.name) * each.metadata.get("per_second", 1))
            for each in fields(self)
        ]

    @classmethod
    def from_integers(cls, values: Sequence[int]) -> PushLine:
        """Decodes what `to_integers` returned.

        Raises:
            ValueError: The number of integers is not `PUSH_INTEGERS`.
        """
        if len(values) != PUSH_INTEGERS:
            raise ValueError(f"a push consists of {PUSH_INTEGERS} integers, got {len(values)}")
        decoded: dict[str, Any] = {}
        for each, value in zip(fields(cls), values, strict=True):
            scale = each.metadata.get("per_second")
            decoded[each.name] = int(value) if scale is None else value / scale
        return cls(**decoded)

    @classmethod
    def from_floats(cls, values: Sequence[float]) -> PushLine:
        """Decodes the fields in their order from floats that hold integers exactly."""
        pairs = zip(fields(cls), values, strict=True)
        named = {each.name: x if "per_second" in each.metadata else int(x) for each, x in pairs}
        return cls(**named)  # type: ignore[arg-type]


PUSH_INTEGERS: Final = len(fields(PushLine))
"""Length of `PushLine.to_integers`."""


class RunRecord:
    """Appends lines to ``run.jsonl``; the file is complete after every line.

    An existing record is continued with a new header. A record that cannot be written is reported
    once, in a warning, and never stops the training.

    Args:
        path: File to append to. Its folder is created.
        header: Facts of the run.
    """

    def __init__(self, path: str | Path, header: RunHeader) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(self.path, flags, 0o666)
            self._end_unfinished_line()
        except OSError as error:
            self._give_up(error)
        self._write(header)

    def write(self, line: StepLine | PushLine) -> None:
        """Appends one step or push.

        Raises:
            ValueError: A number is not finite.
        """
        self._write(line)

    def close(self) -> None:
        """Closes the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:  # a network file system reports some failures only here
                self._warn(error)

    def _write(self, line: RunHeader | StepLine | PushLine) -> None:
        text = json.dumps(_to_json(line), allow_nan=False) + "\n"
        self._append(text.encode())

    def _append(self, data: bytes) -> None:
        try:
            while data and self._descriptor is not None:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self._give_up(error)

    def _end_unfinished_line(self) -> None:
        """Ends the line that an earlier run was still writing when it was stopped."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._append(b"\n")

    def _give_up(self, error: OSError) -> None:
        self._warn(error)
        self.close()

    def _warn(self, error: OSError) -> None:
        logger.warning(
            "the run record %s cannot be written (%s): the training continues without it",
            self.path,
            error.strerror or error,
        )


class PushLog:
    """Writes pushes to a record in the order of their numbers, in whatever order they arrive.

    Without a record they are discarded.
    """

    @classmethod
    def open(cls, path: str | Path | None, header: RunHeader) -> PushLog:
        """Opens the record at `path` for pushes; None discards them."""
        return cls(None if path is None else open_record(path, header))

    def __init__(self, record: RunRecord | None) -> None:
        self._record = record
        self._pending: dict[int, PushLine] = {}
        self._next = 0

    def add(self, line: PushLine) -> None:
        """Adds a push, and writes those that are no longer preceded by a missing number."""
        self._pending[line.push] = line
        while self._next in self._pending:
            self._write(self._pending.pop(self._next))

    def close(self) -> None:
        """Writes the pushes after a gap as well, and closes the record.

        A number stays missing if a worker failed between its push and its report.
        """
        for _, line in sorted(self._pending.items()):
            self._write(line)
        self._pending.clear()
        if self._record is not None:
            self._record.close()

    def _write(self, line: PushLine) -> None:
        self._next = line.push + 1
        if self._record is not None:
            self._record.write(line)


class Stop(NamedTuple):
    """End of an attempt at a run.

    Args:
        step: Last step of the attempt that was recorded.
        reason: `REQUESTED` or `PREEMPTED`; None if it ended otherwise, as by a failure.
    """

    step: int
    reason: str | None


@dataclass(frozen=True)
class Run:
    """Content of a run record.

    Args:
        header: Facts of the run, since its last start.
        steps: Steps in order. Of a step that was repeated after a restart, the last attempt.
        pushes: Pushes in order, of a run whose workers need not be in the same step; likewise.
        starts: Number of times that the run was started.
        restarts: Steps with which the later starts continued, in order of the starts; those that
            ended before their first step have none.
        stops: Ends of the attempts that had a step: of each that another start followed, and of
            the last one if all workers stopped together.
    """

    header: RunHeader
    steps: list[StepLine]
    pushes: list[PushLine] = field(default_factory=list)
    starts: int = 1
    restarts: tuple[int, ...] = ()
    stops: tuple[Stop, ...] = ()

    def with_same_workers(self) -> list[StepLine]:
        """Returns the steps since the number of workers last changed, in an elastic restart."""
        kept = []
        for line in reversed(self.steps):
            if len(line.sizes) != len(self.steps[-1].sizes):
                break
            kept.append(line)
        return kept[::-1]

    def last_half(self) -> list[StepLine]:
        """Returns the regular steps of the last half, on which the steady state is measured."""
        steps = self.with_same_workers()
        half = steps[len(steps) // 2 :]
        return [line for line in half if line.is_regular] or half


def run_header(framework: str, *, versions: Mapping[str, str], **facts: Any) -> RunHeader:
    """Builds the header of a run that starts now, of fields of `RunHeader`.

    Versions of lbbsp and Python are added. Policy, predictor, cost and synchroniser are recorded as
    their repr, a string as it is.
    """
    texts = {name: _text(facts.get(name)) for name in ("policy", "predictor", "cost", "sync")}
    names = {name: tuple(facts.get(name, ())) for name in ("drivers", "hosts", "devices")}
    own = {"started": time.time(), "versions": all_versions(versions)}
    return RunHeader(framework=framework, **{**facts, **texts, **names, **own})


def lbbsp_version() -> str:
    """Returns the version of this package."""
    from lbbsp_core import __version__  # defined once all of the core is imported

    return __version__


def all_versions(framework: Mapping[str, str]) -> dict[str, str]:
    """Returns the versions of lbbsp, of a framework's packages and of Python, by name."""
    return {"lbbsp": lbbsp_version(), **framework, "python": platform.python_version()}


def open_record(path: str | Path, header: RunHeader) -> RunRecord:
    """Opens the record at `path`: a ``.jsonl`` file, or the folder that will hold ``run.jsonl``."""
    path = Path(path)
    return RunRecord(path if path.suffix == ".jsonl" else path / "run.jsonl", header)


def read_run(path: str | Path) -> Run:
    """Reads ``run.jsonl``, or the one in a folder.

    A line that the run was still writing when it was stopped is ignored. After a restart, the last
    attempt of a step counts.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is empty or of another schema, or a line is invalid; names the file,
            the line and the key.
    """
    path = Path(path)
    path = path / "run.jsonl" if path.is_dir() else path
    texts = path.read_bytes().split(b"\n")
    if not texts[-1]:
        texts.pop()
    if not texts:
        raise ValueError(f"{path} is empty: the run has not started, or was not recorded")
    headers: list[RunHeader] = []
    steps: list[StepLine] = []
    pushes: list[PushLine] = []
    restarts: dict[int, int] = {}  # step of the first line after a later header, by its number
    ends: dict[int, Stop] = {}  # of the last line after a header, by its number
    unfinished: ValueError | None = None
    for number, text in enumerate(texts, start=1):
        where = f"{path} line {number}"
        try:
            values = parse_json(text, where)
        except ValueError as error:
            if unfinished is not None:
                raise unfinished from None
            # allowed at the end of the file, and before another start
            unfinished = ValueError(f"{error}: remove the line, or record the run again")
            continue
        if is_header(values):
            unfinished = None
        if unfinished is not None:
            raise unfinished
        if not headers or is_header(values):
            headers.append(parse_header(values, where))
            continue
        line = parse_line(values, where, headers[-1].workers)
        if isinstance(line, StepLine):
            if len(headers) > 1:
                restarts.setdefault(len(headers), line.step)
            ends[len(headers)] = Stop(line.step, line.stop)
            while steps and steps[-1].step >= line.step:
                steps.pop()
            steps.append(line)
        else:
            while pushes and pushes[-1].push >= line.push:
                pushes.pop()
            pushes.append(line)
    if not headers:
        assert unfinished is not None
        raise unfinished
    stops = (end for start, end in ends.items() if end.reason or start < len(headers))
    return Run(headers[-1], steps, pushes, len(headers), tuple(restarts.values()), tuple(stops))


def is_header(values: object) -> bool:
    """Returns whether a line, read as JSON, is a header, which every start of a run writes."""
    return isinstance(values, dict) and "schema" in values


def parse_header(values: object, where: str) -> RunHeader:
    """Converts a header, read as JSON."""
    schema = values.get("schema") if isinstance(values, dict) else values
    if schema == 1 and type(schema) is int:
        raise ValueError(
            f"{where}: the run was recorded by an older lbbsp (schema 1): record the run again, or "
            "read it with that version"
        )
    if not isinstance(values, dict) or schema != SCHEMA or type(schema) is not int:
        raise ValueError(f"{where}: schema must be {SCHEMA}, got {shortened(schema)}")
    header = _from_json(RunHeader, values, where)
    if not 1 <= header.workers <= _MOST_WORKERS:
        raise ValueError(
            f"{where}: workers must be between 1 and {_MOST_WORKERS}, got {header.workers}"
        )
    return header


def parse_line(values: object, where: str, workers: int | None = None) -> StepLine | PushLine:
    """Converts a line that is not a header, read as JSON.

    A step must have a value for each of `workers`, if their number is given.
    """
    if isinstance(values, dict) and "step" in values:
        line = _from_json(StepLine, values, where)
        names = ("sizes", "busy_seconds", "predicted_seconds", *["work"] * bool(line.work))
        by_worker = {
            **{name: getattr(line, name) for name in names},
            **{f"drivers {name!r}": given for name, given in line.drivers.items()},
            **{f"values {name!r}": given for name, given in line.values.items()},
        }
        for name, given in by_worker.items():
            if len(given) != (len(line.sizes) if workers is None else workers):
                raise ValueError(
                    f"{where}: {name} must have a value for each worker, got {len(given)} values: "
                    "remove the line, or record the run again"
                )
            _check_range(where, name, given)
        _check_range(where, "step", [line.step])
        _check_range(where, "wall_seconds", [line.wall_seconds])
        _check_range(where, "even_seconds", [line.even_seconds])
        _check_range(where, "time", [line.time])
        return line
    if isinstance(values, dict) and "push" in values:
        return _from_json(PushLine, values, where)
    raise ValueError(
        f"{where} must be an object with the key step or push, got {shortened(values)}"
    )


_Line = TypeVar("_Line", RunHeader, StepLine, PushLine)

_HINTS: Final = {kind: get_type_hints(kind) for kind in (RunHeader, StepLine, PushLine)}


def _to_json(line: RunHeader | StepLine | PushLine) -> dict[str, object]:
    values = ((each, getattr(line, each.name)) for each in fields(line))
    return {each.name: value for each, value in values if value or value != _default(each)}


def _default(declared: Field[Any]) -> object:
    """Returns the default of a field; MISSING if it has none."""
    factory = declared.default_factory
    return declared.default if factory is MISSING else factory()


def _from_json(kind: type[_Line], values: Mapping[str, object], where: str) -> _Line:
    known = {each.name: each for each in fields(kind)}
    for key in values:
        if key not in known:
            raise ValueError(f"{where}: key {key!r} is unknown, there are {', '.join(known)}")
    for key, each in known.items():
        if key not in values and _default(each) is MISSING:
            raise ValueError(f"{where}: key {key!r} is missing")
    hints = _HINTS[kind]
    return kind(**{key: _field(known[key], hints[key], values[key], where) for key in values})


def _field(declared: Field[Any], hint: Any, value: object, where: str) -> Any:
    try:
        return _convert(hint, value)
    except TypeError:
        name, expected = declared.name, declared.type
        raise ValueError(
            f"{where}: {name} must be of type {expected}, got {shortened(value)}"
        ) from None
    except OverflowError:
        raise ValueError(
            f"{where}: {declared.name} must be between -2^63 and 2^63 - 1, and finite, got "
            f"{shortened(value)}"
        ) from None


def _convert(hint: Any, value: object) -> object:
    """Returns a JSON value as the type of a field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else _convert(arguments[0], value)
    if origin is tuple and isinstance(value, list):
        if _are_floats(arguments[0], value):
            return tuple(value)
        return tuple(_convert(arguments[0], each) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _convert(arguments[1], each) for key, each in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError
    if (hint is int and not -(2**63) <= value < 2**63) or (  # type: ignore[operator]
        hint is float and not math.isfinite(value)  # type: ignore[arg-type]
    ):
        raise OverflowError
    return value


def _are_floats(hint: Any, values: list[object]) -> bool:
    """Returns whether no value of a list needs a conversion: most lists, in a long record."""
    if hint is not float and float not in get_args(hint):
        return False
    kinds = set(map(type, values))
    if kinds == {float}:
        return all(map(math.isfinite, values))  # type: ignore[arg-type]
    return hint is not float and kinds == {NoneType}


def _check_range(where: str, name: str, values: Sequence[float | None]) -> None:
    for value in values:
        if value is not None and not 0 <= value <= _LARGEST:
            raise ValueError(f"{where}: {name} must be between 0 and {_LARGEST:g}, got {value!r}")


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else repr(value)
