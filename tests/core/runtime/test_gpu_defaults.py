"""What sessions do on GPUs without options: batches grow in steps and come in granules."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_threads import Threads, run

from lbbsp_core import (
    Balancer,
    BatchConstraints,
    EpochBalanced,
    GlobalOrder,
    LastValue,
    LeaderStraggler,
    Limits,
    LoadBalanced,
    Observation,
    Profile,
    ProportionalControl,
    SessionOptions,
    WorkerSession,
)
from lbbsp_core.order import make_order
from lbbsp_core.policy import FirstUses, Policy, bound_growth
from lbbsp_core.resources.sampler import MEMORY_OF_GPU
from lbbsp_core.runtime.exchange.handshake import Devices
from lbbsp_core.runtime.exchange.protocol import WIDTH, decode, encode
from lbbsp_core.runtime.loop.bounds import BatchBounds
from lbbsp_core.runtime.loop.running_step import Reading
from lbbsp_core.testing import exchange_in_process

GPU, SHOWN = Devices(("some GPU",), are_gpus=True), Devices(("some GPU",), True, True)
POLICIES: list[Policy] = [
    LoadBalanced(),
    LoadBalanced(min_gain=0.0),
    ProportionalControl(interval=1),
    LeaderStraggler(delta=1000, window=1),
    EpochBalanced(),
]


def sessions(
    devices: Sequence[Devices], total: int = 256, **options: object
) -> list[WorkerSession]:
    """Started sessions of two workers."""
    chosen = SessionOptions.of({"predictor": LastValue(), **options})

    def make(collectives: Threads, _: int, *args: Any, **given: Any) -> WorkerSession:
        return WorkerSession(collectives, total, *args, devices=devices[collectives.rank], **given)

    def worker(session: WorkerSession, _: Threads) -> WorkerSession:
        session.start({})
        return session

    return run(worker, make=make, options=lambda _: chosen)


def train(
    workers: list[WorkerSession],
    speeds: Sequence[float],
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    memory: Callable[[int, int], float] | None = None,
) -> list[tuple[int, ...]]:
    """Runs steps; `memory` gives the percent in use by rank and batch. Returns their plans."""
    plans = []
    for _ in range(steps):
        plans.append(workers[0].sizes)
        for rank, each in enumerate(workers):
            size = each.sizes[rank]
            read = tuple(
                memory(rank, size) if memory and name == MEMORY_OF_GPU else 0.0
                for name in each.meter.names
            )
            reading = Reading(size / speeds[rank], read)
            monkeypatch.setattr(each.meter, "reach", lambda reading=reading: reading)
        rows = [each.before_allreduce() for each in workers]
        for each in workers:
            each.after_allreduce(rows)
    return plans


# Growth


def two_balancers(total: int, **options: Any) -> list[Balancer]:
    common = {"predictor": LastValue(), "bounds": BatchBounds(first_uses=True), **options}
    return [Balancer(rank=i, workers=2, global_batch_size=total, **common) for i in range(2)]


@given(
    st.sampled_from(POLICIES),
    st.integers(1, 3),
    st.sampled_from([1, 8, 48]),
    st.sampled_from([None, Limits(1, 128)]),
    st.lists(st.tuples(*[st.floats(0.05, 20.0)] * 2), min_size=12, max_size=12),
)
def test_no_batch_is_larger_than_one_and_a_half_times_what_was_run(
    policy: Policy,
    lag: int,
    granularity: int,
    limits: Limits | None,
    speeds: list[tuple[float, ...]],
) -> None:
    balancers = two_balancers(128, policy=policy, limits=limits, granularity=granularity, lag=lag)
    for balancer in balancers:
        balancer.use_order(GlobalOrder(128 * 4, 128))  # epochs of four steps
    ran = balancers[0].sizes(0)
    for step, now in enumerate(speeds):
        sizes = balancers[0].sizes(step)
        assert BatchConstraints(128, (Limits(),) * 2, granularity).allow(sizes)
        if limits is None:
            pairs = zip(sizes, ran, strict=True)
            assert all(x <= max(1.5 * most, most + granularity) for x, most in pairs)
        ran = tuple(map(max, ran, sizes))
        exchange_in_process(balancers, [x / v for x, v in zip(sizes, now, strict=True)])


def test_the_plan_in_force_stays_allowed_and_other_maxima_stay() -> None:
    """As after a restart, with the plan of a checkpoint."""
    constraints = BatchConstraints(128, (Limits(), Limits(1, 40)), granularity=64)
    bounds = bound_growth(constraints, [FirstUses()] * 2, (96, 32), (False, False), (90.0, None))
    assert [each.maximum for each in bounds.limits] == [96, 40]
    ran = [FirstUses(largest=96, settled_seconds=1.0), FirstUses(largest=32)]
    for percent, largest in [(120.0, 96), (80.0, 114), (None, 160)]:
        bounds = bound_growth(constraints, ran, (90, 38), (False, False), (percent, None))
        assert [each.maximum for each in bounds.limits] == [largest, 40]


def test_memory_counts_once_it_has_been_read_after_the_largest_batch() -> None:
    worker = FirstUses().ran(64, 0.15)
    bounds = []
    for planned in (64, 60, 70, 70, 70):
        constraints = BatchConstraints(128, (Limits(), Limits()))
        known = (worker, FirstUses(largest=64))
        bounded = bound_growth(constraints, known, (64, 64), (False, True), (50.0, None))
        bounds.append(bounded.limits[0].maximum)
        worker = worker.ran(planned, 0.15)
    assert bounds == [64, 64, 96, 70, 70]


def test_a_learned_bound_of_proportional_control_allows_no_growth() -> None:
    policy = ProportionalControl(interval=1)
    constraints = BatchConstraints(256, (Limits(1, 96), Limits()))
    state = policy.init(BatchConstraints(256, (Limits(),) * 2))._replace(
        sizes=(64, 192), maxima=(200, None)
    )
    seen = Observation(0, (64, 192), (0.1, 1.0), (), (None, None))
    assert policy.update(state, constraints, seen).sizes == (96, 160)


def test_batches_by_work_grow_with_the_work_of_the_plan() -> None:
    """The worker with few, long samples may have more work."""
    balancers = two_balancers(8)
    work = np.tile([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 6.0, 12.0], 20)
    for balancer in balancers:
        balancer.use_order(make_order(160, 8, workers=2, shuffle=False, work=work))
    for _ in range(12):
        exchange_in_process(balancers, [0.6, 0.2])
    assert balancers[0].latest_plan[0] == (1, 7)


def test_a_fast_worker_is_led_to_the_end_of_its_memory_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers, one of them with three times the speed and half the memory, and no profile."""
    plans = train(sessions([GPU, GPU]), [300.0, 100.0], 30, monkeypatch)
    first = [sizes for sizes, _ in itertools.groupby(plans)]
    assert first[0] == (128, 128)
    assert first[-1] == (192, 64), "its speed"
    largest = list(itertools.accumulate((x for x, _ in plans), max))
    assert all(new <= 1.5 * old for old, new in itertools.pairwise(largest))
    for limits in (Limits(1, 256), Limits(2)):
        free = train(sessions([GPU, GPU], limits=limits), [3000.0, 100.0], 3, monkeypatch)
        assert free[-1] == (248, 8), "limits allow it at once"


@pytest.mark.parametrize("policy", POLICIES[:4], ids=repr)
def test_a_batch_grows_as_far_as_the_memory_in_use_allows(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights need 10 %, 170 samples 85 %, which stay in the pool of the framework."""
    pool = {0: 0, 1: 0}

    def used(rank: int, size: int) -> float:
        pool[rank] = max(pool[rank], size)
        return 10 + pool[rank] / 2 if rank == 0 else 5.0

    workers = sessions([SHOWN, SHOWN], policy=policy, drivers=(MEMORY_OF_GPU,), granularity=1)
    plans = train(workers, [900.0, 100.0], 60, monkeypatch, used)
    assert max(used(0, x) for x, _ in plans) <= 95
    assert max(x for x, _ in plans) >= 165
    hidden = sessions([GPU, GPU], policy=policy, drivers=(MEMORY_OF_GPU,), granularity=1)
    plans = train(hidden, [900.0, 100.0], 60, monkeypatch, used)
    assert max(x for x, _ in plans) > 200, "the framework has taken all memory in advance"


def test_a_profile_bounds_a_batch_instead_of_the_memory_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = Profile([8, 16], [0.1, 0.2], out_of_memory_at=201)
    workers = sessions([SHOWN, SHOWN], cost=profile, drivers=(MEMORY_OF_GPU,))
    plans = train(workers, [900.0, 100.0], 9, monkeypatch, lambda rank, size: 95.0)
    assert plans[-1] == (200, 56)


# Granularity


@pytest.mark.parametrize(
    ("devices", "total", "options", "granularity"),
    [
        ((Devices(), Devices()), 256, {}, 1),
        ((GPU, GPU), 256, {}, 8),
        ((Devices(), GPU), 256, {}, 8),
        ((GPU, GPU), 126, {}, 1),
        ((GPU, GPU), 256, {"granularity": 1}, 1),
        ((GPU, GPU), 256, {"granularity": 4}, 4),
        ((GPU, GPU), 200, {"limits": Limits(1, 100)}, 1),
    ],
    ids=["CPUs", "GPUs", "one GPU", "small batches", "given 1", "given 4", "no plan"],
)
def test_workers_on_gpus_agree_on_multiples_of_eight(
    devices: Sequence[Devices], total: int, options: dict[str, object], granularity: int
) -> None:
    for each in sessions(devices, total, **options):
        assert each.balancer.constraints.granularity == granularity


@pytest.mark.parametrize(
    ("speed", "options", "notices"),
    [(150.0, {}, 1), (100.0, {}, 0), (150.0, {"granularity": 8}, 0)],
)
def test_what_the_default_granularity_costs_is_said_once(
    speed: float,
    options: dict[str, object],
    notices: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "lbbsp.session")
    train(sessions([GPU, GPU], 130, **options), [speed, 100.0], 60, monkeypatch)
    texts = [each.getMessage() for each in caplog.records if "multiples" in each.getMessage()]
    assert len(texts) == notices
    assert all("multiples of 8 samples" in text and "2.6 % longer" in text for text in texts)


def test_batches_that_are_drawn_keep_their_granularity() -> None:
    bounds = BatchBounds(granularity=8, default_maximum=True)
    balancer = Balancer(rank=0, workers=2, global_batch_size=256, lag=3, bounds=bounds)
    balancer.use_order(GlobalOrder(256 + 100, 256))
    drawn = [balancer.sizes(step) for step in range(3)]
    assert drawn[1] == (50, 50)
    balancer.set_peers([balancer.static_info()] * 2, are_drawn=True)
    assert [balancer.sizes(step) for step in range(3)] == drawn
    assert balancer.constraints.granularity == 8
    balancer.skip_to(3)
    assert balancer.sizes(3) == (52, 48), "a short step"


# Retraces


def test_after_a_retrace_all_sizes_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = sessions([Devices(), Devices()])
    train(workers, [100.0, 100.0], 3, monkeypatch)
    assert [each.sizes for each in workers[1].balancer.first_uses] == [{128}, {128}]
    workers[0].exclude_step(retraced=True)
    monkeypatch.setattr(
        "lbbsp_core.runtime.loop.balancer.LoadBalanced.update",
        lambda self, state, constraints, seen: state._replace(sizes=(130, 126)),
    )
    train(workers, [100.0, 100.0], 2, monkeypatch)
    for each in workers:
        known = each.balancer.first_uses
        assert [one.sizes for one in known] == [{128, 130}, {128, 126}]
    workers[1].exclude_step(retraced=True)
    train(workers, [100.0, 100.0], 1, monkeypatch)
    assert [one.sizes for one in workers[0].balancer.first_uses] == [{128, 130}, {126}]
    assert [one.largest for one in workers[0].balancer.first_uses] == [130, 128]
    assert not decode(workers[1].before_allreduce()).retraced, "only once"
    assert len(encode(decode([0.0] * WIDTH))) == WIDTH
