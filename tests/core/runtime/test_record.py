"""The run record: whole after every line, and read back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import RunRecord, read_run
from lbbsp_core.sim.from_run import cluster_from_run

STEP: dict[str, Any] = {
    "sizes": (8, 4),
    "busy_seconds": (0.1, 0.0),
    "predicted_seconds": (0.25, None),
    "wall_seconds": 0.3,
}


def write(path: Path, steps: int = 3) -> None:
    record = RunRecord(path, {"workers": 2, "lag": 1})
    for step in range(steps):
        record.step(step, **STEP)
    record.close()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "run.jsonl"
    record = RunRecord(path, {"workers": 2, "policy": "LoadBalanced()"})
    record.step(0, **STEP)
    record.step(1, **STEP, excluded=(1,), short=True)
    record.close()
    run = read_run(path)
    assert run.header == {"schema": 1, "workers": 2, "policy": "LoadBalanced()"}
    line = {name: list(value) if name != "wall_seconds" else value for name, value in STEP.items()}
    assert run.steps == [
        {"step": 0, **line, "excluded": []},
        {"step": 1, **line, "excluded": [1], "short": True},
    ]
    assert read_run(path.parent) == run, "or the folder that holds it"
    assert record.path == path


def test_the_file_is_whole_after_every_line(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run.jsonl", {"workers": 2})
    for step in range(3):
        assert len(read_run(tmp_path).steps) == step
        record.step(step, **STEP)
    record.close()


def test_a_record_replaces_an_older_one(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", steps=5)
    write(tmp_path / "run.jsonl", steps=2)
    assert [line["step"] for line in read_run(tmp_path).steps] == [0, 1]


@given(cut=st.integers(0, 400))
def test_a_run_cut_off_anywhere_reads_up_to_there(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    write(path, steps=3)
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
    write(path)
    lines = path.read_text().splitlines()
    lines[torn - 1] = lines[torn - 1][:-5]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"run\.jsonl line {torn} is not JSON"):
        read_run(path)


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.touch()
    with pytest.raises(ValueError, match=r"run\.jsonl is empty: the run has not begun"):
        read_run(path)


@pytest.mark.parametrize("header", [{"schema": 2}, {}, {"schema": "1"}, [1], 5, None])
def test_another_schema(tmp_path: Path, header: Any) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(ValueError, match=r"line 1: schema must be 1, got"):
        read_run(path)


def test_no_record_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path / "run.jsonl")


def test_steady_state_is_the_last_half_without_odd_steps(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run.jsonl", {})
    for step in range(10):
        record.step(step, **STEP, excluded=(0,) if step == 6 else (), short=step == 8)
    record.close()
    assert [line["step"] for line in read_run(tmp_path).last_half()] == [5, 7, 9]


def test_a_run_of_odd_steps_only_has_a_last_half_too(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run.jsonl", {})
    for step in range(4):
        record.step(step, **STEP, excluded=(0, 1))
    record.close()
    assert [line["step"] for line in read_run(tmp_path).last_half()] == [2, 3]


def test_pushes_are_read_back_apart_from_steps(tmp_path: Path) -> None:
    line: dict[str, Any] = {
        "worker": 2,
        "iteration": 5,
        "samples": 16,
        "busy_seconds": 0.25,
        "seconds": 3.5,
        "staleness": 4,
        "lead": 1,
    }
    record = RunRecord(tmp_path / "run.jsonl", {"workers": 3})
    record.push(7, **line)
    record.close()
    run = read_run(tmp_path)
    assert run.pushes == [{"push": 7, **line}]
    assert run.steps == []
    with pytest.raises(ValueError, match="records pushes of workers that were not in step"):
        cluster_from_run(tmp_path)
