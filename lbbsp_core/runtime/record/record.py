"""Run record ``run.jsonl``: a header line, then one JSON line per step, push or event.

Rank 0 writes it. Keys are the field names of `RunHeader`, `StepLine`, `PushLine` and `EventLine`; a
field that is empty by default is left out while it is empty. Times are in seconds and always
finite. A run that starts again appends another header line and the lines that follow.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from lbbsp_core._version import __version__
from lbbsp_core.files import read_regular
from lbbsp_core.runtime.record.events import EventLine, Stop
from lbbsp_core.runtime.record.json_lines import from_json
from lbbsp_core.validate import parse_json, shortened

_Line = TypeVar("_Line")

SCHEMA: Final = 2

REQUESTED: Final = "requested"
"""A worker asked all of them to stop: the script, or a callback in the middle of an epoch."""

PREEMPTED: Final = "preempted"
"""A worker had to leave, after SIGTERM: all of them saved a checkpoint."""

_MOST_WORKERS: Final = 1_000_000
"""A file that claims more is damaged; views have a row for each worker."""

_LARGEST: Final = 1e15  # sums of smaller numbers are exact, or do not overflow

_UNITS: Final = (1, 1, 1, 1, 10**9, 10**6, 1, 1, 1)
"""Integers for 1 in each field of a `PushLine`: nanoseconds and microseconds for seconds."""


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
        hidden_seconds: Time in which gradients were on their way while the slowest worker computed.
        even_seconds: Estimate of the slowest worker's busy time with even batches, at least, see
            `lbbsp_core.runtime.record.even_batches`; None if not estimated.
        even_seconds_at_most: The same, at most.
        excluded: Ranks whose measurement was excluded from learning: all of them in the first step
            of an epoch, one alone in its first step with a batch size.
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
    hidden_seconds: float = 0.0
    even_seconds: float | None = None
    even_seconds_at_most: float | None = None
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

    def values_of(self, rank: int) -> dict[str, float]:
        """Returns what extensions have recorded of a worker, by name, where it has a value."""
        worker_values = {name: values[rank] for name, values in self.values.items()}
        return {name: value for name, value in worker_values.items() if value is not None}

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
        parts: Parts of the iteration that the worker has claimed, besides its main part.
    """

    push: int
    worker: int
    iteration: int
    samples: int
    busy_seconds: float
    seconds: float
    staleness: int
    lead: int
    parts: int = 0

    def to_integers(self) -> list[int]:
        """Encodes the line for a transport that carries integers only.

        Returns:
            `PUSH_INTEGERS` integers in the order of the fields; ``busy_seconds`` in nanoseconds,
            ``seconds`` in microseconds.

        Example:
            >>> line = PushLine(push=7, worker=2, iteration=5, samples=16, busy_seconds=0.25,
            ...                 seconds=3.5, staleness=4, lead=1)
            >>> line.to_integers()
            [7, 2, 5, 16, 250000000, 3500000, 4, 1, 0]
            >>> PushLine.from_integers(line.to_integers()) == line
            True
        """
        return [round(value * units) for value, units in zip(astuple(self), _UNITS, strict=True)]

    @classmethod
    def from_integers(cls, values: Sequence[int]) -> PushLine:
        """Decodes what `to_integers` returned.

        Raises:
            ValueError: The number of integers is not `PUSH_INTEGERS`.
        """
        if len(values) != PUSH_INTEGERS:
            raise ValueError(f"a push consists of {PUSH_INTEGERS} integers, got {len(values)}")
        triples = zip(fields(cls), values, _UNITS, strict=True)
        named = {attribute.name: x / units if units > 1 else x for attribute, x, units in triples}
        return cls(**named)  # type: ignore[arg-type]


PUSH_INTEGERS: Final = len(_UNITS)
"""Length of `PushLine.to_integers`."""


Line: TypeAlias = StepLine | PushLine | EventLine
"""Line after the header."""


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
        events: What was planned since the last start, and how the run ended, as far as known.
    """

    header: RunHeader
    steps: list[StepLine]
    pushes: list[PushLine] = field(default_factory=list)
    starts: int = 1
    restarts: tuple[int, ...] = ()
    stops: tuple[Stop, ...] = ()
    events: tuple[EventLine, ...] = ()

    def with_same_workers(self) -> list[StepLine]:
        """Returns the steps since the number of workers last changed, in an elastic restart."""
        last = len(self.steps[-1].sizes) if self.steps else 0
        same = takewhile(lambda line: len(line.sizes) == last, reversed(self.steps))
        return list(same)[::-1]

    def last_half(self) -> list[StepLine]:
        """Returns the regular steps of the last half, on which the steady state is measured."""
        steps = self.with_same_workers()
        return counted(steps[len(steps) // 2 :])


def counted(steps: Iterable[StepLine]) -> list[StepLine]:
    """Returns the steps whose figures count: the regular ones, or all if none is regular."""
    steps = list(steps)
    return [line for line in steps if line.is_regular] or steps


def run_header(framework: str, *, versions: Mapping[str, str], **facts: Any) -> RunHeader:
    """Builds the header of a run that starts now, of fields of `RunHeader`.

    Versions of lbbsp and Python are added. Policy, predictor, cost and synchroniser are recorded as
    their repr, a string as it is.
    """
    texts = {
        name: value if isinstance(value, str) else repr(value)
        for name in ("policy", "predictor", "cost", "sync")
        if (value := facts.get(name)) is not None
    }
    names = {name: tuple(facts.get(name, ())) for name in ("drivers", "hosts", "devices")}
    all_versions = {"lbbsp": __version__, **versions, "python": platform.python_version()}
    added_facts = {"framework": framework, "started": time.time(), "versions": all_versions}
    return RunHeader(**{**facts, **texts, **names, **added_facts})


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
    attempts = _attempts(path / "run.jsonl" if path.is_dir() else path)
    lines = [line for _, body in attempts for line in body]
    by_attempt = [[line for line in body if isinstance(line, StepLine)] for _, body in attempts]
    return Run(
        header=attempts[-1][0],
        steps=_last_of_each([line for line in lines if isinstance(line, StepLine)], "step"),
        pushes=_last_of_each([line for line in lines if isinstance(line, PushLine)], "push"),
        starts=len(attempts),
        restarts=tuple(steps[0].step for steps in by_attempt[1:] if steps),
        stops=tuple(
            Stop(steps[-1].step, steps[-1].stop)
            for number, steps in enumerate(by_attempt, start=1)
            if steps and (steps[-1].stop or number < len(attempts))
        ),
        events=tuple(line for line in attempts[-1][1] if isinstance(line, EventLine)),
    )


def _attempts(path: Path) -> list[tuple[RunHeader, list[Line]]]:
    """Returns the header and the lines of each start."""
    texts = read_regular(path).split(b"\n")
    if not texts[-1]:
        texts.pop()
    if not texts:
        raise ValueError(f"{path} is empty: the run has not started, or was not recorded")
    attempts: list[tuple[RunHeader, list[Line]]] = []
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
        if not attempts or is_header(values):
            attempts.append((parse_header(values, where), []))
        else:
            header, lines = attempts[-1]
            lines.append(parse_line(values, where, header.workers))
    if not attempts:
        assert unfinished is not None
        raise unfinished
    return attempts


def _last_of_each(lines: list[_Line], number: str) -> list[_Line]:
    """Returns the lines in the order of their numbers: of a repeated number, the last line."""
    kept: list[_Line] = []
    for line in lines:
        while kept and getattr(kept[-1], number) >= getattr(line, number):
            kept.pop()
        kept.append(line)
    return kept


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
    header = from_json(RunHeader, values, where)
    if not 1 <= header.workers <= _MOST_WORKERS:
        raise ValueError(
            f"{where}: workers must be between 1 and {_MOST_WORKERS}, got {header.workers}"
        )
    return header


def parse_line(values: object, where: str, workers: int | None = None) -> Line:
    """Converts a line that is not a header, read as JSON.

    A step must have a value for each of `workers`, if their number is given.
    """
    if not isinstance(values, dict) or not {"step", "push", "event"} & values.keys():
        raise ValueError(
            f"{where} must be an object with the key step, push or event, got {shortened(values)}"
        )
    if "event" in values:
        return from_json(EventLine, values, where)
    if "push" in values:
        return from_json(PushLine, values, where)
    line = from_json(StepLine, values, where)
    names = ("sizes", "busy_seconds", "predicted_seconds", *["work"] * bool(line.work))
    numbers: dict[str, Sequence[float | None]] = {
        **{name: getattr(line, name) for name in names},
        **{f"drivers {name!r}": row for name, row in line.drivers.items()},
    }
    values_of_extensions = {f"values {name!r}": row for name, row in line.values.items()}
    for name, row in {**numbers, **values_of_extensions}.items():
        if len(row) != (len(line.sizes) if workers is None else workers):
            raise ValueError(
                f"{where}: {name} must have a value for each worker, got {len(row)} values: "
                "remove the line, or record the run again"
            )
    even = "even_seconds", "even_seconds_at_most"
    for name in ("step", "wall_seconds", "hidden_seconds", *even, "time"):
        numbers[name] = (getattr(line, name),)
    for name, row in numbers.items():
        for value in row:
            if value is not None and not 0 <= value <= _LARGEST:
                raise ValueError(
                    f"{where}: {name} must be between 0 and {_LARGEST:g}, got {value!r}"
                )
    return line
