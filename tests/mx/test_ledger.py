"""What asynchronous sessions learn from, sample by sample, in random interleavings.

The loss is the sum of one weight for each sample, so that the model is a ledger: a sample's weight
says how often its gradient has entered. Sessions and the servers' optimizer are the real ones; a
scheduler chooses whose next call reaches the servers.
"""

import itertools
import random
import threading
from collections import Counter
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
from mxnet import nd
from waits import HANG_SECONDS

from lbbsp_core import ASP, BSP, DSSP, SSP, ElasticBSP, SessionOptions
from lbbsp_core.order import SampleStream
from lbbsp_core.runtime.asynchronous import async_session, client
from lbbsp_core.runtime.asynchronous.async_session import AsyncSession
from lbbsp_core.runtime.asynchronous.coordination import empty_questions
from lbbsp_mx.store.server_optimizer import Keys, ServerOptimizer

WORKERS, X, SAMPLES, EPOCHS = 3, 12, 80, 2
SEEDS = range(2)
SCHEMES = {
    "bsp": (BSP(), False),
    "bsp_shared": (BSP(), 0.5),
    "ssp": (SSP(2), False),
    "dssp": (DSSP(1, 4), False),
    "asp": (ASP(), False),
    "elastic": (ElasticBSP(lookahead=4, warmup=1), False),
}


class Sgd:
    """Descent with a rate of one, on NumPy arrays."""

    multi_precision = False

    def update_multi_precision(self, index, weight, grad, state):
        weight -= grad


class Scheduler:
    """Lets one worker go on at a time, chosen at random when all of them are about to call.

    One that would read the same answers again, since nobody has asked meanwhile, is not chosen.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.speeds = [self.random.choice((1.0, 0.3, 0.05)) for _ in range(WORKERS)]
        self.now, self._turn, self.failed = 0.0, None, False
        self._calling, self._running, self.readers = set(), WORKERS, set()
        self._changed = threading.Condition()

    def take_turn(self, rank, *, reads=False):
        with self._changed:
            if not reads:
                self.readers.discard(rank)
            self._calling.add(rank)
            self._choose()
            assert self._changed.wait_for(lambda: self.failed or self._turn == rank, HANG_SECONDS)
            if self.failed:
                raise BrokenPipeError("another worker has failed")
            self._turn = None
            self._calling.remove(rank)

    def end(self, failed):
        with self._changed:
            self.failed |= failed
            self._running -= 1
            self._choose()
            self._changed.notify_all()

    def _choose(self):
        if self._calling and len(self._calling) == self._running:
            calling = sorted(self._calling - self.readers or self._calling)
            (self._turn,) = self.random.choices(calling, [self.speeds[rank] for rank in calling])
            self.now += self.random.random()
            self._changed.notify_all()


class Cluster:
    """Two parameters, their sums and the coordinator, on one server."""

    def __init__(self, seed):
        self.scheduler = Scheduler(seed)
        self.keys = Keys(parameters=2, servers=1)
        self.model = {key: np.zeros(SAMPLES) for key in (0, 1)}
        self.values = self.model | {self.keys.sums + key: np.zeros(SAMPLES) for key in (0, 1)}
        self.values |= {key: np.zeros(1) for key in self.keys.barriers}
        self.answers = empty_questions(WORKERS)
        self.optimizer = self.service = None
        self.ready = threading.Event()

    def start(self, session):
        self.service = session.make_service()
        self.service._coordinator.clock = lambda: self.scheduler.now
        self.optimizer = ServerOptimizer(Sgd(), self.keys, self.service)
        self.ready.set()


class Servers:
    """A worker's view of the cluster, for an `AsyncSession`."""

    def __init__(self, cluster, rank):
        self.cluster, self.rank, self.workers = cluster, rank, WORKERS
        self.gradient = np.zeros(SAMPLES)

    def _push(self, key, value):
        self.cluster.scheduler.take_turn(self.rank)
        values = self.cluster.values
        self.cluster.optimizer.update_multi_precision(key, values[key], value, None)

    def ask(self, table):
        self.cluster.scheduler.take_turn(self.rank)
        self.cluster.answers = self.cluster.service.answer(table)
        self.cluster.scheduler.readers.clear()

    def read_answers(self):
        self.cluster.scheduler.take_turn(self.rank, reads=True)
        self.cluster.scheduler.readers.add(self.rank)
        return self.cluster.answers

    def push_gradients(self, *, to_sum):
        for key in (0, 1):
            self._push(to_sum * self.cluster.keys.sums + key, self.gradient)

    def apply_sums(self, scale):
        for key in self.cluster.keys.barriers:
            self._push(key, nd.array([scale]))
        for key in (0, 1):
            self._push(key, self.gradient)

    def waiting(self, what):
        return nullcontext()


def train(cluster, rank, sync, share_work, iterations):
    """Trains as one worker, for so many iterations at most; returns the samples of each."""
    servers = Servers(cluster, rank)
    session = AsyncSession(servers, sync, X, SessionOptions(record=None), framework="list",
                           versions={}, facts="", share_work=share_work)  # fmt: skip
    if rank == 0:
        cluster.start(session)
    assert cluster.ready.wait(HANG_SECONDS)
    session.start()
    stream, done = SampleStream(SAMPLES, 0), []

    def end(samples):
        servers.gradient = np.bincount(samples, minlength=SAMPLES).astype(float)
        done.append(samples)
        session.end_step(len(samples))
        session.begin_read()
        session.end_read()

    for epoch in range(EPOCHS):
        session.begin_epoch()
        parts = []
        while len(done) < iterations:
            begin, stop = session.claim((epoch + 1) * SAMPLES)
            if begin >= stop:
                break
            drawn = stream.take(begin, stop).tolist()
            parts += drawn
            if not session.claim_part(len(drawn)):
                end(parts)
                parts = []
        while len(done) < iterations and session.must_end_step():
            end([])
    session.finish()
    session.close()
    return done


@cache
def run(scheme, seed, leaves):
    """Trains as all workers; returns the cluster, and the samples by worker and iteration."""
    cluster, done, errors = Cluster(seed), [[]] * WORKERS, []
    ends = cluster.scheduler.random.randrange(1, 6) if leaves else 10**6

    def work(rank):
        try:
            done[rank] = train(cluster, rank, *SCHEMES[scheme], 10**6 if rank else ends)
        except BaseException as error:
            errors.append(error)
        cluster.scheduler.end(failed=bool(errors))

    threads = [threading.Thread(target=work, args=[rank], daemon=True) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    if errors:
        raise errors[0]
    return cluster, done


def weights_of(scheme, done):
    """Returns the weight of each sample: under BSP, each iteration is a mean over its samples."""
    iterations = list(itertools.zip_longest(*done, fillvalue=[])) if "bsp" in scheme else []
    weights = np.zeros(SAMPLES)
    for together in iterations:
        samples = list(itertools.chain(*together))
        np.add.at(weights, samples, X / len(samples))
    if not iterations:
        np.add.at(weights, list(itertools.chain(*itertools.chain(*done))), 1.0)
    return weights


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(client, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(async_session, "SLOW_CLAIM_SECONDS", float("inf"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize(
    "seeds", [SEEDS, pytest.param(range(len(SEEDS), 50), marks=pytest.mark.campaign)], ids=repr
)
def test_every_gradient_enters_the_model_once(scheme, leaves, seeds):
    for seed in seeds:
        cluster, done = run(scheme, seed, leaves)
        counts = Counter(itertools.chain(*itertools.chain(*done)))
        assert counts == dict.fromkeys(range(SAMPLES), EPOCHS)
        for weights in cluster.model.values():
            assert -weights == pytest.approx(weights_of(scheme, done)), seed


@pytest.mark.parametrize("scheme", ["bsp", "bsp_shared"])
def test_iterations_of_bsp_do_not_mix_epochs(scheme):
    for seed in SEEDS:
        _, done = run(scheme, seed, leaves=False)
        sizes = [sum(map(len, each)) for each in itertools.zip_longest(*done, fillvalue=[])]
        epoch = [X] * (SAMPLES // X) + [SAMPLES % X]
        assert sizes == epoch * EPOCHS
        assert len({len(own) for own in done}) == 1, "all take part in each"
