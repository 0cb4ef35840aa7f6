"""The command `lbbsp watch`: one view, views that follow each other, and what a record may hold."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from report_runs import line as step_line
from rich.console import Console
from typer.testing import CliRunner

from lbbsp_core.cli.app import application
from lbbsp_core.cli.watch import follow, render
from lbbsp_core.report.live import LiveRun
from lbbsp_core.runtime.record.events import EventLine
from lbbsp_core.runtime.record.record import PushLine, run_header
from lbbsp_core.runtime.record.writer import RunRecord

START = 1e9  # of the runs

EVIL = "[red]a[/red] \x1b[2J\x07b"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Clock of the views, which tests set: first to 100 seconds after the start."""
    clock = SimpleNamespace(now=START + 100)
    monkeypatch.setattr("lbbsp_core.report.live.time", SimpleNamespace(time=lambda: clock.now))
    return clock


def line(step, busy=(0.1, 0.4)):
    return step_line(step, (8, 8), busy, 0.5, (0.05, 0.2), time=START + step)


def planned(steps):
    return EventLine(event="planned", steps=steps, time=START)


def end(event, time=START):
    return EventLine(event=event, time=time)


def write(path, *lines, workers=2, **names):
    header = run_header("none", workers=workers, global_batch_size=16, versions={}, **names)
    record = RunRecord(path, replace(header, started=START))
    for each in lines:
        record.write(each)
    record.close()


def watch(*args, charset="utf-8"):
    runner = CliRunner(charset=charset)
    return runner.invoke(application(), ["watch", *map(str, args)], env={"COLUMNS": "140"})


def test_without_a_terminal_one_view_is_printed(tmp_path):
    write(tmp_path / "run.jsonl", line(0), line(1), hosts=("left", "right"), devices=("cpu", "gpu"))
    figures = tmp_path / "figures.json"
    result = watch(tmp_path, "--json", figures)
    assert result.exit_code == 0, result.output
    for text in ("left", "gpu", "100.0 ms", "300.0 ms", "60 %", "0.50", "step 1", "2 steps/s"):
        assert text in result.output
    assert "The others wait for worker 1 (right): up to 60 % of a step." in result.output
    for window in ("All steps so far", "The last 20 regular steps"):
        assert (
            f"{window}: waiting for other workers 30.0 %, waiting and communication 50.0 %, "
            "about as fast as with even batches (estimated)."
        ) in " ".join(result.output.split())
    assert "no step for 1 min 39 s: ended, or stuck" in result.output
    assert json.loads(figures.read_text())["slowest"] == 1


def test_hidden_communication_has_room_where_there_is_some(tmp_path):
    write(tmp_path / "run.jsonl", replace(line(0, (0.3, 0.3)), hidden_seconds=0.05))
    shown = watch(tmp_path, "--once").output
    assert "waiting and communication 40.0 %, hidden communication 10.0 %, about as" in shown
    assert "Balanced: no worker waits" in shown


@pytest.mark.parametrize("args", [["--once"], ["--timeout", "0.01"]])
def test_a_run_that_has_not_started_is_named(tmp_path, args):
    result = watch(tmp_path, *args)
    assert result.exit_code == 2
    assert "run.jsonl must be the record of a run that has started" in " ".join(
        result.output.split()
    )


def test_names_in_a_record_are_neither_markup_nor_control_sequences(tmp_path):
    write(tmp_path / "run.jsonl", line(0), hosts=(EVIL, EVIL), devices=(EVIL, EVIL))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=160, color_system=None)
    run = LiveRun(tmp_path)
    assert run.read()
    console.print(render(run.view()))
    text = shown.getvalue()
    assert text.count("[red]a[/red] ?[2J?b") == 5, "in two rows, and in the sentence"
    assert "\x1b[2J" not in text
    assert "\x07" not in text


def test_views_follow_each_other_until_the_user_ends_them(tmp_path):
    path, shown = tmp_path / "run.jsonl", io.StringIO()
    write(path, line(0))
    steps = iter([10, 20])

    def sleep(seconds):
        if (step := next(steps, None)) is None:
            raise KeyboardInterrupt
        write(path, line(step))

    with pytest.raises(KeyboardInterrupt):
        follow(LiveRun(path), Console(file=shown, force_terminal=True, width=120), 1.0, 60.0, sleep)
    assert all(f"step {step}" in shown.getvalue() for step in (0, 10, 20))
    assert "2 restarts" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_command_ends_at_an_interrupt_without_an_error(tmp_path, monkeypatch):
    write(tmp_path / "run.jsonl", line(0))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lbbsp_core.cli.watch.follow", interrupted)
    monkeypatch.setattr(Console, "is_terminal", True)
    result = watch(tmp_path, "--json", tmp_path / "end.json")
    assert (result.exit_code, result.output) == (0, "")
    assert json.loads((tmp_path / "end.json").read_text())["step"] == 0


def test_the_view_has_an_ascii_form(tmp_path):
    write(tmp_path / "run.jsonl", line(0), hosts=("würfel", "b"), devices=("µ", "b"))
    result = watch(tmp_path, "--once", charset="ascii")
    assert result.exit_code == 0, result.output
    assert result.output.isascii()
    for text in (" 60 %", "none: step 0, no step for ", "w\\xfcrfel"):
        assert text in result.output
    assert "würfel" in watch(tmp_path, "--once").output


def shown(path, width, *, encoding="utf-8", rows=None):
    run, stream = LiveRun(path), io.TextIOWrapper(io.BytesIO(), encoding, errors="strict")
    assert run.read()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    console.print(render(run.view(), rows))
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 100])
def test_a_narrow_terminal_shows_all_figures(tmp_path, width, encoding):
    write(tmp_path / "run.jsonl", line(0), hosts=("left", "right"), devices=("cpu, 2 cores",) * 2)
    text = shown(tmp_path, width, encoding=encoding).replace("|", " ")  # of tables in ASCII
    rows = [row.split() for row in text.splitlines()]
    assert ["#", "host", "device", "batch", "busy", "waiting", "forecast"] in rows
    figures = [(row[0], row[1], row[-1]) for row in rows if row.count("ms") == 2]
    assert figures == [("0", "left", "0.50"), ("1", "right", "0.50")]


def test_of_many_workers_the_slowest_are_shown(tmp_path):
    busy = [0.1 + (rank == 31) + 0.01 * (rank == 7) for rank in range(40)]
    write(tmp_path / "run.jsonl", step_line(0, (2,) * 40, busy, 0.5), workers=40)
    text = shown(tmp_path, 80, rows=2)
    rows = [row.split()[0] for row in text.splitlines() if "0.0" in row and "%" in row]
    assert rows == ["31", "7"]
    assert "and 38 more workers, none of which is slower" in text
    assert text.index("The others wait for worker 31") < text.index("forecast"), "seen first"


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ([line(0)], "step 0, no step for 1 min 40 s: ended, or stuck"),
        ([planned(200), line(95)], "96 of 200 steps (48 %), running"),
        ([planned(200), *map(line, range(96))], "96 of 200 steps (48 %), running, 1 min 44 s left"),
        (
            [planned(2), line(0), line(1)],
            "2 of 2 steps (100 %), trained 1 min 39 s ago, but the script has not ended",
        ),
        ([replace(line(1), stop="preempted")], "step 1, stopped after this step: preempted"),
        (
            [replace(line(1), stop="preempted"), end("interrupted")],
            "interrupted 1 min 40 s ago, step 1, stopped after this step: preempted",
        ),
        (
            [replace(line(1), stop="preempted"), line(2)],
            "step 2, no step for 1 min 38 s: ended, or stuck",
        ),
    ],
)
def test_a_view_says_how_far_the_run_is(tmp_path, lines, state):
    write(tmp_path / "run.jsonl", *lines)
    assert watch(tmp_path, "--once").output.splitlines()[0] == f"none: {state}"


@pytest.mark.parametrize(("event", "status"), [("finished", 0), ("failed", 1), ("interrupted", 3)])
def test_the_exit_status_says_how_the_run_ended(tmp_path, event, status):
    path = tmp_path / "run.jsonl"
    write(path, planned(8), line(0), line(1), end(event))
    for options in (["--once"], ["--json", tmp_path / "view.json"]):
        result = watch(path, *options)
        assert result.exit_code == status
        assert f"none: {event} " in result.output
        assert " ago, 2 of 8 steps (25 %)" in result.output
    assert json.loads((tmp_path / "view.json").read_text())["end"] == event
    write(path, line(2))
    assert watch(path, "--once").exit_code == 0, "it was started again"


def test_views_end_with_a_run_that_has_finished(tmp_path):
    write(tmp_path / "run.jsonl", line(0), end("finished", START + 99))
    follow(LiveRun(tmp_path), Console(file=io.StringIO()), 1.0, 60.0, pytest.fail)


def test_after_a_failure_a_restart_is_awaited(tmp_path, clock):
    path, shown, pauses = tmp_path / "run.jsonl", io.StringIO(), []
    write(path, line(0), end("failed", START + 109))  # by another clock

    def sleep(seconds):
        pauses.append(seconds)
        clock.now += 61
        if len(pauses) == 1:
            write(path, line(1))
        if len(pauses) == 3:
            write(path, line(2), end("interrupted", clock.now - 61))

    console = Console(file=shown, force_terminal=True, width=120, color_system=None)
    follow(LiveRun(path), console, 1.0, 60.0, sleep)
    assert pauses == [1.0] * 3
    assert "failed 1 s ago, step 0; a restart is awaited for 1 min 0 s" in shown.getvalue()
    assert "step 1, no step for 2 min 40 s" in shown.getvalue()
    assert "interrupted 1 min 1 s ago, step 2\n" in shown.getvalue().replace("\r", "")


def test_the_cause_of_a_slow_worker_is_named(tmp_path):
    def drivers(**values):
        return {f"{name}_percent": given for name, given in values.items()}

    path = tmp_path / "run.jsonl"
    shared = drivers(throttled=(0.0, 48.2), memory=(95.0, 95.0), cpu_other=(150.0, 155.0))
    write(path, replace(line(0), drivers=shared), hosts=("a", "b"))
    once = watch(path, "--once")
    assert (
        "Worker 1 (b) has 25 % of the speed of the fastest one: it is throttled for 48 % of the "
        "time and its memory is at 95 %."
    ) in once.output
    assert "Worker 0" not in once.output
    assert "other processes" not in once.output, "which the fastest one has, too"
    write(path, replace(line(0, (0.4, 0.4)), drivers=shared))
    assert "of the speed" not in watch(path, "--once").output, "as fast as the other one"


def test_workers_that_are_slowest_in_turn_are_not_named(tmp_path):
    lines = [line(k, (0.1, 0.2) if k % 2 else (0.21, 0.1)) for k in range(10)]
    write(tmp_path / "run.jsonl", *lines)
    result = watch(tmp_path, "--once")
    assert "Workers wait for each other in turn: up to 11 % of a step." in result.output
    assert json.loads(watch(tmp_path, "--json", "-").stdout)["slowest"] is None


def test_pushes_are_no_steps_and_nobody_waits(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, sync="SSP(3)")
    assert "none: no push yet, started " in watch(tmp_path, "--once").output
    pushes = [PushLine(push=k, worker=0, iteration=k, samples=8, busy_seconds=0.25, lead=0,
                       seconds=0.5 * k, staleness=1) for k in range(6)]  # fmt: skip
    write(path, *pushes, sync="SSP(3)")
    shown = watch(tmp_path, "--once").output
    assert "none: push 5, no push for " in shown
    assert "2 pushes/s, 16 samples/s" in shown
    assert "step" not in shown
    assert "waiting yet" not in shown
    columns = [row.split() for row in shown.splitlines() if row[:2] in (" 0", " 1")]
    assert [(row[0], row[-1]) for row in columns] == [("0", "6"), ("1", "0")]
