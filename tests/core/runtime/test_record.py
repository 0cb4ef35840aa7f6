"""The run record: whole after every line, and read back as it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import line as step_line
from waits import HANG_SECONDS

from lbbsp_core import Even, RunRecord, read_run
from lbbsp_core.report.summary import summarise
from lbbsp_core.runtime.record import writer
from lbbsp_core.runtime.record.events import EventLine
from lbbsp_core.runtime.record.record import (
    PREEMPTED,
    PUSH_INTEGERS,
    REQUESTED,
    Line,
    PushLine,
    Run,
    RunHeader,
    StepLine,
    run_header,
)
from lbbsp_core.runtime.record.writer import open_record
from lbbsp_core.sim.from_run import cluster_from_run

pytestmark = pytest.mark.usefixtures("patient")
HEADER = RunHeader(framework="none", workers=2, global_batch_size=12, versions={"none": "1.2"})
STEP = replace(step_line(0, (8, 4), (0.1, 0.0), 0.3), predicted_seconds=(0.25, None))
PUSH = PushLine(push=7, worker=2, iteration=5, samples=16, busy_seconds=0.25, seconds=3.5,
                staleness=4, lead=1, parts=3)  # fmt: skip


def steps(*numbers: int, **changes: Any) -> list[StepLine]:
    """Lines of steps."""
    return [replace(STEP, step=number, **changes) for number in numbers]


def write(path: Path, lines: Iterable[Line], header: RunHeader = HEADER) -> None:
    """Writes the record of a run, or of a further start of it."""
    record = RunRecord(path, header)
    for line in lines:
        record.write(line)
    record.close()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "run.jsonl"
    header = replace(HEADER, started=1.5e9, hosts=("a", "b"), devices=("cpu", "GPU:0"))
    drivers = {"runnable": (3.0, 1.0), "gpu_percent": (None, 97.25)}
    lines = [
        replace(STEP, time=1.5e9 + 0.25),
        replace(STEP, step=1, excluded=(1,), short=True, drivers=drivers),
    ]
    write(path, lines, header)
    assert read_run(path) == Run(header, lines)
    assert read_run(path.parent) == Run(header, lines), "or the folder that holds it"


def test_the_lines_as_other_programs_read_them(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, [STEP, replace(STEP, step=1, excluded=(1,), short=True), PUSH])
    header, first, second, push = map(json.loads, path.read_text().splitlines())
    assert header == {
        "schema": 2, "framework": "none", "workers": 2, "global_batch_size": 12,
        "versions": {"none": "1.2"},
    }  # fmt: skip
    line = {
        "sizes": [8, 4], "busy_seconds": [0.1, 0.0], "predicted_seconds": [0.25, None],
        "wall_seconds": 0.3,
    }  # fmt: skip
    assert first == {"step": 0, **line, "excluded": []}
    assert second == {"step": 1, **line, "excluded": [1], "short": True}
    assert push == {
        "push": 7, "worker": 2, "iteration": 5, "samples": 16, "busy_seconds": 0.25,
        "seconds": 3.5, "staleness": 4, "lead": 1, "parts": 3,
    }  # fmt: skip


def test_the_header_of_a_run(tmp_path: Path) -> None:
    header = run_header(
        "none", workers=2, global_batch_size=12, num_samples=0, seed=3, lag=2, policy=Even(),
        sync="asp", drivers=["runnable"], versions={"none": "1.2"},
    )  # fmt: skip
    assert (header.policy, header.sync, header.predictor) == ("Even()", "asp", None)
    assert header.versions.keys() == {"lbbsp", "none", "python"}
    open_record(tmp_path, header).close()
    assert read_run(tmp_path).header == header


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    record = RunRecord(tmp_path / "run.jsonl", HEADER)
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.write(replace(STEP, wall_seconds=value))
    record.close()


def test_the_file_is_whole_after_every_line(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run.jsonl", HEADER)
    assert record.path == tmp_path / "run.jsonl"
    for step in range(3):
        assert len(read_run(tmp_path).steps) == step
        record.write(replace(STEP, step=step))
    record.close()


def test_another_run_in_the_same_folder_counts_from_its_first_step(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", steps(*range(5)))
    write(tmp_path / "run.jsonl", steps(*range(2)))
    run = read_run(tmp_path)
    assert [line.step for line in run.steps] == [0, 1]
    assert run.starts == 2
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2 + 5 + 2


def test_after_a_restart_the_last_attempt_of_a_step_counts(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", steps(*range(5)))
    write(tmp_path / "run.jsonl", steps(3, 4, 5, wall_seconds=9.0), replace(HEADER, lag=2))
    run = read_run(tmp_path)
    assert [line.step for line in run.steps] == [0, 1, 2, 3, 4, 5]
    assert [line.wall_seconds for line in run.steps] == [0.3] * 3 + [9.0] * 3
    assert run.header.lag == 2
    assert run.restarts == (3,)


def test_stops_are_the_ends_of_attempts(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, steps(*range(5)))
    assert read_run(path).stops == ()
    for step, stop in ((4, PREEMPTED), (7, REQUESTED)):
        write(path, steps(step, stop=stop))
    assert read_run(path).stops == ((4, None), (4, PREEMPTED), (7, REQUESTED))
    assert [line.stop for line in read_run(path).steps] == [None] * 4 + [PREEMPTED, REQUESTED]
    assert '"stop"' not in path.read_text().splitlines()[1], "left out where nothing stopped"


ENDS = {
    "pass": ["finished"],
    "record.close()": [],
    "sys.exit(3)": ["failed"],
    "1 / 0": ["failed"],
    "raise KeyboardInterrupt": ["interrupted"],
    "end_now(1)": ["failed"],
    "end_now(143)": ["interrupted"],
    "os._exit(0)": [],
    "os.fork()": ["finished"],
    "on_exit(lambda: 1 / 0)": ["failed"],  # in a process that waits there for its peers
}


@pytest.mark.slow
def test_the_end_of_the_process_is_that_of_the_run(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom lbbsp_core.runtime.reliability import exit\n"
        f"exit._PATIENCE_SECONDS = {HANG_SECONDS}\n"
        "from lbbsp_core.runtime.reliability.exit import *\n"
        "from lbbsp_core.runtime.record.record import run_header\n"
        "from lbbsp_core.runtime.record.writer import open_record\n"
        "fail_fast()\n"
        "header = run_header('none', workers=1, global_batch_size=1, versions={})\n"
        "record = open_record(sys.argv[1], header)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script + end, str(tmp_path / str(number))])
        for number, end in enumerate(ENDS)
    ]
    for process in processes:
        process.wait(HANG_SECONDS)
    runs = [read_run(tmp_path / str(number)) for number in range(len(ENDS))]
    assert [[each.event for each in run.events] for run in runs] == list(ENDS.values())
    assert all(each.time >= (run.header.started or 0) for run in runs for each in run.events)


def test_events_are_those_since_the_last_start(tmp_path: Path) -> None:
    for step in (0, 1):
        record = RunRecord(tmp_path / "run.jsonl", HEADER)
        record.write(EventLine(event="planned", steps=2, time=1e9 + step))
        record.write(replace(STEP, step=step))
        record.end(1 - step)
        record.close()
    run = read_run(tmp_path)
    assert [line.step for line in run.steps] == [0, 1]
    assert run.restarts == (1,)
    assert [(each.event, each.steps) for each in run.events] == [("planned", 2), ("finished", None)]


def test_repeated_pushes_count_once(tmp_path: Path) -> None:
    for first in (0, 2):
        pushes = [replace(PUSH, push=push, lead=first) for push in range(first, 4)]
        write(tmp_path / "run.jsonl", pushes)
    assert [(line.push, line.lead) for line in read_run(tmp_path).pushes] == [
        (0, 0), (1, 0), (2, 2), (3, 2),
    ]  # fmt: skip


def test_a_restart_ends_the_line_that_was_being_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, steps(*range(3)))
    path.write_bytes(path.read_bytes()[:-9])
    write(path, steps(2))
    assert [line.step for line in read_run(path).steps] == [0, 1, 2]
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[1][:-9], *lines[2:]]))
    with pytest.raises(ValueError, match=r"line 3 is not JSON"):
        read_run(path)


def test_a_restart_with_other_workers(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", steps(*range(4)))
    alone = steps(2, 3, 4, 5, sizes=(12,), busy_seconds=(0.2,), predicted_seconds=(None,))
    write(tmp_path / "run.jsonl", alone, replace(HEADER, workers=1))
    run = read_run(tmp_path)
    assert [len(line.sizes) for line in run.steps] == [2, 2, 1, 1, 1, 1]
    assert [line.step for line in run.with_same_workers()] == [2, 3, 4, 5]
    assert [line.step for line in run.last_half()] == [4, 5]
    assert summarise(run).busy_seconds == (0.2,)


# A record that cannot be written


def unwritable(folder: Path, how: str) -> Path:
    path = folder / "deep" / "run.jsonl"
    if how == "a name that no file can have":
        return folder / "\0"
    if how == "a file in place of the folder":
        path.parent.write_text("")
        return path
    path.parent.mkdir()
    if how == "full disk":
        path.symlink_to("/dev/full")
    elif how == "a folder in place of the file":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    "how",
    [
        *("full disk", "a file in place of the folder", "a folder in place of the file"),
        "a name that no file can have",
    ],
)
def test_a_record_that_cannot_be_written_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    path = unwritable(tmp_path, how)
    write(path, steps(*range(3)))
    [message] = caplog.messages
    assert f"the run record {path} cannot be written" in message
    assert "the training continues without it" in message


def test_a_record_is_closed_when_its_warning_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings = []

    def slowly(*text: object) -> None:
        time.sleep(0.3)
        warnings.append(text)

    monkeypatch.setattr(writer.logger, "warning", slowly)
    write(unwritable(tmp_path, "a folder in place of the file"), steps(0))
    assert len(warnings) == 1


def test_a_record_that_is_removed_during_the_run_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = RunRecord(tmp_path / "run" / "run.jsonl", HEADER)
    shutil.rmtree(tmp_path / "run")
    for step in range(3):
        record.write(replace(STEP, step=step))
    record.close()
    [message] = caplog.messages
    assert "cannot be written (it has been removed): the training continues" in message


def test_a_record_that_takes_nothing_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_PATIENCE_SECONDS", 0.2)
    os.mkfifo(tmp_path / "run.jsonl")  # which nobody reads
    record = RunRecord(tmp_path / "run.jsonl", HEADER)
    for step in range(5000):
        record.write(replace(STEP, step=step))
    record.end(0)
    record.close()
    [message] = caplog.messages
    assert "cannot be written (it takes nothing): the training con" in message
    descriptor = os.open(tmp_path / "run.jsonl", os.O_RDONLY)
    while record._thread.is_alive():
        os.read(descriptor, 1 << 16)
    os.close(descriptor)


def test_a_disk_that_fills_up_leaves_the_lines_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord(tmp_path / "run.jsonl", HEADER)
    record.write(STEP)
    whole, room = os.write, [7]

    def almost_full(descriptor: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(descriptor, data[: room.pop()])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", almost_full)
        for step in (1, 2):
            record.write(replace(STEP, step=step))
    record.write(replace(STEP, step=3))
    record.close()
    [message] = caplog.messages
    assert "No space left on device" in message
    assert [line.step for line in read_run(tmp_path).steps] == [0]


def test_a_record_that_another_job_still_writes_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = RunRecord(tmp_path / "run.jsonl", HEADER)
    if (child := os.fork()) == 0:
        second = RunRecord(tmp_path / "run.jsonl", HEADER)
        second.write(STEP)
        os._exit(len(caplog.messages))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    same_process = RunRecord(tmp_path / "run.jsonl", HEADER)  # another model, after the first one
    first.write(STEP)
    same_process.close()
    first.close()
    run = read_run(tmp_path)
    assert (run.starts, len(run.steps)) == (3, 1)
    assert not caplog.messages


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:5]))
    write(tmp_path / "run.jsonl", steps(*range(2)))
    assert len(read_run(tmp_path).steps) == 2


def test_the_umask_is_respected(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "run.jsonl", [STEP])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.jsonl").stat().st_mode) == 0o640


@given(cut=st.integers(0, 400))
def test_a_run_cut_off_anywhere_reads_up_to_there(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    write(path, steps(*range(3)))
    whole = path.read_text()
    text = whole[: min(cut, len(whole))]
    path.write_text(text)
    complete = text.count("\n")
    lines = text.split("\n")
    if complete == 0 and lines[0] != whole.split("\n", 1)[0]:
        with pytest.raises(ValueError, match=r"is empty|line 1 is not JSON"):
            read_run(path)
    else:
        assert len(read_run(path).steps) in (complete - 1, complete)


@pytest.mark.parametrize("torn", [1, 2, 3])
def test_a_torn_line_elsewhere_is_named(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "run.jsonl"
    write(path, steps(0, 1, 2))
    lines = path.read_text().splitlines()
    lines[torn - 1] = lines[torn - 1][:-5]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"run\.jsonl line {torn} is not JSON"):
        read_run(path)


SCHEMAS = [{"schema": 3}, {}, {"schema": "2"}, {"schema": True}, [2], 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"run\.jsonl is empty: the run has not started"),
        ('{"schema": 1, "workers": 2}\n', r"older lbbsp \(schema 1\): record the run again"),
        *((f"{json.dumps(each)}\n", "line 1: schema must be 2, got") for each in SCHEMAS),
    ],
)
def test_a_file_that_is_no_record_of_this_version(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(path)


@pytest.mark.parametrize(
    ("line", "changes", "words"),
    [
        (1, {"workers": None}, "line 1: key 'workers' is missing"),
        (1, {"workers": 2.5}, "line 1: workers must be of type int, got 2.5"),
        (1, {"workers": True}, "line 1: workers must be of type int, got True"),
        (1, {"seed": "0"}, r"line 1: seed must be of type int \| None, got '0'"),
        (1, {"versions": {"none": 1}}, r"line 1: versions must be of type Mapping\[str, str\]"),
        (1, {"drivers": "runnable"}, r"line 1: drivers must be of type tuple\[str, ...\]"),
        (1, {"sped": 1}, "line 1: key 'sped' is unknown, there are schema, framework"),
        (2, {"excluded": None}, "line 2: key 'excluded' is missing"),
        (2, {"held": []}, "line 2: key 'held' is unknown"),
        (2, {"sizes": [8, 4.0]}, r"line 2: sizes must be of type tuple\[int, ...\]"),
        (2, {"busy_seconds": [0.1, "0"]}, "line 2: busy_seconds must be of type tuple"),
        (2, {"short": 1}, "line 2: short must be of type bool, got 1"),
        (2, {"step": None}, "line 2 must be an object with the key step, push or event, got"),
        (2, {"sizes": [8]}, "line 2: sizes must have a value for each worker, got 1 values"),
        (2, {"drivers": {"runnable": [1]}}, "line 2: drivers 'runnable' must have a"),
        (2, {"drivers": {"runnable": [1, "2"]}}, "line 2: drivers must be of type Mapping"),
        (2, {"step": -1}, "line 2: step must be between 0 and 1e.15, got -1"),
        (2, {"step": 2**63}, "line 2: step must be between -2.63 and"),
        (2, {"wall_seconds": float("inf")}, "line 2 is not JSON: Infinity is not a finite"),
        (2, {"wall_seconds": 10**400}, "line 2: wall_seconds must be between .*000..."),
        (1, {"workers": 0}, "line 1: workers must be between 1 and 1000000, got 0"),
        (1, {"workers": 10**8}, "line 1: workers must be between 1 and 1000000, got 10"),
        (3, {"seconds": "3.5"}, "line 3: seconds must be of type float, got '3.5'"),
        (3, {"lead": None}, "line 3: key 'lead' is missing"),
    ],
)
def test_errors_name_file_line_and_key(
    tmp_path: Path, line: int, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "run.jsonl"
    write(path, [STEP, PUSH])
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for key, value in changes.items():
        if value is None:
            del lines[line - 1][key]
        else:
            lines[line - 1][key] = value
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(ValueError, match=r"run\.jsonl " + words):
        read_run(tmp_path)


def test_whole_numbers_are_seconds_too(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", steps(0, wall_seconds=1))
    assert type(read_run(tmp_path).steps[0].wall_seconds) is float


def test_no_record_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path / "run.jsonl")


def test_steady_state_is_the_last_half_without_odd_steps(tmp_path: Path) -> None:
    lines = [*steps(*range(6)), *steps(6, excluded=(0,)), *steps(7), *steps(8, short=True)]
    write(tmp_path / "run.jsonl", [*lines, *steps(9)])
    assert [line.step for line in read_run(tmp_path).last_half()] == [5, 7, 9]


def test_a_run_of_odd_steps_only_has_a_last_half_too(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", steps(*range(4), excluded=(0, 1)))
    assert [line.step for line in read_run(tmp_path).last_half()] == [2, 3]


def test_pushes_are_read_back_apart_from_steps(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", [PUSH], replace(HEADER, workers=3))
    run = read_run(tmp_path)
    assert run.pushes == [PUSH]
    assert run.steps == []
    with pytest.raises(ValueError, match=r"records pushes, not steps, as .* also with BSP: "):
        cluster_from_run(tmp_path)


def test_a_push_in_integers() -> None:
    values = PUSH.to_integers()
    assert values == [7, 2, 5, 16, 250_000_000, 3_500_000, 4, 1, 3]
    assert len(values) == PUSH_INTEGERS
    assert all(type(value) is int for value in values)
    with pytest.raises(ValueError, match="a push consists of 9 integers, got 8"):
        PushLine.from_integers(values[1:])


@given(values=st.lists(st.integers(0, 2**48), min_size=PUSH_INTEGERS, max_size=PUSH_INTEGERS))
def test_integers_of_a_push_are_exact(values: list[int]) -> None:
    line = PushLine.from_integers(values)
    assert line.to_integers() == values
    assert PushLine.from_integers(line.to_integers()) == line
