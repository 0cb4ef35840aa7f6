"""The command `lbbsp watch`: one view, views that follow each other, and what a record may hold."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lbbsp_core.cli.app import application
from lbbsp_core.cli.watch import follow, render
from lbbsp_core.report.live import LiveRun
from lbbsp_core.runtime.record.record import PushLine, StepLine, run_header
from lbbsp_core.runtime.record.writer import RunRecord

EVIL = "[red]a[/red] \x1b[2J\x07b"


def line(step, busy=(0.1, 0.4)):
    return StepLine(
        step=step,
        sizes=(8, 8),
        busy_seconds=busy,
        predicted_seconds=(0.05, 0.2),
        wall_seconds=0.5,
        excluded=(),
        time=1e9 + step,
    )


def write(path, *lines, **names):
    header = run_header("none", workers=2, global_batch_size=16, versions={}, **names)
    record = RunRecord(path, replace(header, started=1e9))
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
    for text in ("left", "gpu", "100.0 ms", "300.0 ms", "60%", "0.50", "step 1", "2 steps/s"):
        assert text in result.output
    assert "The others wait for worker 1 (right): up to 60% of a step." in result.output
    for window in ("All steps so far", "The last 20 regular steps"):
        assert (
            f"{window}: waiting for other workers 30.0 %, waiting and communication 50.0 %, "
            "estimated speed-up over even batches 1.00."
        ) in result.output
    assert "no step for" in result.output
    assert json.loads(figures.read_text())["slowest"] == 1


def test_figures_on_standard_output_and_the_view_beside_it(tmp_path):
    write(tmp_path / "run.jsonl", line(0, (0.3, 0.3)))
    result = watch(tmp_path, "--json", "-")
    assert json.loads(result.stdout)["recent"] == {
        "waiting": 0.0,
        "waiting_and_communication": pytest.approx(0.4),
        "speedup": 1.0,
    }
    assert "Balanced: no worker waits" in watch(tmp_path, "--once").output


@pytest.mark.parametrize("args", [["--once"], ["--timeout", "0.2", "--interval", "0.1"]])
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
    path = tmp_path / "run.jsonl"
    write(path, line(0))
    run, shown = LiveRun(path), io.StringIO()
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt
        write(path, line(10 * len(pauses)))

    console = Console(file=shown, force_terminal=True, width=120)
    with pytest.raises(KeyboardInterrupt):
        follow(run, console, 1.0, sleep)
    text = shown.getvalue()
    assert all(f"step {step}" in text for step in (0, 10, 20))
    assert "2 restarts" in text
    assert text.endswith("\x1b[?25h"), "the cursor is shown again"


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
    for text in (" 60%", "none, step 0, 2 steps/s, ", "w\\xfcrfel"):
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
    header = run_header("none", workers=40, global_batch_size=80, versions={})
    record = RunRecord(tmp_path / "run.jsonl", header)
    busy = tuple(0.1 + (rank == 31) + 0.01 * (rank == 7) for rank in range(40))
    record.write(replace(line(0, busy), sizes=(2,) * 40, predicted_seconds=(None,) * 40))
    record.close()
    text = shown(tmp_path, 80, rows=2)
    rows = [row.split()[0] for row in text.splitlines() if "0.0" in row and "%" in row]
    assert rows == ["31", "7"]
    assert "and 38 more workers, none of which is slower" in text
    assert text.index("The others wait for worker 31") < text.index("forecast"), "seen first"


def test_a_run_that_has_stopped_is_told_from_one_without_steps(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, line(0))
    assert "no step for" in watch(path, "--once").output
    assert "ended, or stuck" in watch(path, "--once").output
    write(path, replace(line(1), stop="preempted"))
    assert "stopped after this step: preempted" in watch(path, "--once").output
    write(path, line(1), line(2))
    assert "stopped" not in watch(path, "--once").output


def test_workers_that_are_slowest_in_turn_are_not_named(tmp_path):
    lines = [line(k, (0.1, 0.2) if k % 2 else (0.21, 0.1)) for k in range(10)]
    write(tmp_path / "run.jsonl", *lines)
    result = watch(tmp_path, "--once")
    assert "Workers wait for each other in turn: up to 11% of a step." in result.output
    assert json.loads(watch(tmp_path, "--json", "-").stdout)["slowest"] is None


def test_pushes_are_no_steps_and_nobody_waits(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, sync="SSP(3)")
    assert "none, no push yet" in watch(tmp_path, "--once").output
    pushes = [PushLine(push=k, worker=0, iteration=k, samples=8, busy_seconds=0.25, lead=0,
                       seconds=0.5 * k, staleness=1) for k in range(6)]  # fmt: skip
    write(path, *pushes, sync="SSP(3)")
    shown = watch(tmp_path, "--once").output
    assert "none, push 5, 2 pushes/s, 16 samples/s" in shown
    assert "no push for" in shown
    assert "step" not in shown
    assert "waiting yet" not in shown
    columns = [row.split() for row in shown.splitlines() if row.strip()[:1].isdigit()]
    assert [(row[0], row[-1]) for row in columns] == [("0", "6"), ("1", "0")]
