"""State of a session for checkpoints: gathered from all workers, restored by any number of them."""

import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import worker_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from teams import meet, plan, team

from lbbsp_core import Balancer, Ema, GlobalOrder, LastValue, Limits, Profile
from lbbsp_core.registry import POLICIES, PREDICTORS
from lbbsp_core.runtime.checkpoint.checkpoint import to_bytes
from lbbsp_core.runtime.exchange.collectives import gather_bytes, sums
from lbbsp_core.runtime.loop.session_state import (
    _predictor_text,
    check_same_job,
    check_states,
    gather_state,
    order_facts,
    restored_state,
)
from lbbsp_core.runtime.planning.bounds import BatchBounds
from lbbsp_core.testing import ChangingPlans

X = 24


def together(work, items):
    """Calls `work(collectives, item)` in a thread for each worker, and returns the results."""
    return worker_threads.run(
        lambda item, collectives: work(collectives, item),
        workers=len(items),
        make=lambda collectives, *_, **__: items[collectives.rank],
    )


def gathered(balancers):
    """State that all workers gather, as it is read from a file."""
    states = together(lambda collectives, one: gather_state([one], collectives), balancers)
    texts = [json.dumps(state) for state, _ in states]
    assert len(set(texts)) == 1
    return json.loads(texts[0]), states[-1][1]


def move(first, second):
    """Restores what the workers of one job have saved by those of another one."""
    state, arrays = gathered(first)
    for one in second:
        one.restore(restored_state(one, state, arrays))


def job(workers=2, total=X, costs=(), **options):
    balancers = team(workers, total, costs, **options)
    for one in balancers:
        one.schedule.use_order(GlobalOrder(10 * total, total, seed=3))
    return balancers


def run(balancers, steps):
    """Runs steps whose messages are not exchanged, so that no handshake precedes them."""
    sizes = []
    for _ in range(steps):
        sizes.append(plan(balancers))
        messages = [
            one.report(0.001 * (2 + one.rank) * (10 + sizes[-1][one.rank])) for one in balancers
        ]
        for one in balancers:
            one.receive(messages, 0.3)
    return sizes


@pytest.mark.parametrize(
    "options",
    [{"predictor": PREDICTORS.build(name)} for name in sorted(PREDICTORS)]
    + [{"policy": POLICIES.build(name, shares=(2.0, 1.0))} for name in sorted(POLICIES)]
    + [{"lag": 3}],
    ids=str,
)
def test_a_job_continues_from_a_saved_state_as_if_unbroken(options):
    whole, second = job(**options), job(**options)
    run(whole, 7)
    move(whole, second)
    assert run(second, 8) == run(whole, 8)


def short_job(workers=2, threshold=20.0):
    """A job whose steps are short for this threshold."""
    return job(
        workers,
        960,
        policy=POLICIES.build("lbbsp:min_gain=0"),
        predictor=LastValue(),
        bounds=BatchBounds(short_step_seconds=threshold),
    )


def test_the_bounds_of_short_steps_continue_as_if_unbroken():
    whole, second = short_job(), short_job()
    run(whole, 7)
    move(whole, second)
    before = whole[0].sizes(7)
    again, unbroken = run(second, 40), run(whole, 40)
    assert again == unbroken
    assert unbroken[-1] != before
    assert second[0].bounds.short_steps.state == whole[0].bounds.short_steps.state
    assert second[0].bounds.short_steps.steps == 47


def memory_job(largest, **options):
    """A job in which worker 0 knows its largest batch; the handshake tells the others."""
    profile = Profile([4, 8], [0.1, 0.2], out_of_memory_at=largest + 1)
    return job(costs=[profile, None], predictor=LastValue(), **options)


@pytest.mark.parametrize("largest", [16, 13])
def test_plans_within_memory_limits_continue_after_the_handshake(largest):
    whole, second = memory_job(16), memory_job(largest)
    meet(whole)
    run(whole, 7)
    assert whole[0].sizes(7) == (16, 8)
    move(whole, second)
    meet(second)
    if largest == 16:
        assert run(second, 8) == run(whole, 8)
    else:
        assert run(second, 9)[::8] == [(12, 12), (13, 11)]


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("steps", [3, 4, 5])
def test_plans_beyond_the_default_maximum_continue_as_if_unbroken(steps, lag):
    """Noise of layers, such as dropout, depends on the plan; those of a user exceed the maximum."""

    def capped():
        policy = ChangingPlans(((18, 3, 3), (3, 3, 18), (3, 18, 3)))
        balancers = job(3, lag=lag, policy=policy, bounds=BatchBounds(default_maximum=True))
        meet(balancers)
        return balancers

    whole, second = capped(), capped()
    run(whole, steps)
    move(whole, second)
    meet(second)
    assert run(second, 4) == run(whole, 4)


def test_plans_that_memory_limits_have_allowed_stay_before_the_handshake_and_without_them():
    """Before the handshake of its first step, a session does not know what lifts the maximum."""

    known = Profile([8, 16], [0.008, 0.016], out_of_memory_at=81), None, None, None
    sizes = (79, 7, 7, 7)

    def capped(costs=()):
        return team(4, 100, costs, predictor=LastValue(), bounds=BatchBounds(default_maximum=True))

    state = capped()[0].state()
    state = state._replace(
        step=3, plans=(sizes,), policy_state=state.policy_state._replace(sizes=sizes)
    )
    for costs, meets_before in ((known, False), (known, True), ((), False)):
        balancers = capped(costs)
        if meets_before:
            meet(balancers)
        for one in balancers:
            one.restore(state)
        if not meets_before:
            meet(balancers)
        assert plan(balancers) == sizes


def test_memory_limits_leave_plans_as_they_are_drawn():
    """Loaders draw batches before the handshake of the first step, whose plans must stay."""
    balancers = memory_job(10, lag=3)
    meet(balancers, are_drawn=True)
    assert run(balancers, 4) == [*[(12, 12)] * 3, (10, 14)]


def test_plans_that_are_drawn_stay_with_another_lag():
    """A policy of the user may exceed the default maximum, and the lag may grow in the epoch."""
    first = Balancer(rank=0, workers=2, global_batch_size=24)
    plans = ((20, 4), (20, 4))
    state = first.state()._replace(
        step=3, plans=plans, policy_state=first.state().policy_state._replace(sizes=(4, 20))
    )
    first.restore(state)
    first.use_lag(4)
    second = Balancer(rank=0, workers=2, global_batch_size=24, lag=4, limits=16)
    second.restore(state)
    for one, expected in ((first, (20, 4)), (second, (12, 12))):
        assert one.sizes(3) == one.sizes(6) == expected


def test_a_later_plan_that_limits_forbid_is_not_restored():
    """The plan in force may be allowed, and the one that was decided after it may not."""
    one, _ = team(2, 20, lag=2, limits=Limits(1, 12))
    state = one.state()._replace(step=5, plans=((10, 10), (10, 10)))
    one.restore(state._replace(policy_state=state.policy_state._replace(sizes=(15, 5))))
    assert one.sizes(5) == one.sizes(6) == one.state().policy_state.sizes == (10, 10)


def test_the_time_of_steps_is_that_of_the_same_number_of_workers():
    first, second = short_job(3), short_job(2)
    run(first, 7)
    move(first, second)
    for one in second:
        assert one.bounds.short_steps.state == (None, 0, None, 0.0, 0.0)
        one.restore(first[one.rank].state())
        assert one.bounds.short_steps.state == (None, 0, None, 0.0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": [0.1, 0.0], "steps": 1},
        {"seconds": [-1.0, 0.1], "steps": 1},
        {"seconds": ["x", 0.1], "steps": 1},
        {"seconds": [0.1], "steps": 1},
        {"seconds": [0.1] * 3, "steps": 1},
        {"seconds": [0.1] * 2},
        5,
    ],
)
def test_a_damaged_time_of_steps_is_a_value_error(wrong):
    first = short_job()
    run(first, 2)
    state, arrays = gathered(first)
    state["short_steps"]["fields"] = wrong
    with pytest.raises(ValueError, match=r"cannot be read|times? of (a step|steps) must be"):
        restored_state(first[0], state, arrays)


def test_another_number_of_workers_continues_at_the_step_with_even_plans():
    first, second = (job(each, bounds=BatchBounds(default_maximum=True)) for each in (4, 3))
    run(first, 7)
    move(first, second)
    assert [limits.maximum for limits in second[0].constraints.limits] == [16] * 3, "its own cap"
    indices = GlobalOrder(10 * X, X, 3).indices(7).reshape(3, 8).tolist()
    for one, part in zip(second, indices, strict=True):
        drawn = one.schedule.local_indices(7).tolist()
        assert (one.step, one.sizes(7), drawn) == (7, (8, 8, 8), part)
    run(second, 4)


@pytest.mark.parametrize("changed", ["predictor", "policy", "factors"])
def test_what_another_predictor_or_policy_has_learned_is_not_used(changed):
    first = job(predictor=Ema(0.3))
    run(first, 7)
    options = {"policy": POLICIES.build("lbbsp:min_gain=0.5")} if changed == "policy" else {}
    second = job(predictor=LastValue() if changed == "predictor" else Ema(0.3), **options)
    if changed == "factors":
        second[0].driver_names = ("runnable",)
    move(first, second)
    assert second[0].sizes(7) == (first[0].sizes(7) if changed != "policy" else (12, 12))
    assert bool(second[0].report(float("nan")).picoseconds_per_sample) == (changed == "policy")


class Older(NamedTuple):
    """State of `LastValue` in another version of lbbsp."""

    speed: float


@pytest.mark.parametrize(
    ("part", "options"),
    [("estimates of this worker's speed", {}), ("plans", {"policy": POLICIES.build("lbbsp")})],
)
def test_what_another_version_has_learned_is_left_out_with_a_warning(part, options, caplog):
    options = {"predictor": Ema(0.3), **options}
    first, second = job(**options), job(**options)
    run(first, 7)
    state, arrays = gathered(first)
    older = {"record": "lbbsp_core.older:State", "fields": {}}
    if part == "plans":
        state["policy_state"] = older
    else:
        own = [(_predictor_text(first[0]), np.frombuffer(to_bytes((Older(1.0), ())), np.uint8))]
        arrays["estimates of worker 0"] = np.frombuffer(to_bytes(own), np.uint8)
    for one in second:
        one.restore(restored_state(one, state, arrays))
    assert f"{part} in the checkpoint are left out" in caplog.text
    assert "saved with another predictor, policy or version of lbbsp" in caplog.text
    assert caplog.text.count("left out") == (1 if part != "plans" else 2)
    assert second[0].step == 7
    assert (second[0].sizes(7) == (12, 12)) == (part == "plans")
    run(second, 3)


def test_a_damaged_state_is_a_value_error():
    state, arrays = gathered(job())
    for damaged in (None, [], {**state, "step": "x"}, {**state, "plans": [1]}):
        with pytest.raises(ValueError, match=r"cannot be read|invalid literal"):
            restored_state(job()[0], damaged, arrays)
    for other in ({}, {"estimates of worker 0": np.zeros(3, np.uint8)}):
        with pytest.raises(ValueError, match="cannot be read"):
            restored_state(job()[0], state, other)


def test_a_foreign_job_is_refused_by_name():
    here = order_facts(GlobalOrder(10 * X, X, 3), X)
    check_same_job("folder", dict(here), here)
    other = order_facts(GlobalOrder(10 * X, X, 4), X)
    with pytest.raises(ValueError, match=r"in folder is of another job: seed was 3, and is 4 now"):
        check_same_job("folder", here, other)
    with pytest.raises(ValueError, match=r"model was None, and is 5 now"):
        check_same_job("folder", here, {**here, "model": 5})


class Held(NamedTuple):
    speed: float
    extra: object


@dataclass(frozen=True)
class Own:
    """Predictor of a user, whose state gets an object in its first update."""

    extra: object = None

    def init(self):
        return None

    def update(self, state, measurement):
        return Held(measurement.samples_per_second, self.extra)

    def predict(self, state, drivers=(), horizon=1):
        return state.speed if state else float("nan")


def test_a_state_that_cannot_be_written_is_an_error_before_the_training():
    check_states(job(predictor=Own())[0])
    with pytest.raises(TypeError, match="cannot hold object objects"):
        check_states(job(predictor=Own(object()))[0])


def test_records_that_appear_in_the_first_update_are_read():
    whole, second = job(predictor=Own()), job(predictor=Own())
    run(whole, 3)
    move(whole, second)
    assert run(second, 2) == run(whole, 2)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.binary(max_size=30), min_size=1, max_size=4))
def test_bytes_of_any_length_are_gathered(rows):
    assert together(gather_bytes, rows) == [rows] * len(rows)


def test_numbers_are_summed_in_the_order_of_ranks():
    """Any other order loses the 1."""
    rows = [[1e16, 0.1, -0.0], [-1e16, 0.2, -0.0], [1.0, 0.3, -0.0]]
    expected = [1.0, 0.1 + 0.2 + 0.3, 0.0]
    assert together(sums, rows) == [expected] * 3
    assert together(sums, [[], []]) == [[], []]
    assert together(sums, [[float("inf")], [1.0]]) == [[float("inf")]] * 2


def test_sums_of_different_numbers_of_values_are_refused_on_all_workers():
    def refusal(collectives, values):
        with pytest.raises(ValueError, match=r"number of values, got \[1, 2\] by rank"):
            sums(collectives, values)

    together(refusal, [[1.0], [1.0, 2.0]])
