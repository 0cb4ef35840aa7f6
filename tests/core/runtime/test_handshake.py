"""Agreement before the first step, and continuing after a restart."""

import json

import pytest
from teams import team

from lbbsp_core import DisagreementError, GlobalOrder, LastValue, Limits
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.exchange.handshake import compare
from lbbsp_core.runtime.exchange.protocol import checksum
from lbbsp_core.runtime.loop.start import agree
from lbbsp_core.testing import ChangingPlans

X = 12


def balancer(**options):
    return team(2, X, **options)[0]


class Gathers:
    """Collectives in which the other workers say what `others` make of this worker's values."""

    def __init__(self, *others):
        self.others = others

    def all_gather(self, values):
        return [list(values), *(other(list(values)) for other in self.others)]


def test_agreement_introduces_the_workers():
    mine = balancer()
    rows = agree(mine, GlobalOrder(50, X, seed=1), Gathers(lambda v: v), {"epochs": 2})
    assert [row.static_info for row in rows] == [mine.static_info()] * 2


@pytest.mark.parametrize(
    "name", ["workers", "global_batch_size", "seed", "steps_per_epoch", "epochs", "sample order"]
)
def test_a_worker_that_differs_is_named(name, monkeypatch):
    mine = balancer()
    order = GlobalOrder(50, X, seed=1)

    def other(data):
        facts = json.loads(data)
        value = facts[name]
        return json.dumps({**facts, name: value + (1 if isinstance(value, int) else "?")}).encode()

    monkeypatch.setattr(handshake, "gather_bytes", lambda _, data: [data, other(data)])
    with pytest.raises(DisagreementError, match=f"disagree on {name}: worker 0 has .*, worker 1"):
        agree(mine, order, Gathers(), {"epochs": 2})


TURNS = ChangingPlans(((6, 6), (4, 8), (9, 3), (1, 11)))


@pytest.fixture
def run():
    """Two workers whose plan changes every step, after three steps of an epoch of five."""
    both = team(2, X, policy=TURNS)
    for one in both:
        one.schedule.use_order(GlobalOrder(50, X, seed=4))
    for _ in range(3):
        messages = [one.report(0.1 * (2 + one.rank)) for one in both]
        for one in both:
            one.receive(messages, 0.3)
    return both


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
def test_plans_that_the_new_run_forbids_are_not_restored(run, options, sizes):
    fresh = balancer(policy=TURNS, **options)
    fresh.restore(run[0].state())
    assert (fresh.step, fresh.sizes(3)) == (3, sizes)
    assert fresh.report(0.2).checksum == checksum((3, *sizes))


def test_what_was_learned_of_one_worker_is_not_another_ones_or_another_predictors(run):
    fresh = *team(2, X), balancer(predictor=LastValue())
    for one in fresh:
        one.restore(run[0].state())
    speeds = [one.report(float("nan")).picoseconds_per_sample for one in fresh]
    assert speeds[0] > 0
    assert speeds[1:] == [0, 0]


@pytest.mark.parametrize(("step", "end"), [(3, 5), (4, 5), (5, 10), (9, 10)])
def test_the_end_of_the_running_epoch(run, step, end):
    run[0].schedule.skip_to(step)
    assert run[0].schedule.epoch_end_step() == end


def test_no_epochs_without_an_order():
    with pytest.raises(LookupError, match=r"call use_order\(\) first"):
        balancer().schedule.epoch_end_step()


LONG = "SGD " + "x" * 500 + " rate 0."


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ({"loss": "mse"}, {"loss": "mae"}, r"worker 0 has mse, worker 1 has mae; start all"),
        (  # around the difference
            {"optimizer": LONG + "1"},
            {"optimizer": LONG + "25"},
            r"^workers disagree on optimizer: worker 0 has \.\.\.x.* rate 0\.1, worker 1 has"
            r" \.\.\.x.* rate 0\.25; start all workers with the same optimizer",
        ),
        # facts that only one worker has
        ({}, {"epochs": 3}, "epochs: worker 0 has None, worker 1 has 3"),
    ],
)
def test_texts_that_differ_are_shown(monkeypatch, mine, theirs, message):
    monkeypatch.setattr(
        handshake, "gather_bytes", lambda _, data: [data, json.dumps(theirs).encode()]
    )
    with pytest.raises(DisagreementError, match=message):
        compare(None, mine)


def test_ends_of_very_long_texts_are_compared():
    texts = ["x" * 50_000 + end for end in "ab"]
    told = []

    class Recording:
        def all_gather(self, values):
            told.append(list(values))
            return [list(values)]

    for text in texts:
        compare(Recording(), {"optimizer": text})
    assert told[1] != told[3]
