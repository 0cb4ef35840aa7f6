"""The file for Prometheus: its grammar, its numbers, and what happens if it cannot be written."""

import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from report_runs import line as step_line
from waits import HANG_SECONDS, until

from lbbsp_core import SessionOptions, SingleWorker, WorkerSession
from lbbsp_core.runtime.extensions import metrics_file
from lbbsp_core.runtime.extensions.metrics_file import SECONDS, Metrics, metrics_text
from lbbsp_core.runtime.record.figures import Figures, figures_of
from lbbsp_core.runtime.record.record import run_header

pytestmark = pytest.mark.usefixtures("patient")
HOSTS = ('a"b\\', "c\nd{}= #", "é")
BUSY, PREDICTED = (0.1, 0.2, 0.4), (0.1, None, 1e-7)
LINE = replace(step_line(7, (4, 8, 12), BUSY, 0.5), predicted_seconds=PREDICTED, time=1.75e9)
HEADER = run_header("none", workers=3, global_batch_size=24, versions={}, hosts=HOSTS)


def metrics_of(path, header, clock):
    session = SimpleNamespace(options=SessionOptions(metrics_file=path), rank=0, observers=[])
    metrics = Metrics(session, clock)
    metrics.started(lambda: header)
    return metrics


NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
VALUE = r"(?:[^\\\"\n]|\\\\|\\\"|\\n)*"
LABELS = rf'(?:{NAME}="{VALUE}")(?:,{NAME}="{VALUE}")*'
SAMPLE = re.compile(rf"({NAME})\{{({LABELS})\}} ([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)")
COMMENT = re.compile(rf"# (HELP|TYPE) ({NAME}) (.+)")
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parse(text):
    """Reads Prometheus' text format strictly: HELP and TYPE once, then the samples of the metric.

    Returns:
        Values by name and by the values of the labels, without that of the run.
    """
    assert text.endswith("\n")
    found, headed = {}, []
    for line in text[:-1].split("\n"):
        if comment := COMMENT.fullmatch(line):
            kind, name, rest = comment.groups()
            headed.append((kind, name))
            assert kind == "HELP" or rest == "gauge"
            continue
        name, labels, value = SAMPLE.fullmatch(line).groups()
        assert headed[-2:] == [("HELP", name), ("TYPE", name)]
        pairs = {
            label: re.sub(r"\\.", lambda match: ESCAPES[match[0]], text)
            for label, text in re.findall(rf'({NAME})="({VALUE})"', labels)
        }
        key = name, pairs.get("worker"), pairs.get("host")
        assert key not in found, "each series occurs once"
        assert pairs["run"] == "job"
        found[key] = float(value)
    assert len(headed) == len(set(headed))
    return found


def step_in(path):
    return parse(path.read_text("utf-8"))["lbbsp_step", None, None]


def test_the_text_has_the_figures_of_each_worker():
    found = parse(metrics_text("job", HEADER, LINE, Figures(0.25, 0.375, 1.5, 0.125, 1.75)))
    for rank, host in enumerate(HOSTS):
        of = {name: value for (name, worker, where), value in found.items()
              if (worker, where) == (str(rank), host)}  # fmt: skip
        expected = {
            "lbbsp_batch_size": LINE.sizes[rank],
            "lbbsp_busy_seconds": LINE.busy_seconds[rank],
            "lbbsp_waiting_seconds": pytest.approx(0.4 - LINE.busy_seconds[rank]),
        }
        if LINE.predicted_seconds[rank] is not None:
            expected["lbbsp_predicted_seconds"] = LINE.predicted_seconds[rank]
        assert of == expected
    run = {name: value for (name, worker, _), value in found.items() if worker is None}
    assert run == {
        "lbbsp_start_timestamp_seconds": HEADER.started,
        "lbbsp_last_step_timestamp_seconds": 1.75e9,
        "lbbsp_workers": 3,
        "lbbsp_global_batch_size": 24,
        "lbbsp_step": 7,
        "lbbsp_step_seconds": 0.5,
        "lbbsp_waiting_ratio": 0.25,
        "lbbsp_waiting_and_communication_ratio": 0.375,
        "lbbsp_speedup_ratio": 1.5,
        "lbbsp_speedup_at_most_ratio": 1.75,
        "lbbsp_hidden_communication_ratio": 0.125,
    }


def test_what_is_unknown_has_no_series():
    header = replace(HEADER, hosts=(), started=None)
    line = replace(LINE, time=None, predicted_seconds=(None,) * 3)
    found = parse(metrics_text("job", header, line, Figures(0.0, 0.1, 1.0)))
    assert {where for _, worker, where in found if worker} == {""}
    assert not {name for name, *_ in found} & {
        "lbbsp_start_timestamp_seconds", "lbbsp_last_step_timestamp_seconds",
        "lbbsp_predicted_seconds",
    }  # fmt: skip


def test_the_file_is_written_every_few_seconds_and_at_the_end(tmp_path):
    path, now = tmp_path / "new" / "job.prom", [0.0]
    metrics = metrics_of(path, HEADER, clock=lambda: now[0])

    for step, seconds, expected in ((0, 0.0, 0), (1, SECONDS - 1, 0), (2, SECONDS, 2)):
        now[0] = seconds
        metrics.add(replace(LINE, step=step))
        metrics._writing.result(HANG_SECONDS)
        assert step_in(path) == expected
    last = replace(LINE, step=3, sizes=(8, 8, 8))
    metrics.add(last)
    metrics.flush()
    assert step_in(path) == 3
    assert "lbbsp_end_timestamp_seconds" not in path.read_text("utf-8")
    metrics._end()
    assert "lbbsp_end_timestamp_seconds" in path.read_text("utf-8")
    found = parse(path.read_text("utf-8"))
    for name, value in figures_of([*[LINE] * 3, last])._asdict().items():
        assert found[f"lbbsp_{name}_ratio", None, None] == pytest.approx(value)
    assert [file.name for file in path.parent.iterdir()] == ["job.prom"]


@pytest.mark.parametrize(
    ("host", "name"),
    [("host", "folder.prom"), ("\ud800", "job.prom")],
    ids=["is a folder", "no UTF-8"],
)
def test_a_failure_is_reported_once_and_stops_nothing(tmp_path, caplog, host, name):
    (tmp_path / "folder.prom").mkdir()
    metrics = metrics_of(tmp_path / name, replace(HEADER, hosts=(host,)), clock=lambda: 0.0)
    for step in range(2):
        metrics.add(replace(LINE, step=step))
        metrics.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the training continues" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["folder.prom"]


def test_a_write_that_hangs_holds_up_nobody(tmp_path, monkeypatch):
    released, started = threading.Event(), []
    metrics = metrics_of(tmp_path / "job.prom", HEADER, clock=lambda: 10 * SECONDS * len(started))
    monkeypatch.setattr(metrics, "_write", lambda: (started.append(1), released.wait(HANG_SECONDS)))
    monkeypatch.setattr(metrics_file, "_PATIENCE_SECONDS", 0.01)
    metrics.add(LINE)
    until(lambda: started)
    for _ in range(2):
        metrics.flush()
        metrics.add(LINE)
    released.set()
    metrics._thread.start(lambda: None).result(HANG_SECONDS)  # after all that was to be written
    assert len(started) == 1


def test_the_file_is_that_of_the_training_that_stepped_last(tmp_path):
    path = tmp_path / "job.prom"
    older, newer = (metrics_of(path, HEADER, clock=lambda: 0.0) for _ in range(2))
    for step in (0, 2, 4):
        newer.add(replace(LINE, step=step))
        newer.flush()
        assert step_in(path) == step
        older.flush()  # at the end of the process, say
        assert step_in(path) == step
        newer.add(replace(LINE, step=step + 1))  # and is not written while the other one steps
        older, newer = newer, older


def test_the_last_step_is_written_when_the_process_ends(tmp_path, monkeypatch):
    endings = []
    monkeypatch.setattr(metrics_file, "before_end", endings.append)
    metrics = metrics_of(tmp_path / "job.prom", HEADER, clock=lambda: 0.0)
    for step in range(2):
        metrics.add(replace(LINE, step=step))
    (end,) = endings
    end()
    assert step_in(tmp_path / "job.prom") == 1


@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_session_writes_the_file(tmp_path, monkeypatch, by):
    path = tmp_path / "job.prom"
    if by == "variable":
        monkeypatch.setenv("LBBSP_METRICS_FILE", str(path))
    options = SessionOptions(metrics_file=path if by == "option" else None)
    session = WorkerSession(SingleWorker(), 8, options, framework="none")
    session.use_order(session.make_order(32))
    session.start({})
    for step in range(4):
        session.local_indices(step)
        session.after_allreduce([session.before_allreduce()])
    session.close()
    assert step_in(path) == 3


def test_other_suffixes_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"metrics_file must end in \.prom, got 'x\.txt'"):
        SessionOptions(metrics_file="x.txt")
    monkeypatch.setenv("LBBSP_METRICS_FILE", "x")
    with pytest.raises(ValueError, match=r"LBBSP_METRICS_FILE must end in \.prom"):
        WorkerSession(SingleWorker(), 8, SessionOptions(), framework="none")
