"""Asynchronous sessions in one process: threads, and a parameter server that is a list."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
from waits import HANG_SECONDS, until
from worker_threads import in_threads

from lbbsp_core import (
    ASP,
    BSP,
    SSP,
    DisagreementError,
    Even,
    LastValue,
    LoadBalanced,
    Profile,
    ProportionalControl,
    SessionOptions,
    read_run,
)
from lbbsp_core.order import SampleStream
from lbbsp_core.runtime.asynchronous.async_session import AsyncSession
from lbbsp_core.runtime.asynchronous.coordination import empty_questions

pytestmark = pytest.mark.usefixtures("patient")
X, WORKERS, SAMPLES, EPOCHS = 16, 2, 50, 3


class ListServer:
    """Model, sum and coordinator; one call at a time, as on a parameter server."""

    def __init__(self, size):
        self.lock = threading.Lock()
        self.model, self.sum = np.zeros(size), np.zeros(size)
        self.answers = empty_questions(WORKERS)
        self.service = None
        self.ready = threading.Event()
        self.failed = False
        self.scales = []


class Servers:
    """A worker's view of the server, for an `AsyncSession`."""

    def __init__(self, server, rank):
        self.server, self.rank, self.workers = server, rank, WORKERS
        self.gradient = np.zeros_like(server.model)

    def ask(self, table):
        with self.server.lock:
            self.server.answers = self.server.service.answer(table)

    def read_answers(self):
        if self.server.failed:
            raise BrokenPipeError("another worker has failed")
        with self.server.lock:
            return self.server.answers

    def exchange_log(self, table):
        with self.server.lock:
            return self.server.service.log(table)

    def push_gradients(self, *, to_sum):
        with self.server.lock:
            entered = self.server.sum if to_sum else self.server.model
            entered += self.gradient

    def apply_sums(self, scale):
        with self.server.lock:
            self.server.model += self.server.sum
            self.server.scales.append(scale)
            self.server.sum[:] = 0

    def waiting(self, what):
        return nullcontext()


def run(
    sync,
    options=lambda rank: SessionOptions(),
    samples=lambda rank: SAMPLES,
    before_drawing=lambda rank, drawn: None,
    before_start=lambda rank, server: None,
):
    """Trains; returns the server and what each worker drew."""
    server, drawn = ListServer(SAMPLES), [[] for _ in range(WORKERS)]

    def worker(rank):
        servers = Servers(server, rank)
        session = AsyncSession(
            servers, sync, X, options(rank), framework="list", versions={}, facts="a list",
            devices=[f"gpu of worker {rank}, äöü"],
        )  # fmt: skip
        if rank == 0:
            server.service = session.make_service()
            server.ready.set()
        assert server.ready.wait(HANG_SECONDS)
        before_start(rank, server)
        session.start()
        session.use_samples(samples(rank))
        stream = SampleStream(SAMPLES, session.options.seed)
        session.begin_epoch()
        before_drawing(rank, drawn)
        while True:
            begin, end = session.claim(EPOCHS * SAMPLES)
            if begin >= end:
                break
            indices = stream.take(begin, end)
            drawn[rank] += indices.tolist()
            servers.gradient = np.bincount(indices, minlength=SAMPLES).astype(float)
            session.end_step(len(indices))
            session.begin_read()
            session.end_read()
        session.finish()
        session.close()

    in_threads(worker, WORKERS, lambda: setattr(server, "failed", True))
    return server, drawn


@pytest.mark.parametrize("sync", [BSP(), SSP(1), ASP()])
@pytest.mark.parametrize(
    "policy", [Even(), LoadBalanced(min_gain=0.0), ProportionalControl(interval=1)]
)
def test_every_sample_is_drawn_and_enters_the_model_once_an_epoch(sync, policy, tmp_path):
    server, drawn = run(sync, lambda rank: SessionOptions(policy=policy, record=tmp_path))
    assert sorted(drawn[0] + drawn[1]) == sorted([*range(SAMPLES)] * EPOCHS)
    assert server.model.tolist() == [EPOCHS] * SAMPLES
    pushes = read_run(tmp_path).pushes
    assert [line.push for line in pushes] == list(range(len(pushes)))
    assert sum(line.samples for line in pushes) == EPOCHS * SAMPLES
    for rank in range(WORKERS):
        mine = [line.iteration for line in pushes if line.worker == rank]
        assert mine == list(range(len(mine)))


def test_the_record_names_hosts_and_devices_though_the_last_worker_starts_late(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("LBBSP_HOST", "a name of a host, which takes several questions to tell")

    def start_late(rank, server):
        """Starts worker 1 after a question of worker 0."""
        if rank == 1:
            until(lambda: (server.answers != empty_questions(WORKERS)).any())

    run(ASP(), lambda rank: SessionOptions(record=tmp_path), before_start=start_late)
    header = read_run(tmp_path).header
    assert header.hosts == ("a name of a host, which takes several questions to tell",) * WORKERS
    assert header.devices == ("gpu of worker 0, äöü", "gpu of worker 1, äöü")


def test_the_record_is_complete_though_the_first_worker_comes_too_late(tmp_path):
    def come_late(rank, drawn):
        if rank == 0:
            until(lambda: len(drawn[1]) == EPOCHS * SAMPLES)

    _, drawn = run(ASP(), lambda rank: SessionOptions(record=tmp_path), before_drawing=come_late)
    assert not drawn[0]
    assert sum(line.samples for line in read_run(tmp_path).pushes) == EPOCHS * SAMPLES


def test_workers_with_other_options_are_named():
    with pytest.raises(DisagreementError, match="workers disagree on sync, batches, policy"):
        run(ASP(), lambda rank: SessionOptions(granularity=1 + rank))


def test_workers_with_other_data_are_named():
    with pytest.raises(
        DisagreementError, match="samples with the seed 0, and another worker has different"
    ):
        run(ASP(), samples=lambda rank: SAMPLES + rank)


def session_of(rank=0, **options):
    return AsyncSession(
        Servers(ListServer(SAMPLES), rank), ASP(), X, SessionOptions(drivers=(), **options),
        framework="list", versions={}, facts="",
    )  # fmt: skip


def test_a_session_does_not_learn_from_costly_first_uses():
    session = session_of(policy=LoadBalanced(), predictor=LastValue())
    session._meter.take_excluded()
    learned = [
        session._learn(samples, seconds, ())
        for samples, seconds in [(8, 9.0), (8, 0.8), (9, 5.0), (9, 1.8), (10, 1.0)]
    ]
    picoseconds = 10**11
    assert learned == [(each * picoseconds, 0, False) for each in (0, 1, 1, 2, 1)]
    session.exclude_step()
    assert session._learn(10, 3.0, ()) == (picoseconds, 0, True)
    rounds = session.make_service()._coordinator.rounds
    assert rounds.measured(0, 8, 9.0) is None, "nor does the coordinator"


def test_a_batch_that_was_not_drawn_is_refused():
    with pytest.raises(ValueError, match="once for each batch that was drawn"):
        session_of().check_batch(8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cost": Profile([1, 8, 16], [0.1, 0.2, 0.9])}, "cost must be a straight line"),
        ({"metrics_file": "job.prom"}, r"metrics_file = 'job.prom' .*: leave it out; .*record="),
        ({"short_step_seconds": 0.1}, r"short_step_seconds = 0.1 .*: leave it out"),
        ({"limit_seconds": 5.0}, "limit_seconds = 5.0 .*: leave it out; .* wait_seconds"),
        ({"compare_weights": 7}, "compare_weights = 7 .*: leave it out"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        session_of(**options)


def test_what_is_done_anyway_may_be_said(caplog):
    session_of(compare_weights=None, short_step_seconds=0)
    assert not caplog.records


def test_a_metrics_file_for_all_jobs_has_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("LBBSP_METRICS_FILE", "/metrics/job.prom")
    for rank in range(3):
        session_of(rank)
    (text,) = caplog.messages
    assert "LBBSP_METRICS_FILE = /metrics/job.prom has no effect in asynchronous training" in text
