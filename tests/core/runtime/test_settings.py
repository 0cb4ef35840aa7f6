"""Settings that workers compare in every step, and means of metrics over workers."""

import math
import struct
from types import SimpleNamespace

import pytest

from lbbsp_core import DisagreementError, SingleWorker
from lbbsp_core.runtime.exchange import collectives as collective
from lbbsp_core.runtime.exchange.collectives import weighted_mean
from lbbsp_core.runtime.extensions.settings import SettingsComparison, differences, fingerprint

RATE = {"learning rate": 0.1, "number of updates": 3, "clip_gradient": None, "mults": "1: 2"}


@pytest.mark.parametrize(
    "other",
    [
        {"learning rate": 0.10001},
        {"learning rate": math.nan},
        {"number of updates": 4},
        {"clip_gradient": 1.0},
        {"mults": ""},
    ],
)
def test_fingerprints_of_different_settings_differ(other):
    assert fingerprint({**RATE, **other}) != fingerprint(RATE)
    assert len(differences([RATE, {**RATE, **other}])) == 1


def test_fingerprints_fit_in_a_message_and_are_not_zero():
    found = {fingerprint({"learning rate": number / 1000}) for number in range(2000)}
    assert len(found) >= 1999
    assert all(0 < each < 2**24 for each in found)


def test_roundings_and_equal_numbers_that_are_none_are_no_differences():
    rounded = {**RATE, "learning rate": math.nextafter(0.1, 1)}
    assert fingerprint(rounded) == fingerprint(RATE)
    assert differences([RATE, rounded]) == []
    nothing = {"learning rate": math.nan}
    assert differences([nothing, dict(nothing)]) == []


def meet(monkeypatch, rows):
    """Lets a gather of bytes return what `rows` makes of the caller's."""
    gathered = []

    def gather(collectives, data):
        gathered.append(data)
        return rows(data)

    monkeypatch.setattr("lbbsp_core.runtime.extensions.settings.gather_bytes", gather)
    monkeypatch.setattr(collective, "gather_bytes", gather)
    return gathered


def comparison():
    """A comparison of the settings `RATE` of a worker with a peer."""
    options = SimpleNamespace(compare_weights=50)
    session = SimpleNamespace(collectives=SingleWorker(), options=options, workers=2)
    shared = SettingsComparison(session)
    shared.compare(lambda: RATE, "remedy")
    return shared


def test_a_difference_is_named_with_its_first_step_and_the_remedy(monkeypatch):
    gathered = meet(monkeypatch, lambda mine: [mine, mine.replace(b"0.1", b"0.2")])
    shared = comparison()
    shared.received(SimpleNamespace(step=6), [shared.offer()] * 2, ())
    shared.check("remedy")
    assert not gathered, "no collective where nothing differs"
    shared.received(SimpleNamespace(step=7), [shared.offer(), (5,)], ())
    shared.received(SimpleNamespace(step=8), [shared.offer(), (5,)], ())
    assert shared.disputed == 7
    message = r"learning rate \(0.1 on worker 0, 0.2 on worker 1\); this is so since step 7.*remedy"
    with pytest.raises(DisagreementError, match=message):
        shared.check("remedy")
    assert shared.disputed is None


def test_fingerprints_that_differ_by_a_rounding_are_no_error(monkeypatch):
    gathered = meet(monkeypatch, lambda mine: [mine, mine.replace(b"0.1", b"0.10000000001")])
    shared = comparison()
    shared.received(SimpleNamespace(step=6), [(1,), (2,)], ())
    shared.check("remedy")
    assert len(gathered) == 1


def gathers(monkeypatch, *others):
    packed = [struct.pack(f">{len(each)}d", *each) for each in others]
    meet(monkeypatch, lambda mine: [mine, *packed])


def test_a_mean_is_weighted_in_the_order_of_the_ranks(monkeypatch):
    gathers(monkeypatch, (3.0, 10.0, -1.0), (4.0, 0.1, math.inf))
    first, second = weighted_mean(SingleWorker(), [2.0, 1e300], weight=1)
    assert first == (1 * 2.0 + 3 * 10.0 + 4 * 0.1) / 8
    assert second == math.inf


def test_equal_values_are_not_rounded_and_workers_without_weight_do_not_count(monkeypatch):
    gathers(monkeypatch, (0.3, 0.1), (0.0, math.nan))
    assert weighted_mean(SingleWorker(), [0.1], weight=0.7) == [0.1]
    gathers(monkeypatch, (1.0, math.nan))
    assert math.isnan(weighted_mean(SingleWorker(), [1.0], weight=1)[0])


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_out_of_range_is_named_with_its_rank(monkeypatch, weight):
    gathers(monkeypatch, (weight, 1.0))
    with pytest.raises(ValueError, match=r"must be >= 0 and finite, got .* on worker 1"):
        weighted_mean(SingleWorker(), [1.0])


def test_weights_that_are_all_0_and_lengths_that_differ_are_errors(monkeypatch):
    with pytest.raises(ValueError, match="must be > 0 on at least one worker"):
        weighted_mean(SingleWorker(), [1.0], weight=0)
    gathers(monkeypatch, (1.0, 1.0, 2.0))
    with pytest.raises(DisagreementError, match="worker 0 gives 1, worker 1 gives 2"):
        weighted_mean(SingleWorker(), [1.0])


def test_a_single_worker_has_its_own_values():
    assert weighted_mean(SingleWorker(), [0.1, 0.2, 1e-300], weight=0.3) == [0.1, 0.2, 1e-300]
