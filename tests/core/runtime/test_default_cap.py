"""The largest batch by default, who is exempt from it, and the notices about it."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lbbsp_core import (
    ASP,
    Affine,
    Balancer,
    BatchConstraints,
    Even,
    FixedShares,
    LastValue,
    Limits,
    LoadBalanced,
    Profile,
    Proportional,
    SessionOptions,
    WorkerSession,
)
from lbbsp_core.order import make_order
from lbbsp_core.runtime.asynchronous.async_session import AsyncSession
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.extensions import bounds_notice
from lbbsp_core.runtime.extensions.bounds_notice import PATIENCE, SHORT_STEPS, BoundsNotice
from lbbsp_core.runtime.loop.bounds import BatchBounds, ShortSteps, with_cap
from lbbsp_core.runtime.loop.running_step import Reading
from lbbsp_core.testing import exchange_in_process

FAST, SLOW = Proportional(400.0), Proportional(40.0)
WORKERS, X = 3, 96


class Same:
    """Collectives of workers that all have the same facts."""

    def __init__(self, rank: int, workers: int) -> None:
        self.rank, self.workers = rank, workers

    def all_gather(self, values):
        return [list(values) for _ in range(self.workers)]


def sessions(workers=WORKERS, total=X, **options):
    """Started sessions of all workers."""
    given = SessionOptions(predictor=LastValue(), drivers=(), **options)
    made = [
        WorkerSession(Same(rank, workers), total, given, framework="none")
        for rank in range(workers)
    ]
    for each in made:
        each.start({})
    return made


def train(workers, seconds, steps, monkeypatch):
    """Runs steps in which worker i is busy for ``seconds[i](x_i)``; returns the last plan."""
    for _ in range(steps):
        sizes = workers[0].sizes
        for each, cost, size in zip(workers, seconds, sizes, strict=True):
            busy = float(cost(size))
            monkeypatch.setattr(each.meter, "reach", lambda busy=busy: Reading(busy, ()))
        rows = [each.before_allreduce() for each in workers]
        for each in workers:
            each.after_allreduce(rows)
    return workers[0].sizes


@pytest.fixture
def said(caplog):
    """Returns the warnings so far that contain a text."""
    caplog.set_level(logging.WARNING, "lbbsp.session")
    return lambda text: [r.getMessage() for r in caplog.records if text in r.getMessage()]


def default_maximum(total=X, workers=WORKERS, granularity=1, policy=None, limits=None):
    """The maximum by default of a worker whose memory is not known; None: there is none."""
    balancer = Balancer(
        rank=0, workers=workers, global_batch_size=total, policy=policy, limits=limits,
        granularity=granularity, bounds=BatchBounds(default_maximum=True),
    )  # fmt: skip
    return balancer.default_maximum


@given(total=st.integers(9, 1000), workers=st.integers(2, 9), granularity=st.integers(1, 9))
def test_the_cap_is_twice_the_even_share_and_leaves_a_plan(total, workers, granularity):
    total += -total % granularity
    assume(total >= workers * granularity)
    cap = default_maximum(total, workers, granularity)
    if cap is None:
        twice = 2 * -(-total // workers)
        assert -(-twice // granularity) * granularity >= total - (workers - 1)
    else:
        assert cap % granularity == 0
        assert 0 <= cap - 2 * total / workers < 2 + granularity
        assert cap * workers >= total


def test_a_single_worker_given_limits_and_fixed_shares_have_no_cap():
    assert default_maximum(workers=1) is None
    assert default_maximum(workers=4) == 48
    assert default_maximum(workers=4, limits=Limits(1)) is None
    assert default_maximum(workers=4, limits=[Limits(1)] * 4) is None
    assert default_maximum(workers=4, policy=FixedShares((9, 1, 1, 1))) is None
    assert default_maximum(workers=4, policy=Even()) is None


WRONG = [
    ({"total": 3}, "global_batch_size must be at least workers * minimum = 4, got 3"),
    ({"total": -1}, "global_batch_size must be an integer >= 0, got -1"),
    ({"total": "96"}, "global_batch_size must be an integer >= 0, got '96'"),
    ({"granularity": 0}, "granularity must be an integer >= 1, got 0"),
    ({"granularity": "8"}, "granularity must be an integer >= 1, got '8'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["lbbsp", "bsp"])
def test_wrong_sizes_are_refused_by_name(wrong, message, asynchronous, policy):
    def start(total=96, **options):
        chosen = SessionOptions(drivers=(), policy=policy, **options)
        if asynchronous:
            AsyncSession(Same(0, 4), ASP(), total, chosen, framework="none", versions={}, facts="")
        else:
            WorkerSession(Same(0, 4), total, chosen, framework="none")

    with pytest.raises(ValueError, match=re.escape(message)):
        start(**wrong)


def test_a_session_keeps_the_cap_and_says_once_what_it_costs(monkeypatch, said):
    workers = sessions()
    assert train(workers, [FAST, SLOW, SLOW], PATIENCE - 1, monkeypatch) == (64, 16, 16)
    assert not said("largest batch")
    train(workers, [FAST, SLOW, SLOW], 2 * PATIENCE, monkeypatch)
    (text,) = said("largest batch")
    assert "worker 0 has had 64 samples" in text
    assert "by default (twice an even share), because its memory is not known" in text
    assert "speed is that of 80 samples" in text
    assert "100% longer" in text  # 16 samples at 40 a second, instead of 8
    assert "limits=lbbsp_core.Limits(1, 96)" in text


def test_a_worker_that_is_twice_as_fast_gives_no_notice(monkeypatch, said):
    workers = sessions(min_gain=0.0)
    train(workers, [FAST, Proportional(100.0), Proportional(100.0)], 50, monkeypatch)
    assert workers[0].sizes == (64, 16, 16)
    assert not said("largest batch")


bounds = st.builds(
    lambda minimum, extra: Limits(minimum, None if extra is None else minimum + extra),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(0, 8)),
)


def has_plan(constraints):
    """Tries all plans, worker after worker: their sums so far, and remainders so far."""
    total = constraints.global_batch_size
    found = {(0, 0)}
    for limits in constraints.limits:
        sizes = range(limits.minimum, min(limits.maximum or total, total) + 1)
        found = {
            (done + size, odd + (size % constraints.granularity > 0))
            for (done, odd), size in product(found, sizes)
            if done + size <= total
        }
    return not {(total, 0), (total, 1)}.isdisjoint(found)


@given(
    st.lists(bounds, min_size=2, max_size=4),
    st.integers(1, 24),
    st.integers(1, 6),
    st.integers(1, 24),
)
def test_the_cap_is_raised_just_as_far_as_a_plan_needs(limits, total, granularity, cap):
    total = max(total, sum(each.minimum for each in limits))
    known = BatchConstraints(total, tuple(limits), granularity)

    def within(cap):
        each = (
            replace(one, maximum=max(cap, one.minimum)) if one.maximum is None else one
            for one in limits
        )
        return replace(known, limits=tuple(each))

    bounded = with_cap(known, cap)
    if all(one.maximum is not None for one in limits) or not has_plan(known):
        assert bounded == known
    else:
        used = next(n for n in range(cap, total + cap + 1) if within(n) == bounded)
        assert has_plan(bounded)
        assert used == cap or (used > cap and not has_plan(within(used - 1)))
        bounded.plan([Proportional(1.0)] * len(limits))


def with_memory(*known):
    """Balancers of workers with these largest batches, None where memory is unknown."""
    costs = [
        None if batch is None else Profile([1, 2], [0.001, 0.002], out_of_memory_at=batch + 1)
        for batch in known
    ]
    made = [
        Balancer(
            rank=rank,
            workers=len(known),
            global_batch_size=X,
            predictor=LastValue(),
            policy=LoadBalanced(min_gain=0.0),
            cost=cost,
            bounds=BatchBounds(default_maximum=True),
        )
        for rank, cost in enumerate(costs)
    ]
    rows = [each.static_info() for each in made]
    for each in made:
        each.set_peers(rows)
    return made


def test_small_memories_raise_the_cap_of_the_others():
    made = with_memory(4, None, 4, 4, None, 4, 4, 4)  # 24 samples, and X = 96
    for each in made:
        assert [one.maximum for one in each.constraints.limits] == [4, 36, 4, 4, 36, 4, 4, 4]
        assert each.default_maximum == 36
        assert each.sizes(0) == (4, 36, 4, 4, 36, 4, 4, 4)
    for memories, maxima in [
        ((4, None, 4, None), [4, 48, 4, 48]),  # 88 within the usual maximum
        ((None, 80, None, None), [48, 80, 48, 48]),  # which a known memory may exceed
    ]:
        made = with_memory(*memories)
        rows = [each.static_info() for each in made]
        for each in made:
            each.set_peers(rows)  # every fit begins with a handshake
            assert [one.maximum for one in each.constraints.limits] == maxima
    with pytest.raises(ValueError, match="must be at most the sum of maxima = 20"):
        with_memory(4, 4, 4, 4, 4)


def test_the_notice_says_why_the_maximum_was_raised(said):
    made, notice = with_memory(4, None, 4, 4, None, 4, 4, 4), BoundsNotice(None)
    for _ in range(PATIENCE):
        busy = [size / (400.0 if rank == 1 else 40.0)
                for rank, size in enumerate(made[0].sizes(made[0].step))]  # fmt: skip
        exchange_in_process(made, busy)
        notice.check(made[0])
    (text,) = said("largest batch")
    assert "worker 1 has had 36 samples" in text
    assert "by default (what other workers' memory leaves), because its memory" in text


def test_a_state_is_restored_by_another_number_of_workers_with_its_own_cap(monkeypatch):
    workers = sessions(4)
    train(workers, [FAST, SLOW, SLOW, SLOW], 5, monkeypatch)
    assert workers[0].sizes == (48, 16, 16, 16)
    resumed = sessions(3)
    for each in resumed:
        each.restore(workers[each.rank].balancer.state())
        assert each.sizes == (32, 32, 32)
        assert [limits.maximum for limits in each.balancer.constraints.limits] == [64] * 3
    assert train(resumed, [FAST, SLOW, SLOW], 5, monkeypatch) == (64, 16, 16)
    same = sessions(3)
    for each in same:
        each.restore(resumed[each.rank].balancer.state())
        each.start({})
        assert each.sizes == (64, 16, 16), "the handshake keeps a restored plan"


@pytest.mark.parametrize(
    ("options", "maximum"),
    [
        ({"policy": LoadBalanced()}, 64),
        ({"policy": LoadBalanced(), "limits": Limits(2)}, None),
        ({}, None),  # even batches
    ],
)
def test_asynchronous_workers_have_the_same_cap(options, maximum):
    session = AsyncSession(
        Same(0, WORKERS), ASP(), X, SessionOptions(drivers=(), **options),
        framework="none", versions={}, facts="",
    )  # fmt: skip
    assert [limits.maximum for limits in session.constraints.limits] == [maximum] * WORKERS


def test_many_small_samples_may_have_the_work_of_the_cap():
    balancers = [
        Balancer(
            rank=rank,
            workers=3,
            global_batch_size=12,
            bounds=BatchBounds(default_maximum=True),
        )
        for rank in range(3)
    ]
    work = np.ones(12)
    work[10:] = 20.0  # nearly all of the work of a step is in two samples
    for balancer in balancers:
        order = make_order(12, 12, workers=3, shuffle=False, steps_per_epoch=1, work=work)
        balancer.use_order(order)
        assert balancer.sizes(0) == (10, 1, 1)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"short_step_seconds": 0.05}, {"short_step_seconds": 0.02}),
        ({}, {"limits": 64}),  # those of the default maximum, which a profile lifts later
    ],
)
def test_workers_compare_what_bounds_their_batches(first, other, monkeypatch):
    compared = []
    monkeypatch.setattr(handshake, "compare", lambda collectives, facts: compared.append(facts))
    for options in (first, first, other):
        chosen = SessionOptions(drivers=(), **options)
        WorkerSession(Same(0, WORKERS), X, chosen, framework="none").start({})
    before, same, after = compared
    assert before == same
    assert {name for name in before if before[name] != after[name]} == {
        "limits, granularity and policy"
    }


# Short steps


def test_short_steps_are_reported_once_and_bound_the_plan(monkeypatch, said):
    workers = sessions(short_step_seconds=0.05)
    costs = [Affine(0.008, 2e-5), Affine(0.004, 2e-5), Affine(0.001, 2e-5)]
    train(workers, costs, SHORT_STEPS + 2, monkeypatch)
    (text,) = said("too short")
    assert re.match("steps take [67] ms", text), "8.6 ms, of which it learns slowly"
    assert "short_step_seconds=0" in text
    assert max(workers[0].sizes) <= 32 * 1.2
    train(workers, costs, SHORT_STEPS, monkeypatch)
    assert len(said("too short")) == 1


@pytest.mark.parametrize(
    ("slow", "seconds", "words"),
    [
        (1, 0.010, ["within 40 % of even shares until steps take 25 ms;"]),  # no loss
        (1, 0.018, []),
        (10, 0.040, ["so that by the forecasts steps take ", "% longer"]),
        (1.2, 0.018, []),
    ],
)
def test_short_steps_are_reported_where_they_are_very_short_or_cost_much(
    slow, seconds, words, monkeypatch, said
):
    workers = sessions(workers=4, total=256)
    costs = [Affine(0.0, seconds / 64 / (slow if rank else 1)) for rank in range(4)]
    train(workers, costs, 150, monkeypatch)
    texts = said("too short")
    assert len(texts) == bool(words)
    assert all(word in texts[0] for word in words)


def test_even_batches_are_reported_and_that_they_are_balanced_again(monkeypatch, said):
    workers = sessions(workers=2, total=96)
    for step in range(90):
        fast = step % 2 * (step < 40)  # at first never the one that was fast before
        train(
            workers, [Proportional(96.0 * (1 + (rank == fast))) for rank in (0, 1)], 1, monkeypatch
        )
        assert not 20 < step < 40 or workers[0].sizes == (48, 48)
    even, balanced = said("take")
    assert re.search(r"from step \d\d on, batches are even: .* balanced ones take \d\d %", even)
    assert re.search(r"from step \d\d on, batches are balanced again: .* even ones take", balanced)
    assert workers[0].sizes == (64, 32)


def test_what_short_steps_cost_is_looked_at_in_few_steps(monkeypatch, said):
    """A look takes as long as a plan, while steps are short."""
    losses, looks = [0.3, 0.1] * 5 + [0.3] * 10, []

    def loss_of(balancer):
        looks.append(balancer.step)
        return losses[len(looks) - 1]

    monkeypatch.setattr(bounds_notice, "_loss_of_short_steps", loss_of)
    workers, costs = sessions(), [Affine(0.0, 0.020 / 32)] * WORKERS
    train(workers, costs, SHORT_STEPS + 105, monkeypatch)
    assert [later - look for look, later in pairwise(looks)] == [PATIENCE // 2] * 10
    assert not said("too short"), "never in two looks one after the other"
    train(workers, costs, 50, monkeypatch)
    assert len(said("too short")) == 1
    assert len(looks) == 12, "it is reported once"


def notices(plans, limits):
    """The notices of worker 0 about plans, the largest batch by default of which is 64."""
    known = BatchConstraints(96, limits)
    balancer = SimpleNamespace(
        default_maximum=64, known_limits=limits, is_maximum_raised=False,
        constraints=known, given_constraints=known,
        short_steps=ShortSteps(0.0), policy_state=None, step=0, lag=1,
    )  # fmt: skip
    notice = BoundsNotice(None)
    for plan in plans:
        balancer.latest_plan = plan, (None,) * len(plan)
        notice.check(balancer)


def test_a_worker_is_named_after_consecutive_plans_at_the_maximum_only(said):
    ours, theirs, even = (64, 16, 16), (16, 64, 16), (32, 32, 32)
    free = (Limits(),) * 3
    notices([ours, theirs] * PATIENCE, free)
    notices([*[ours] * (PATIENCE - 1), even] * 2, free)
    assert not said("largest batch")
    notices([ours] * PATIENCE, (Limits(1, 64), Limits(), Limits()))
    assert not said("largest batch"), "it is the maximum that the user gave, or its memory"
    notices([ours] * PATIENCE, free)
    (text,) = said("largest batch")
    assert text.startswith("worker 0 has had 64 samples in each of 20 steps")


def test_very_short_steps_are_not_said_to_take_no_time(monkeypatch, said):
    workers = sessions(short_step_seconds=0.05)
    train(workers, [Affine(3e-4, 1e-7)] * 3, SHORT_STEPS + 2, monkeypatch)
    (text,) = said("too short")
    assert "steps take 0.3 ms" in text
    assert "within 0.6 % of even shares until steps take 50 ms" in text


@pytest.mark.parametrize(
    "options", [{"short_step_seconds": 0.0}, {"policy": Even()}], ids=["off", "even"]
)
def test_no_bounds_are_reported_where_there_are_none(options, monkeypatch, said):
    workers = sessions(**options)
    costs = [Affine(0.0001, 1e-4), Affine(0.0001, 2e-4), Affine(0.0001, 2e-4)]
    sizes = train(workers, costs, SHORT_STEPS + 2, monkeypatch)
    assert not said("too short")
    assert (sizes[0] > 44) == ("policy" not in options)


def test_a_negative_threshold_is_an_error():
    with pytest.raises(ValueError, match="short_step_seconds must be"):
        WorkerSession(Same(0, 2), 8, SessionOptions(short_step_seconds=-1), framework="none")
