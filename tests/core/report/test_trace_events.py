"""The trace of a run, against the rules of the trace-event format, and against its record."""

import json
import math
from collections import defaultdict

import pytest
from report_runs import header, line, push, save
from typer.testing import CliRunner

from lbbsp_core.cli.app import application
from lbbsp_core.report.trace_events import trace_events, write_trace
from lbbsp_core.runtime.record.events import EventLine, Stop
from lbbsp_core.runtime.record.record import Run, read_run
from lbbsp_core.runtime.record.writer import RunRecord

NUMBER = (int, float)


def checked(path):
    """Reads a trace as viewers do, checks each event by the rules of the format, and returns them.

    Rules: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    trace = json.loads(path.read_text("utf-8"), parse_constant=pytest.fail)
    assert trace.keys() == {"displayTimeUnit", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named, ends = set(), defaultdict(float)
    for event in trace["traceEvents"]:
        track = event["pid"], event["tid"]
        assert all(type(each) is int and each > 0 for each in track), "0 is the idle process"
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event.keys() == {"ph", "name", "pid", "tid", "args"}
            key = {"thread_sort_index": "sort_index"}.get(event["name"], "name")
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            assert list(event["args"]) == [key]
            named.add((event["name"], *track))
            continue
        assert isinstance(event["ts"], NUMBER)
        assert 0 <= event["ts"] < math.inf
        assert ("process_name", event["pid"], 1) in named
        common = {"ph", "name", "pid", "tid", "ts", "args"}
        if event["ph"] == "X":
            assert event.keys() == common | {"dur", "cat"}
            assert event["dur"] >= 0
            assert event["ts"] >= ends[track] - 1e-3, "slices of a track follow each other"
            ends[track] = event["ts"] + event["dur"]
            assert ("thread_name", *track) in named
        elif event["ph"] == "C":
            assert event.keys() == common
            assert all(isinstance(each, NUMBER) for each in event["args"].values())
        else:
            assert event.keys() == common | {"s"}
            assert (event["ph"], event["s"]) == ("i", "g")
    return trace["traceEvents"]


def written(run, folder):
    count = write_trace(run, folder / "deep" / "trace.json")
    events = checked(folder / "deep" / "trace.json")
    assert len(events) == count
    assert [each.name for each in (folder / "deep").iterdir()] == ["trace.json"]
    return events


def slices(events, rank):
    """Returns names, starts and durations in milliseconds of a worker."""
    return [
        (each["name"], pytest.approx(each["ts"] / 1e3), pytest.approx(each["dur"] / 1e3))
        for each in events
        if each["ph"] == "X" and each["tid"] == 1 + rank
    ]


def test_each_worker_computes_then_waits_then_communicates(tmp_path):
    drivers = {"throttled_percent": (None, 48.0)}
    lines = [
        line(0, (8, 8), (0.1, 0.4), 0.5, time=1000.5, excluded=(0,)),
        line(1, (12, 4), (0.2, 0.2), 0.25, predicted=(0.3, 0.1), time=1002.0, drivers=drivers),
    ]
    known = header(2, 16, started=999.0, hosts=("left", "würfel"), devices=("cpu",))
    end = EventLine(event="finished", time=1003.0)
    events = written(Run(known, lines, events=(end,)), tmp_path)
    assert slices(events, 0) == [
        ("compute", 1000, 100), ("waiting", 1100, 300), ("communication", 1400, 100),
        ("compute", 2750, 200), ("communication", 2950, 50),
    ]  # fmt: skip
    assert slices(events, 1)[:2] == [("compute", 1000, 400), ("communication", 1400, 100)]
    facts = [each["args"] for each in events if each["name"] == "compute"]
    assert facts[0] == {"step": 0, "samples": 8, "busy_seconds": 0.1, "excluded": True}
    assert facts[3]["predicted_seconds"] == 0.1
    counters = [(each["name"], each["args"]) for each in events if each["ph"] == "C"]
    assert counters == [
        ("batch size", {"worker 0": 8, "worker 1": 8}),
        ("batch size", {"worker 0": 12, "worker 1": 4}),
        ("throttled_percent", {"worker 1": 48.0}),
    ]
    assert [(each["name"], each["ts"]) for each in events if each["ph"] == "i"] == [
        ("finished", 4e6)
    ]
    tracks = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    assert tracks == ["worker 0 (left, cpu)", "worker 1 (würfel)"]


def test_a_record_without_times_and_with_wrong_ones(tmp_path):
    lines = [line(k, (8, 8), (0.1, 0.0), 0.2) for k in range(2)]
    lines += [line(2, (8, 8), (0.4, 0.1), 0.2, time=1000.0), line(3, (8, 8), (0.1, 0.1), time=7.0)]
    events = written(Run(header(2, 16), lines), tmp_path)
    assert [name for name, *_ in slices(events, 1)[:2]] == ["not measured", "not measured"]


def test_a_restart_with_other_workers(tmp_path):
    lines = [line(0, (8, 8), (0.1, 0.4), 0.5, time=1000.5)]
    lines += [line(1, (16,), (0.4,), 0.5, time=1010.0, stop="preempted")]
    known = header(1, 16, started=1009.0)
    run = Run(known, lines, starts=2, restarts=(1,), stops=(Stop(0, None), Stop(1, "preempted")))
    events = written(run, tmp_path)
    assert slices(events, 1) == [("compute", 0, 400), ("communication", 400, 100)]
    moments = [(each["name"], each["args"]) for each in events if each["ph"] == "i"]
    assert moments == [("restart", {"step": 1}), ("preempted", {"step": 1})]


def test_ends_and_restarts_that_a_later_start_has_repeated_are_not_shown(tmp_path):
    record = tmp_path / "run.jsonl"
    for steps in (range(5), range(3, 7), range(1, 6), range(4, 8)):
        attempt = RunRecord(record, header(2, 16))
        for k in steps:
            attempt.write(line(k, (8, 8), (0.1, 0.1), 0.2))
        attempt.close()
    events = written(read_run(record), tmp_path)
    moments = [(each["name"], each["args"], each["ts"]) for each in events if each["ph"] == "i"]
    assert moments == [("restart", {"step": k}, pytest.approx(2e5 * k)) for k in (1, 4)]


def test_workers_that_need_not_be_in_the_same_step(tmp_path):
    pushes = [push(k, busy_seconds=0.3, seconds=0.5 + 0.2 * k, staleness=k) for k in range(4)]
    events = written(Run(header(2, 16, sync="SSP(3)"), [], pushes), tmp_path)
    assert slices(events, 0) == [
        ("compute", 200, 300), ("waiting and communication", 500, 100), ("compute", 600, 300)
    ]  # fmt: skip
    assert [each["args"] for each in events if each["ph"] == "C"][-1] == {"worker 1": 3}


def test_the_command_writes_beside_the_record(tmp_path):
    run = Run(header(2, 16), [line(0, (8, 8), (0.1, 0.4))])
    save(tmp_path / "run", run)
    for out, options in (
        ("run/trace.json", []),
        ("new/t.json", ["--out", tmp_path / "new/t.json"]),
    ):
        done = CliRunner().invoke(application(), ["trace", *map(str, [tmp_path / "run", *options])])
        assert done.exit_code == 0, done.output
        assert done.output.startswith("trace of ")
        assert done.output.endswith(f" events written to {tmp_path / out}\n")
        assert checked(tmp_path / out) == json.loads(json.dumps(list(trace_events(run))))


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ValueError, match="at least one step, got none"):
        write_trace(Run(header(2, 16), []), tmp_path / "trace.json")
    for arguments, said in (
        ([tmp_path / "none"], "none"),
        ([tmp_path / "none", "--out", tmp_path], "--out must be a file, but"),
    ):
        done = CliRunner().invoke(application(), ["trace", *map(str, arguments)])
        assert (done.exit_code, said in done.output) == (2, True)
        assert len(done.output.splitlines()) == 1
