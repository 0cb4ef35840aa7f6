"""Command ``lbbsp report``: its files, its output, and what it needs."""

import json
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("plotly")

from report_runs import save, steady
from typer.testing import CliRunner

from lbbsp_core.cli.app import application


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
        "Balanced: 1.5 times as fast as plain BSP would have been, by estimate; workers"
        in done.output
    )
    page = (folder / "report.html").read_text()
    assert "Balanced: 1.5 times as fast as plain BSP" in page
    assert "Copyright 2012" in page  # plotly.js
    written = json.loads(figures.read_text())
    assert written["speedup"] == pytest.approx(0.47 / 0.32)
    assert written["advice"] == []
    assert [worker["rank"] for worker in written["workers"]] == [0, 1]


def test_another_file_may_be_named(tmp_path):
    folder = save(tmp_path / "run", steady([300, 100]))
    assert run("report", folder, "-o", tmp_path / "new" / "a.html").exit_code == 0
    assert (tmp_path / "new" / "a.html").exists()
    assert not (folder / "report.html").exists()


def test_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = run("report", save(tmp_path / "run", steady([300, 100])))
    assert done.exit_code == 2
    assert "lbbsp report: a report or plot needs plotly" in done.output
    assert "pip install 'lbbsp[report]'" in done.output
