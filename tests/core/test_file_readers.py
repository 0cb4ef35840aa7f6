"""Readers of files: whatever a file holds, it is read, or refused by an error that names it."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import header, save

from lbbsp_core import Profile, read_run
from lbbsp_core.report.live import LiveRun
from lbbsp_core.report.summary import summarise
from lbbsp_core.runtime.checkpoint.checkpoint import (
    Checkpoint,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from lbbsp_core.runtime.record.record import Run, StepLine
from lbbsp_core.sim import (
    cluster_from_run,
    load_scenario,
    read_trace,
    replay_trace,
    trace_from_run,
    write_trace,
)

FUZZ = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

NUMBERS = ["9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "-1", "-0.0", "0", "0.5",
           "1e308", "1e-320", "nan", "inf", "-inf", "1e400", "7" * 5000]  # fmt: skip
JUNK = [*NUMBERS, "", " ", "x", "é", "\x00", '"', "[", "null", "true", "[" * 20_000]
LITERALS = st.sampled_from([*NUMBERS, "NaN", "-Infinity", '""', '"x"', "null", "true", "[]", "{}",
                            "[[1]]", '{"a": 1}', "[" * 20_000, "1979-05-27"])  # fmt: skip
PLACE = "\N{PLACE OF INTEREST SIGN}"
"""Stands for a value, until it is replaced by a literal that the JSON encoder does not write."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths to all values in a document."""
    yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from places(each, (*path, key))


@st.composite
def documents(draw: st.DrawFn, valid: Any, render: Callable[[Any], str] = json.dumps) -> str:
    """Draws texts of a document in which one value is missing, or replaced by another one."""
    *path, last = draw(st.sampled_from([path for path in places(valid) if path]))
    changed = copy.deepcopy(valid)
    holder = changed
    for key in path:
        holder = holder[key]
    if draw(st.integers(0, 3)) == 0:
        del holder[last]
        return render(changed)
    holder[last] = PLACE
    return render(changed).replace(json.dumps(PLACE), draw(LITERALS))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Draws contents of a file that was cut off or changed, or of another kind."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=200))
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(len(data), start + 9)))
    junk = draw(st.one_of(st.binary(max_size=4), st.sampled_from([j.encode() for j in JUNK])))
    return data[:start] + junk + data[end:]


def refusal(path: Path, read: Callable[[], object]) -> str | None:
    """Reads a file; returns the message of the `ValueError`, which names the file, or None."""
    message = None
    try:
        read()
    except ValueError as error:
        message = str(error)
    assert message is None or str(path) in message
    return message


# Run records

HEADER = {"schema": 2, "framework": "none", "workers": 2, "global_batch_size": 12, "seed": 3,
          "drivers": ["load"], "versions": {"none": "1"}}  # fmt: skip
STEPS = [
    {"step": step, "sizes": [8, 4], "busy_seconds": [0.25, 0.5], "predicted_seconds": [0.2, None],
     "wall_seconds": 0.75, "excluded": [], "drivers": {"load": [0.5, None]}}
    for step in range(8)
]  # fmt: skip
PUSH = {"push": 0, "worker": 1, "iteration": 0, "samples": 6, "busy_seconds": 0.5, "seconds": 1.0,
        "staleness": 0, "lead": 0}  # fmt: skip
RECORD = [HEADER, *STEPS, PUSH]


def as_lines(document: list[Any]) -> str:
    return "\n".join(map(json.dumps, document)) + "\n"


def use_record(path: Path) -> None:
    run = read_run(path)
    with suppress(ValueError):  # of a run that is too short, for example
        summarise(run)
    with suppress(ValueError):
        cluster_from_run(path)
    with suppress(ValueError):
        write_trace(path.with_suffix(".csv"), trace := trace_from_run(path))
        written = read_trace(path.with_suffix(".csv"))
        assert [own.measurements for own in written.series] == [
            own.measurements for own in trace.series
        ]


# Traces

TRACE = "worker,step,samples,busy_seconds,load\n" + "".join(
    f"{worker},{step},32,0.5,{worker}\n" for step in range(6) for worker in range(2)
)


@st.composite
def traces(draw: st.DrawFn) -> str:
    """Draws texts of a trace in which one cell is another one."""
    lines = [text.split(",") for text in TRACE.splitlines()]
    lines[draw(st.integers(1, 12))][draw(st.integers(0, 4))] = draw(st.sampled_from(JUNK))
    return "\n".join(map(",".join, lines))


# Profiles

PROFILE = {
    "schema": 1,
    "device": "none",
    "points": [{"batch": b, "seconds": b / 64, "repeats": 1} for b in (1, 2, 4)],
    "out_of_memory_at": 8,
    "fits": {},
    "best": None,
}


def use_profile(path: Path) -> None:
    cost = Profile.load(path)
    assert np.isfinite(cost(np.array([1.0, 3.0, 1e6]))).all()
    assert cost.at_speed(100.0).limits() == cost.limits()


# Scenarios

SCENARIO = {
    "workers": 3,
    "steps": 40,
    "seed": 1,
    "global_batch_size": 96,
    "samples_per_second": 64.0,
    "overhead_seconds": 0.5,
    "speeds": [1, 0.5, 1],
    "steps_per_epoch": 10,
    "noise": {"kind": "dbs", "epochs": [1, 2], "seconds": [0.5, 1.0]},
    "communication": {"kind": "parameter-server", "bytes": 8, "bytes_per_second": 4, "servers": 2},
    "preemption": {"mean_up_seconds": 3.0, "mean_down_seconds": 1.0, "seed": 2},
}


def as_toml(table: dict[str, Any]) -> str:
    tables = [name for name, value in table.items() if isinstance(value, dict)]
    lines = [f"{k} = {json.dumps(v)}" for k, v in table.items() if k not in tables]
    for name in tables:
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table[name].items())]
    return "\n".join(lines)


# What is read, or refused

USES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "run.jsonl": (as_lines([HEADER, *STEPS[:2]]), use_record),
    "trace.csv": (TRACE, lambda path: replay_trace(read_trace(path))),
    "profile.json": (json.dumps(PROFILE), use_profile),
    "cluster.toml": (as_toml(SCENARIO), lambda path: load_scenario(str(path))),
}
"""A valid text for each name of a file, and what reads it."""
CHANGED: dict[str, st.SearchStrategy[str]] = {
    "run.jsonl": documents(RECORD, as_lines),
    "trace.csv": traces(),
    "profile.json": documents(PROFILE),
    "cluster.toml": documents(SCENARIO, as_toml),
}
PLACES = {"run.jsonl": " line |is empty", "trace.csv": "line|cannot be read as a CSV text file"}
"""What messages say of a value beside the name of the file."""


@pytest.mark.parametrize("name", USES)
@FUZZ
@given(data=st.data())
def test_files_with_other_values(tmp_path: Path, name: str, data: st.DataObject) -> None:
    path = tmp_path / name
    path.write_text(data.draw(CHANGED[name]), encoding="utf-8")
    message = refusal(path, lambda: USES[name][1](path))
    assert message is None or re.search(PLACES.get(name, ""), message)


@pytest.mark.parametrize("name", USES)
@FUZZ
@given(data=st.data())
def test_damaged_files(tmp_path: Path, name: str, data: st.DataObject) -> None:
    path = tmp_path / name
    text, use = USES[name]
    path.write_bytes(data.draw(damaged(text.encode())))
    refusal(path, lambda: use(path))


@pytest.mark.parametrize("name", ["none.toml", "x" * 5000 + ".toml", "a\x00b.toml", "."])
def test_scenarios_that_are_no_files(name: str) -> None:
    with pytest.raises(ValueError):
        load_scenario(name)


# Checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("checkpoint")
    arrays = {"weights": np.arange(4.0), "names": np.array(["a", "b"])}
    return write_checkpoint(folder, Checkpoint(3, {"seed": 1}, {"a": [1]}, arrays)).read_bytes()


@pytest.mark.parametrize("seed", range(6))
def test_damaged_checkpoints(tmp_path: Path, checkpoint: bytes, seed: int) -> None:
    draw = random.Random(seed)
    path = tmp_path / "step-000000003.npz"
    for _ in range(60):
        start = draw.randrange(len(checkpoint))
        end = draw.choice([start, start + 1, start + draw.randrange(40), len(checkpoint)])
        path.write_bytes(checkpoint[:start] + draw.randbytes(draw.randrange(3)) + checkpoint[end:])
        if path.read_bytes() != checkpoint:
            # A changed byte in the archive's own fields, such as a date, changes nothing.
            message = refusal(path, lambda: read_checkpoint(path))
            assert message is None or "damaged or no checkpoint" in message
            assert (message is None) or "no complete" in refusal(
                tmp_path, lambda: newest_checkpoint(tmp_path)
            )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """The documents above are valid: what is refused is what was changed."""
    (tmp_path / "run.jsonl").write_text(as_lines(RECORD))
    assert len(read_run(tmp_path).steps) == len(STEPS)
    (tmp_path / "trace.csv").write_text(TRACE)
    assert len(read_trace(tmp_path / "trace.csv").series) == 2
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    assert Profile.load(tmp_path / "profile.json").batches == (1, 2, 4)
    (tmp_path / "cluster.toml").write_text(as_toml(SCENARIO))
    assert load_scenario(str(tmp_path / "cluster.toml")).size == 3
    save(tmp_path / "new", Run(header(2, 12), [StepLine(**{**STEPS[0], "sizes": (8, 4)})]))
    assert len(read_run(tmp_path / "new").steps) == 1


READERS = {
    "run.jsonl": read_run,
    "trace.csv": read_trace,
    "scenario.toml": lambda path: load_scenario(str(path)),
    "profile.json": Profile.load,
    "step-000000001.npz": lambda path: newest_checkpoint(path.parent),
    "live/run.jsonl": lambda path: LiveRun(path).read(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_a_device_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(path)
        with pytest.raises((OSError, ValueError), match="it is no regular file"):
            READERS[name](path)
        path.unlink()


def test_a_file_may_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "trace.csv").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="has 1,099,511,627,776 bytes, more than 2,147,483,648"):
        read_trace(tmp_path / "trace.csv")
    monkeypatch.setenv("LBBSP_LARGEST_FILE", "3")
    (tmp_path / "s.toml").write_text("steps = 3")
    with pytest.raises(ValueError, match="bytes, more than 3: if that is right, set LBBSP_LARGEST"):
        load_scenario(str(tmp_path / "s.toml"))
