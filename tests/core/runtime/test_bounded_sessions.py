"""What sessions bound by default, on CPUs and GPUs, and their notices about it."""

import itertools
import logging
import re
from types import SimpleNamespace

import pytest
from teams import play, team
from worker_threads import Threads, run, sessions, train

from lbbsp_core import (
    ASP,
    Affine,
    BatchConstraints,
    DisagreementError,
    Even,
    LeaderStraggler,
    Limits,
    LoadBalanced,
    Profile,
    Proportional,
    ProportionalControl,
    SessionOptions,
    WorkerSession,
)
from lbbsp_core.resources.sampler import MEMORY_OF_GPU
from lbbsp_core.runtime.asynchronous.async_session import AsyncSession
from lbbsp_core.runtime.exchange.handshake import Devices
from lbbsp_core.runtime.exchange.protocol import WIDTH, decode, encode
from lbbsp_core.runtime.extensions import bounds_notice
from lbbsp_core.runtime.extensions.bounds_notice import PATIENCE, SHORT_STEPS, BoundsNotice
from lbbsp_core.runtime.planning.bounds import BatchBounds

FREE = (Limits(),) * 3
OURS, THEIRS = (64, 16, 16), (16, 64, 16)  # plans at the maximum of worker 0, and of worker 1
CPU = Devices()
GPU, SHOWN = Devices(("some GPU",), are_gpus=True), Devices(("some GPU",), True, True)


def speeds(*samples_per_second):
    return [Proportional(speed) for speed in samples_per_second]


def asynchronous(workers, total, **options):
    chosen = SessionOptions(drivers=(), **options)
    arguments = Threads(0, workers, None), ASP(), total, chosen
    return AsyncSession(*arguments, framework="none", versions={}, facts="")


@pytest.fixture
def said(caplog):
    """Returns the warnings so far that contain a text."""
    caplog.set_level(logging.WARNING, "lbbsp.session")
    return lambda text: [r.getMessage() for r in caplog.records if text in r.getMessage()]


# Options


@pytest.mark.parametrize(
    ("total", "options", "message"),
    [
        (3, {}, "global_batch_size must be at least workers * minimum = 4, got 3"),
        (-1, {}, "global_batch_size must be an integer >= 0, got -1"),
        ("96", {}, "global_batch_size must be an integer >= 0, got '96'"),
        (96, {"granularity": 0}, "granularity must be an integer >= 1, got 0"),
        (96, {"granularity": "8"}, "granularity must be an integer >= 1, got '8'"),
    ],
)
@pytest.mark.parametrize("policy", ["lbbsp", "bsp"])
def test_wrong_sizes_are_refused_by_name(total, options, message, policy):
    options = {**options, "policy": policy}
    with pytest.raises(ValueError, match=re.escape(message)):
        WorkerSession(Threads(0, 4, None), total, SessionOptions(**options), framework="none")
    with pytest.raises(ValueError, match=re.escape(message)):
        asynchronous(4, total, **options)


@pytest.mark.parametrize(
    "options",
    [
        [{"short_step_seconds": 0.05}, {"short_step_seconds": 0.02}],
        [{}, {"limits": 8}],  # those of the default maximum, which a profile lifts later
    ],
)
def test_workers_compare_what_bounds_their_batches(options):
    def start(session, _):
        session.start({})

    run(start, workers=3, options=lambda rank: SessionOptions(**options[0]))
    with pytest.raises(DisagreementError, match="on limits, granularity and policy: worker 0 has"):
        run(start, workers=3, options=lambda rank: SessionOptions(**options[rank == 2]))


# The largest batch by default


@pytest.mark.parametrize(
    ("options", "maximum"),
    [
        ({"policy": LoadBalanced()}, 64),
        ({"policy": LoadBalanced(), "limits": Limits(2)}, None),
        ({}, None),  # even batches
    ],
)
def test_asynchronous_workers_have_the_same_cap(options, maximum):
    limits = asynchronous(3, 96, **options).constraints.limits
    assert [each.maximum for each in limits] == [maximum] * 3


def test_a_session_keeps_the_cap_and_says_once_what_it_costs(said):
    workers, costs = sessions(), speeds(400, 40, 40)
    assert train(workers, costs, PATIENCE - 1)[-1] == (64, 16, 16)
    assert not said("largest batch")
    train(workers, costs, 2 * PATIENCE)
    (text,) = said("largest batch")
    assert "worker 0 has had 64 samples in each of 20 steps" in text
    assert "by default (twice an even share), because its memory is not known" in text
    assert "speed is that of 80 samples" in text
    assert "100% longer" in text  # 16 samples at 40 a second, instead of 8
    assert "limits=lbbsp_core.Limits(1, 96)" in text


def test_a_worker_that_is_twice_as_fast_gives_no_notice(said):
    assert train(sessions(min_gain=0.0), speeds(400, 100, 100), 50)[-1] == (64, 16, 16)
    assert not said("largest batch")


def test_the_notice_says_why_the_maximum_was_raised(said):
    known = Profile([1, 2], [0.001, 0.002], out_of_memory_at=5)
    options = {"policy": LoadBalanced(min_gain=0.0), "bounds": BatchBounds(default_maximum=True)}
    costs = [known, None, known, known, None, known, known, known]
    made, notice = team(8, 96, costs, **options), BoundsNotice(None)
    for _ in play(made, speeds(40, 400, *[40] * 6), PATIENCE + 1):
        notice.check(made[0])
    (text,) = said("largest batch")
    assert "worker 1 has had 36 samples" in text
    assert "by default (what other workers' memory leaves), because its memory" in text


@pytest.mark.parametrize(
    ("plans", "limits", "words"),
    [
        ([OURS] * PATIENCE, FREE, "worker 0 has had 64 samples in each of 20 steps"),
        ([OURS, THEIRS] * PATIENCE, FREE, ""),
        ([*[OURS] * (PATIENCE - 1), (32, 32, 32)] * 2, FREE, ""),
        # It is the maximum that the user gave, or its memory.
        ([OURS] * PATIENCE, (Limits(1, 64), Limits(), Limits()), ""),
    ],
)
def test_a_worker_is_named_after_consecutive_plans_at_the_maximum_only(plans, limits, words):
    notice, texts = BoundsNotice(None), []
    constraints, schedule = BatchConstraints(96, limits), SimpleNamespace()
    bounds = SimpleNamespace(default_maximum=64, required=constraints, is_maximum_raised=False)
    balancer = SimpleNamespace(bounds=bounds, constraints=constraints, schedule=schedule)
    for plan in plans:
        schedule.latest_plan = plan, (None,) * 3
        texts.append(notice._check_maximum(balancer))
    assert "".join(texts).startswith(words)
    assert any(texts) == bool(words)


# Short steps


def test_short_steps_are_reported_once_and_bound_the_plan(said):
    workers = sessions(short_step_seconds=0.05)
    costs = [Affine(0.008, 2e-5), Affine(0.004, 2e-5), Affine(0.001, 2e-5)]
    assert max(train(workers, costs, SHORT_STEPS + 2)[-1]) <= 32 * 1.2
    (text,) = said("too short")
    assert re.match("steps take [67] ms", text), "8.6 ms, of which it learns slowly"
    assert "short_step_seconds=0" in text
    train(workers, costs, SHORT_STEPS)
    assert len(said("too short")) == 1


@pytest.mark.parametrize(
    ("slow", "seconds", "words"),
    [
        (1, 0.010, ["within 40 % of even shares until steps take 25 ms;"]),  # no loss
        (1, 0.018, []),
        (10, 0.040, ["so that by the forecasts steps take ", "% longer"]),
        (1.2, 0.018, []),
        (1, 0.0001, ["steps take 0.1 ms", "within 0.4 % of even shares"]),  # not 0
    ],
)
def test_short_steps_are_reported_where_they_are_very_short_or_cost_much(
    slow, seconds, words, said
):
    costs = [Affine(0.0, seconds / 64 / (slow if rank else 1)) for rank in range(4)]
    train(sessions(4, 256), costs, SHORT_STEPS + 30)
    texts = said("too short")
    assert len(texts) == bool(words)
    assert all(word in texts[0] for word in words)


def test_even_batches_are_reported_and_that_they_are_balanced_again(said):
    workers = sessions(2)
    for step in range(90):
        fast = step % 2 * (step < 40)  # at first never the one that was fast before
        train(workers, speeds(*(96 * (1 + (rank == fast)) for rank in (0, 1))), 1)
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
    workers, costs = sessions(), [Affine(0.0, 0.020 / 32)] * 3
    train(workers, costs, SHORT_STEPS + 105)
    assert [later - look for look, later in itertools.pairwise(looks)] == [PATIENCE // 2] * 10
    assert not said("too short"), "never in two looks one after the other"
    train(workers, costs, 50)
    assert len(said("too short")) == 1
    assert len(looks) == 12, "it is reported once"


@pytest.mark.parametrize(
    "options", [{"short_step_seconds": 0.0}, {"policy": Even()}], ids=["off", "even"]
)
def test_no_bounds_are_reported_where_there_are_none(options, said):
    costs = [Affine(0.0001, 1e-4), Affine(0.0001, 2e-4), Affine(0.0001, 2e-4)]
    sizes = train(sessions(**options), costs, SHORT_STEPS + 2)[-1]
    assert not said("too short")
    assert (sizes[0] > 44) == ("policy" not in options)


# Growth


def test_a_fast_worker_is_led_to_the_end_of_its_memory_in_steps():
    """Two workers, one of them with three times the speed and half the memory, and no profile."""
    plans = train(sessions(2, 256, devices=[GPU, GPU]), speeds(300, 100), 29)
    assert plans[-1] == (192, 64), "its speed"
    largest = list(itertools.accumulate((x for x, _ in plans), max, initial=128))
    assert all(new <= 1.5 * old for old, new in itertools.pairwise(largest))
    for limits in (Limits(1, 256), Limits(2)):
        free = sessions(2, 256, devices=[GPU, GPU], limits=limits)
        assert train(free, speeds(3000, 100), 2)[-1] == (248, 8), "limits allow it at once"


@pytest.mark.parametrize(
    "policy",
    [
        LoadBalanced(),
        LoadBalanced(min_gain=0.0),
        ProportionalControl(interval=1),
        LeaderStraggler(delta=1000, window=1),
    ],
    ids=repr,
)
def test_a_batch_grows_as_far_as_the_memory_in_use_allows(policy):
    """The weights need 10 %, 170 samples 85 %, which stay in the pool of the framework."""
    pool = {0: 0, 1: 0}

    def used(rank, size):
        pool[rank] = max(pool[rank], size)
        return 10 + pool[rank] / 2 if rank == 0 else 5.0

    def largest(device):
        options = {"policy": policy, "drivers": (MEMORY_OF_GPU,), "granularity": 1}
        workers = sessions(2, 256, devices=[device] * 2, **options)
        return max(x for x, _ in train(workers, speeds(900, 100), 59, used))

    assert 165 <= largest(SHOWN) <= 170
    assert largest(GPU) > 200, "the framework has taken all memory in advance"


def test_a_profile_bounds_a_batch_instead_of_the_memory_in_use():
    profile = Profile([8, 16], [0.1, 0.2], out_of_memory_at=201)
    workers = sessions(2, 256, devices=[SHOWN] * 2, cost=profile, drivers=(MEMORY_OF_GPU,))
    assert train(workers, speeds(900, 100), 8, lambda rank, size: 95.0)[-1] == (200, 56)


# Granularity


@pytest.mark.parametrize(
    ("devices", "total", "options", "granularity"),
    [
        ((CPU, CPU), 256, {}, 1),
        ((GPU, GPU), 256, {}, 8),
        ((CPU, GPU), 256, {}, 8),
        ((GPU, GPU), 126, {}, 1),
        ((GPU, GPU), 256, {"granularity": 1}, 1),
        ((GPU, GPU), 256, {"granularity": 4}, 4),
    ],
    ids=["CPUs", "GPUs", "one GPU", "small batches", "given 1", "given 4"],
)
def test_workers_on_gpus_agree_on_multiples_of_eight(devices, total, options, granularity):
    for each in sessions(2, total, devices=devices, **options):
        assert each.balancer.constraints.granularity == granularity


@pytest.mark.parametrize(
    ("speed", "options", "notices"), [(150, {}, 1), (100, {}, 0), (150, {"granularity": 8}, 0)]
)
def test_what_the_default_granularity_costs_is_said_once(speed, options, notices, said):
    train(sessions(2, 130, devices=[GPU, GPU], **options), speeds(speed, 100), 60)
    texts = said("multiples")
    assert len(texts) == notices
    assert all("multiples of 8 samples" in text and "2.6 % longer" in text for text in texts)


# Retraces


def test_after_a_retrace_all_sizes_are_new(monkeypatch):
    def sizes_of(worker):
        return [each.sizes for each in worker.balancer.first_uses]

    workers, equal = sessions(2, 256), speeds(100, 100)
    train(workers, equal, 3)
    assert sizes_of(workers[1]) == [{128}, {128}]
    workers[0].exclude_step(retraced=True)
    monkeypatch.setattr(
        "lbbsp_core.runtime.planning.balancer.LoadBalanced.update",
        lambda self, state, constraints, seen: state._replace(sizes=(130, 126)),
    )
    train(workers, equal, 2)
    assert [sizes_of(each) for each in workers] == [[{128, 130}, {128, 126}]] * 2
    workers[1].exclude_step(retraced=True)
    train(workers, equal, 1)
    assert sizes_of(workers[0]) == [{128, 130}, {126}]
    assert [one.largest for one in workers[0].balancer.first_uses] == [130, 128]
    assert not decode(workers[1].before_allreduce()).retraced, "only once"
    assert len(encode(decode([0.0] * WIDTH))) == WIDTH
