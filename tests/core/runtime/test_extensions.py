"""Extensions of a session: each can be deleted, and a new one is a class in a list."""

import logging
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from worker_threads import X, run, step

from lbbsp_core import DisagreementError, SessionOptions, WorkerSession, read_run
from lbbsp_core.cli.watch import render
from lbbsp_core.report.html.write import write_report
from lbbsp_core.report.live import LiveRun
from lbbsp_core.runtime.exchange.protocol import WIDTH
from lbbsp_core.runtime.extensions.base import StepExtension
from lbbsp_core.runtime.extensions.every import EXTENSIONS
from lbbsp_core.runtime.extensions.record_file import Recording
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.planning.running_step import Reading

pytestmark = pytest.mark.usefixtures("patient")


def of(*extensions):
    return lambda *args, **options: WorkerSession(*args, extensions=extensions, **options)


@pytest.mark.parametrize("deleted", EXTENSIONS, ids=lambda kind: kind.__name__)
def test_two_workers_train_without_an_extension(deleted, tmp_path):
    def worker(session, collectives):
        session.use_order(session.make_order(4 * X))
        session.start({})
        for _ in range(4):
            assert step(session, collectives) is None
        session.load_state(*session.save_state())
        session.close()
        return session.width, session.step

    left = [each for each in EXTENSIONS if each is not deleted]
    options = SessionOptions(record=tmp_path, metrics_file=tmp_path / "job.prom")
    width = WIDTH + sum(each.width for each in left)
    assert run(worker, make=of(*left), options=lambda rank: options) == [(width, 4)] * 2
    if deleted is not Recording:
        assert len(read_run(tmp_path).steps) == 4
        assert write_report(tmp_path, tmp_path / "report.html")
        live = LiveRun(tmp_path)
        assert live.read()
        assert render(live.view())


class LastWorker(StepExtension):
    """Counts the steps in which each worker was last; every worker sends its rank, too."""

    width = 1

    def __init__(self, session):
        super().__init__(session)
        self.counts = [0] * session.workers

    def offer(self):
        return (self.session.rank,)

    def received(self, line, extra, messages):
        assert extra == [(0,), (1,)]
        busy = [message.busy_nanoseconds for message in messages]
        self.counts[busy.index(max(busy))] += 1
        return replace(line, values={**line.values, "last": tuple(-float(n) for n in self.counts)})

    def summary(self):
        return f"worker 1 was last in {self.counts[1]} steps"

    def state(self):
        return self.counts

    def restore(self, state):
        self.counts = [*(state or self.counts)]


def test_a_new_extension_sends_records_sums_up_and_continues(tmp_path, caplog, monkeypatch):
    kinds = (*EXTENSIONS[:1], LastWorker, *EXTENSIONS[1:])  # in the middle of the message

    def worker(session, collectives):
        session.use_order(session.make_order(4 * X))
        session.start({})
        reading = Reading(1.0 + session.rank, (0.0,) * len(session.meter.names))
        monkeypatch.setattr(session.meter, "reach", lambda: reading)
        for _ in range(3):
            step(session, collectives)
        other = of(*kinds)(collectives, X, SessionOptions(), framework="threads")
        other.use_order(other.make_order(4 * X))
        other.load_state(*session.save_state())
        session.close()
        return session.extensions[LastWorker].counts, other.extensions[LastWorker].counts

    options = SessionOptions(record=tmp_path, metrics_file=tmp_path / "job.prom")
    with caplog.at_level(logging.INFO, logger="lbbsp.session"):
        found = run(worker, make=of(*kinds), options=lambda rank: options)
    assert found == [([0, 3], [0, 3])] * 2
    assert [line.values["last"] for line in read_run(tmp_path).steps] == [
        (0.0, -number - 1.0) for number in range(3)
    ]
    assert "worker 1 was last in 3 steps" in caplog.messages
    live = LiveRun(tmp_path)
    assert live.read()
    assert [worker.values["last"] for worker in live.view().workers] == [0.0, -3.0]
    figures = write_report(tmp_path, tmp_path / "report.html")
    assert [worker["values"] for worker in figures["workers"]] == [{"last": 0.0}, {"last": -3.0}]
    console = Console(file=StringIO(), width=200)
    console.print(render(live.view()))
    assert re.search(r"forecast .*last", console.file.getvalue())
    text = (tmp_path / "job.prom").read_text("utf-8")
    assert 'lbbsp_extension_value{run="job",worker="1",host="' in text
    assert 'name="last"} -3.0' in text


def test_workers_with_other_extensions_are_named_before_the_first_step():
    def make(collectives, *args, **options):
        kinds = (LastWorker, Stopping) if collectives.rank else (Stopping,)
        return of(*kinds)(collectives, *args, **options)

    with pytest.raises(
        DisagreementError, match=r"extensions of messages: .* has Stopping 1, .*LastWorker"
    ):
        run(lambda session, collectives: session.start({}), make=make)
