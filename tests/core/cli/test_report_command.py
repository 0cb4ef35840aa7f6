"""Command ``lbbsp report``: its files, its output, and what it needs."""

import json
import sys
from dataclasses import replace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("plotly")

from report_runs import Page, save, steady
from typer.testing import CliRunner

from lbbsp_core.cli.app import application
from lbbsp_core.installation import extra
from lbbsp_core.runtime.record.record import PushLine


def run(*arguments):
    return CliRunner().invoke(application(), [str(argument) for argument in arguments])


@pytest.mark.parametrize("named", ["folder", "file"])
def test_the_report_is_beside_the_record_and_figures_in_the_file(tmp_path, named):
    folder = save(tmp_path / "run", steady([300, 100]))
    figures = tmp_path / "deep" / "figures.json"
    record = folder if named == "folder" else folder / "run.jsonl"
    done = run("report", record, "--json", figures)
    assert done.exit_code == 0, done.output
    assert (
        "Balanced: 1.5 to 1.9 times as fast as plain BSP would have been, by estimate; workers"
        in done.output
    )
    page = (folder / "report.html").read_text()
    assert "Balanced: 1.5 to 1.9 times as fast as plain BSP" in page
    assert "Copyright 2012" in page  # plotly.js
    written = json.loads(figures.read_text())
    assert written["speedup"] == pytest.approx(0.47 / 0.32)
    assert written["advice"] == []
    assert [worker["rank"] for worker in written["workers"]] == [0, 1]
    (folder / "report.html").unlink()
    assert run("report", record, "-o", tmp_path / "new" / "a.html").exit_code == 0
    assert (tmp_path / "new" / "a.html").exists()
    assert not (folder / "report.html").exists()


def test_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = run("report", save(tmp_path / "run", steady([300, 100])))
    assert done.exit_code == 2
    assert "lbbsp report: a report or plot needs plotly" in done.output
    assert f"pip install {extra('report')}" in done.output


def test_two_runs_are_compared(tmp_path):
    even = save(tmp_path / "even", steady([300, 100], [1, 1], policy="Even()"))
    balanced = save(tmp_path / "balanced", steady([300, 100]))
    done = run("report", even, balanced, "--json", tmp_path / "figures.json")
    assert done.exit_code == 0, done.output
    assert "balanced trains 1.9 times as fast as even" in done.output
    page = Page((balanced / "comparison.html").read_text())
    assert ["step, median", "620\xa0ms", "320\xa0ms"] in [
        [cell.replace(" ", "\xa0") if cell.endswith("ms") else cell for cell in row]
        for row in page.rows
    ]
    assert ["policy", "Even()", "LoadBalanced()"] in page.rows
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["speedup"] == pytest.approx(0.62 / 0.32)
    assert [each["name"] for each in figures["runs"]] == ["even", "balanced"]
    assert figures["runs"][0]["waiting"] == pytest.approx(0.4 / 2 / 0.62)
    assert figures["differences"] == {"policy": ["Even()", "LoadBalanced()"]}
    slower = run("report", balanced, even / "run.jsonl", "-o", tmp_path / "new" / "a.html")
    assert "even trains slower than balanced (0.52 times as fast)" in slower.output
    assert (tmp_path / "new" / "a.html").exists()


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (["a", "a"], "RUN_DIR must be one run, or two to compare, got 3"),
        (["missing"], "missing has no run record (run.jsonl)"),
        (["pushes"], "pushes is the record of an asynchronous run: only runs whose workers are in"),
        (["empty"], "empty: the run must have at least one step, got none"),
    ],
)
def test_what_cannot_be_compared_says_why(tmp_path, others, words):
    one = steady([300, 100])
    push = PushLine(push=0, worker=0, iteration=0, samples=8, busy_seconds=0.1, seconds=0.1,
                    staleness=0, lead=0)  # fmt: skip
    save(tmp_path / "a", one)
    save(tmp_path / "pushes", replace(one, steps=[], pushes=[push]))
    save(tmp_path / "empty", replace(one, steps=[]))
    done = run("report", *(tmp_path / name for name in ["a", *others]))
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
