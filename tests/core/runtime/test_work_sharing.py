"""Work sharing between two workers that are threads, with clocks of their own."""

import logging
import threading
from collections import Counter

import numpy as np
import pytest
from waits import HANG_SECONDS
from worker_threads import run, step

from lbbsp_core import DisagreementError, FixedShares, SessionOptions, WorkerSession, read_run
from lbbsp_core.reserve import AUTO
from lbbsp_core.runtime.extensions.work_sharing import WorkSharing
from lbbsp_core.runtime.planning.running_step import Reading

X = 64
PACE = 0.01  # seconds a sample
PLAN = SessionOptions(policy=FixedShares([3, 1]))


def make(collectives, _, *args, **options):
    return WorkerSession(collectives, X, *args, **options)


class Clocks:
    """Counters that both workers share; claims are counted in the order of virtual time."""

    def __init__(self):
        self.changed, self.counts = threading.Condition(), Counter()
        self.times = [(0, 0.0), (0, 0.0)]  # by rank: step, and time in it before which none claims
        self.claim_seconds = [0.001, 0.001]  # by rank

    def train(self, session, collectives, steps, pace, mode=AUTO, first=0):
        """Trains some steps; returns the samples of each one, and its fraction in percent."""
        sharing = session.extensions[WorkSharing]
        sharing.mode = mode
        if not first:
            session.use_order(session.make_order(steps * X))
        session.start({})
        now, computed, percents = [0.0], [], []
        session.meter.elapsed = lambda: now[0]
        session.meter.add_busy = lambda seconds: now.__setitem__(0, now[0] + seconds)
        session.meter.reach = lambda: Reading(now[0], (0.0,) * len(session.meter.names))
        for number in range(first, first + steps):
            sharing.allowed = sharing.allowed is not False
            claims = sharing.begin()
            percents.append(session.balancer.schedule.reserves.get(number, 0))
            samples = session.local_indices(number).tolist()
            seconds = pace(number, session.rank)
            now[0] = len(samples) * seconds
            while claims:
                begin, end = claims.take(lambda size: self.add(number, size, session.rank, now))  # noqa: B023
                if begin == end:
                    break
                samples += session.balancer.schedule.reserve_indices(number)[begin:end].tolist()
                now[0] += (end - begin) * seconds
            computed.append(samples)
            self.reach(session.rank, (number + 1, 0.0))
            step(session, collectives)
        return computed, percents

    def add(self, number, size, rank, now):
        self.reach(rank, (number, now[0]))
        with self.changed:
            is_next = lambda: self.times[rank] <= self.times[1 - rank]  # noqa: E731
            assert self.changed.wait_for(is_next, HANG_SECONDS)
            before = self.counts[number]
            self.counts[number] += size
        now[0] += self.claim_seconds[rank]
        return before

    def reach(self, rank, time):
        with self.changed:
            self.times[rank] = time
            self.changed.notify()


def noisy(number, rank):
    """Nobody can predict it."""
    return PACE * (3 if np.random.default_rng([number, rank]).random() < 0.3 else 1)


@pytest.mark.parametrize("options", [SessionOptions(), PLAN])
def test_each_sample_is_computed_once_and_the_record_says_by_whom(options, tmp_path):
    clocks = Clocks()

    def worker(session, collectives):
        found = clocks.train(session, collectives, 12, noisy, mode=40)
        session.close()
        return found

    def given(rank):
        return SessionOptions(policy=options.policy, record=tmp_path)

    (first, percents), (second, others) = run(worker, make=make, options=given)
    assert percents == others == [0] + [40] * 11
    for own, other in zip(first, second, strict=True):
        assert len(own) + len(other) == len({*own, *other}) == X
    lines = read_run(tmp_path).steps
    assert [line.sizes for line in lines] == [
        (len(own), len(other)) for own, other in zip(first, second, strict=True)
    ]
    assert all("parts" not in line.values for line in lines[:1])
    assert all(sum(line.values["parts"]) >= 1 for line in lines[1:])


def test_auto_shares_where_noise_is_and_not_on_a_quiet_cluster(caplog):
    def percents(pace):
        clocks = Clocks()

        def worker(session, collectives):
            _, found = clocks.train(session, collectives, 30, pace)
            session.close()
            return found

        first, second = run(worker, make=make)
        assert first == second
        return first, clocks.counts

    with caplog.at_level(logging.INFO, logger="lbbsp.session"):
        chosen, _ = percents(noisy)
    assert chosen[-1] >= 20
    assert " of 30 steps shared work, in " in caplog.messages[-1]
    assert "and 1.0 ms a claim" in caplog.messages[-1]
    quiet, claims = percents(lambda number, rank: PACE)
    assert quiet == [0] * 30
    assert not claims


def test_the_balancer_learns_the_time_of_the_planned_batch():
    """Else who computes parts would seem slow, or the plan would follow the parts."""
    clocks = Clocks()

    def worker(session, collectives):
        clocks.train(session, collectives, 10, lambda number, rank: PACE * (1 + rank), mode=40)
        return session.balancer.sizes(session.step), session.balancer.schedule.latest_plan[1]

    for sizes, costs in run(worker, make=make):
        assert sizes == pytest.approx((X * 2 / 3, X / 3), abs=1)
        assert [cost(10) / 10 for cost in costs] == pytest.approx([PACE, 2 * PACE], rel=0.02)


def test_a_slow_claim_ends_sharing_on_all_workers(caplog):
    clocks, lines = Clocks(), []

    def worker(session, collectives):
        if session.rank == 0:
            session.observers.append(lines.append)
        clocks.train(session, collectives, 4, noisy, mode=40)
        clocks.claim_seconds[1] = 1.5
        computed, percents = clocks.train(session, collectives, 4, noisy, mode=40, first=4)
        return computed, percents

    (first, percents), (second, _) = run(worker, make=make)
    assert percents[-1] == 0
    assert 40 in percents
    assert ["parts" in line.values for line in lines] == [False, *[True] * 3, *map(bool, percents)]
    assert all(len(a) + len(b) == X for a, b in zip(first, second, strict=True))
    assert (
        caplog.messages.count(
            "a claim of samples has taken more than 1 s: steps do not share work any more"
        )
        == 1
    )


def test_a_checkpoint_keeps_the_fraction_and_the_overheads():
    clocks = Clocks()

    def worker(session, collectives):
        clocks.train(session, collectives, 30, noisy)
        saved = session.save_state()
        other = make(collectives, X, SessionOptions(), framework="threads")
        other.use_order(other.make_order(30 * X))
        other.load_state(*saved)
        kept = other.extensions[WorkSharing]
        kept.mode = AUTO
        return kept._fraction > 0, kept.state() == session.extensions[WorkSharing].state()

    assert run(worker, make=make) == [(True, True)] * 2


def test_workers_that_share_differently_are_named():
    def worker(session, collectives):
        Clocks().train(session, collectives, 2, noisy, mode=session.rank and AUTO)

    with pytest.raises(DisagreementError, match="workers disagree on share_work: worker 0 has 0"):
        run(worker, make=make)

    def diverges(session, collectives):
        session.use_order(session.make_order(4 * X))
        session.extensions[WorkSharing].mode = AUTO
        session.start({})
        session.balancer.schedule.reserves[0] = 10 * session.rank
        session.extensions[WorkSharing].begin()
        step(session, collectives)

    with pytest.raises(DisagreementError, match=r"share \[0, 10\] % of the step, by rank"):
        run(diverges, make=make)
