"""Workers that are threads of one process and exchange real rows."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
from waits import HANG_SECONDS

from lbbsp_core import LastValue, SessionOptions, WorkerSession
from lbbsp_core.resources.sampler import MEMORY_OF_GPU
from lbbsp_core.runtime.exchange.handshake import Devices
from lbbsp_core.runtime.planning.running_step import Reading

X = 12


class Meeting:
    """A place where all workers leave what they have and take what all have left."""

    def __init__(self, workers):
        self.slots = [None] * workers
        self.barrier = threading.Barrier(workers, timeout=HANG_SECONDS)

    def gather(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait()
        everything = list(self.slots)
        self.barrier.wait()
        return everything


class Threads:
    """Collectives of workers that are threads; `slots` of a pipelined gather never mix."""

    def __init__(self, rank, workers, meeting):
        self.rank, self.workers, self._meeting = rank, workers, meeting

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        rows = self._meeting.gather(self.rank, list(values))
        assert len(set(map(len, rows))) == 1, "frameworks gather rows of one length"
        return [list(row) for row in rows]

    def begin_gather(self, row, *, slot, priority=0) -> Callable[[], np.ndarray]:
        return lambda: np.array(self._meeting.gather(self.rank, np.array(row)), np.float32)

    def waiting(self, what):
        return threading.Lock()  # any context manager


def in_threads(body, workers, end_others):
    """Runs `body(rank)` in a thread for each rank; returns what they return, or raises an error.

    The first one: later ones follow from it, since `end_others()` ends the waits of all others.
    """
    results, errors = [None] * workers, []

    def guarded(rank):
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)
            end_others()

    threads = [threading.Thread(target=guarded, args=(r,), daemon=True) for r in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    if errors:
        is_own = [not isinstance(error, threading.BrokenBarrierError) for error in errors]
        raise errors[is_own.index(True) if True in is_own else 0]
    return results


def run(worker, *, workers=2, make=WorkerSession, options=None):
    """Runs `worker(session, collectives)` in a thread for each rank; returns what they return."""
    meeting = Meeting(workers)

    def body(rank):
        collectives = Threads(rank, workers, meeting)
        given = options(rank) if options else SessionOptions()
        return worker(make(collectives, X, given, framework="threads"), collectives)

    return in_threads(body, workers, meeting.barrier.abort)


def step(session, collectives):
    rows = collectives.all_gather([int(limb) for limb in session.before_allreduce()])
    session.after_allreduce(rows)


def sessions(workers=3, total=96, *, devices=(), **options):
    """Started sessions of all workers, whose predictor takes the last speed for the next one."""
    given = SessionOptions.of({"predictor": LastValue(), "drivers": (), **options})

    def make(collectives, _, *arguments, **facts):
        own = devices[collectives.rank] if devices else Devices()
        return WorkerSession(collectives, total, *arguments, devices=own, **facts)

    def start(session, _):
        session.start({})
        return session

    return run(start, workers=workers, make=make, options=lambda _: given)


def train(workers, costs, steps, memory=None):
    """Runs steps in which worker i is busy for ``costs[i](x_i)``; returns the plan after each.

    `memory` gives the percent of a device's memory in use, by rank and batch size.
    """
    plans = []
    for _ in range(steps):
        for rank, (each, cost) in enumerate(zip(workers, costs, strict=True)):
            size = each.sizes[rank]
            used = {MEMORY_OF_GPU: memory(rank, size)} if memory else {}
            factors = tuple(used.get(name, 0.0) for name in each.meter.names)
            reading = Reading(float(cost(size)), factors)
            each.meter.reach = lambda reading=reading: reading
        rows = [each.before_allreduce() for each in workers]
        for each in workers:
            each.after_allreduce(rows)
        plans.append(workers[0].sizes)
    return plans
