"""Agreement before the first step, and continuing after a restart."""

from dataclasses import dataclass

import pytest

from lbbsp_core import Balancer, DisagreementError, GlobalOrder, Limits
from lbbsp_core.policy import FixedState
from lbbsp_core.runtime.exchange.handshake import agree, compare, gather_texts
from lbbsp_core.runtime.exchange.protocol import checksum, fingerprint

X = 12


def balancer(rank=0, workers=2, **options):
    return Balancer(rank=rank, workers=workers, global_batch_size=X, **options)


class Gathers:
    """Collectives in which the other workers say what `others` make of this worker's values."""

    def __init__(self, *others):
        self.others = others

    def all_gather(self, values):
        return [list(values), *(other(list(values)) for other in self.others)]


def test_agreement_introduces_the_workers():
    mine = balancer()
    rows = agree(mine, GlobalOrder(50, X, seed=1), Gathers(lambda v: v), {"epochs": 2})
    assert rows == [mine.static_info()] * 2


@pytest.mark.parametrize(
    "name", ["workers", "global_batch_size", "seed", "steps_per_epoch", "epochs", "sample order"]
)
def test_a_worker_that_differs_is_named(name):
    mine = balancer()
    order = GlobalOrder(50, X, seed=1)
    names = ["workers", "global_batch_size", "lag", "number of samples", "seed",
             "steps_per_epoch", "epochs", "number of completed steps", "lbbsp version", "policy",
             "sample order"]  # fmt: skip

    def other(values):
        return [v + (i == names.index(name)) for i, v in enumerate(values)]

    with pytest.raises(DisagreementError, match=f"disagree on {name}: worker 0 has .*, worker 1"):
        agree(mine, order, Gathers(other), {"epochs": 2})


@dataclass(frozen=True)
class Turns:
    """A plan that changes every step."""

    uses_costs = True
    is_static = False
    needs_common_steps = False
    accepts_narrower_limits = False

    def init(self, cluster):
        return FixedState((6, 6))

    def update(self, state, cluster, observation):
        return FixedState(((4, 8), (9, 3), (1, 11))[observation.step % 3])


def run(balancers, steps):
    """Sizes of each step, and what the workers drew."""
    sizes, drawn = [], []
    for _ in range(steps):
        step = balancers[0].step
        sizes.append(balancers[0].sizes(step))
        drawn.append([one.local_indices(step).tolist() for one in balancers])
        messages = [one.report(0.1 * (2 + one.rank)) for one in balancers]
        for one in balancers:
            one.receive(messages, 0.3)
    return sizes, drawn


def pair(lag=1, samples=50):
    both = [balancer(rank, policy=Turns(), lag=lag) for rank in (0, 1)]
    for one in both:
        one.use_order(GlobalOrder(samples, X, seed=4))
    return both


@pytest.mark.parametrize("at", [0, 1, 4, 5, 7])
def test_a_restored_run_goes_on_as_if_unbroken(at):
    whole, first, second = pair(), pair(), pair()
    expected = [part[at:] for part in run(whole, 12)]
    run(first, at)
    for one, other in zip(first, second, strict=True):
        other.restore(one.state())
        other.use_order(GlobalOrder(50, X, seed=4))
    found = run(second, 12 - at)
    assert list(found) == expected
    assert [repr(one.state()) for one in whole] == [repr(one.state()) for one in second]


def test_the_plan_in_force_is_restored_with_its_policy():
    first, fresh = pair(), pair()[0]
    run(first, 3)
    fresh.restore(first[0].state())
    assert fresh.report(0.2).checksum == checksum((1, 11))


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (1, 11)),
        ({"limits": Limits(1, 11)}, (1, 11)),
        ({"limits": Limits(1, 10)}, (6, 6)),  # out of memory: continued with smaller batches
        ({"limits": Limits(2)}, (6, 6)),
        ({"granularity": 2}, (6, 6)),
    ],
)
def test_plans_that_the_new_run_forbids_are_not_restored(options, sizes):
    first, fresh = pair(), balancer(0, policy=Turns(), **options)
    run(first, 3)
    fresh.restore(first[0].state())
    assert (fresh.step, fresh.sizes(3)) == (3, sizes)


def test_a_longer_lag_keeps_the_plans_that_are_decided():
    first, second = pair(lag=2, samples=600), pair(lag=4, samples=600)
    run(first, 3)
    before = [first[0].sizes(step) for step in (3, 4)]
    for one, other in zip(first, second, strict=True):
        other.restore(one.state())
    assert [second[0].sizes(step) for step in (3, 4, 5, 6)] == [*before, before[1], before[1]]
    run(second, 4)


def test_the_place_survives_another_number_of_workers():
    first = pair()
    run(first, 3)
    alone = Balancer(rank=0, workers=3, global_batch_size=X)
    alone.restore(first[1].state())
    assert (alone.step, alone.sizes(3)) == (3, (4, 4, 4))
    assert alone.local_indices(3).tolist() == GlobalOrder(50, X, seed=4).indices(3)[:4].tolist()


def test_what_was_learned_of_one_worker_is_not_another_ones():
    first = pair()
    run(first, 5)
    fresh = [balancer(rank, policy=Turns()) for rank in (0, 1)]
    for one in fresh:
        one.restore(first[0].state())
    speeds = [one.report(float("nan")).picoseconds_per_sample for one in fresh]
    assert speeds[0] > 0
    assert speeds[1] == 0


@pytest.mark.parametrize(("step", "end"), [(0, 5), (4, 5), (5, 10), (9, 10)])
def test_the_end_of_the_running_epoch(step, end):
    one = pair()[0]
    one.skip_to(step)
    assert one.epoch_end_step() == end


def test_no_epochs_without_an_order():
    with pytest.raises(LookupError, match=r"call use_order\(\) first"):
        balancer().epoch_end_step()


class Texts:
    """Collectives of two workers, of which the other has other texts."""

    def __init__(self, other):
        self.other, self.said = other, []

    def all_gather(self, values):
        other = self.other
        theirs = ([fingerprint(other)], [len(other.encode())], _numbers(other))[len(self.said)]
        self.said.append(values)
        return [list(values), [*theirs, *[0] * (len(values) - len(theirs))]]


def _numbers(text):
    """The integers of a text, as another worker sends them."""

    class Alone:
        def all_gather(self, values):
            self.values = list(values)
            return [self.values]

    alone = Alone()
    assert gather_texts(alone, text) == [text.encode()]
    return alone.values


@pytest.mark.parametrize("text", ["", "a", "abcde", "abcdef", "é" * 99, "x" * 30_000])
def test_texts_of_any_length_are_gathered(text):
    assert bytes(gather_texts(Gathers(lambda v: v), text)[1]).decode() == text


def test_a_text_that_differs_is_shown_around_the_difference():
    mine, theirs = "SGD " + "x" * 500 + " rate 0.1", "SGD " + "x" * 500 + " rate 0.25"
    with pytest.raises(DisagreementError) as caught:
        compare(Texts(theirs), {"optimizer": mine})
    assert str(caught.value).startswith("workers disagree on optimizer: worker 0 has ...x")
    assert "rate 0.1, worker 1 has ...x" in str(caught.value)
    assert "rate 0.25; start all workers with the same optimizer" in str(caught.value)
    with pytest.raises(DisagreementError, match="worker 0 has mse, worker 1 has mae; start all"):
        compare(Texts("mae"), {"loss": "mse"})


def test_equal_texts_are_gathered_once():
    collectives = Texts("same")
    compare(collectives, {"loss": "same"})
    assert len(collectives.said) == 1
