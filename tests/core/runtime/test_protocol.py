"""The exchange: integers that every framework's float32 all-reduce carries exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import DisagreementError, StepMessage
from lbbsp_core.resources import FACTORS
from lbbsp_core.runtime.exchange.handshake import compare_facts
from lbbsp_core.runtime.exchange.protocol import (
    WIDTH,
    PeerInfo,
    checksum,
    decode,
    encode,
    fingerprint,
    pack,
    pack_float,
    unpack,
    unpack_float,
)

LARGEST = 2**48 - 1
EDGES = [0, 1, 2**24 - 1, 2**24, 2**24 + 1, 2**47, LARGEST - 1, LARGEST]

integers = st.one_of(st.sampled_from(EDGES), st.integers(0, LARGEST))
messages = st.builds(
    StepMessage,
    integers,
    integers,
    integers,
    st.integers(0, 2**24 - 1),
    st.booleans(),
    st.dictionaries(
        st.sampled_from(FACTORS),
        st.integers(0, 16_000_000).map(lambda hundredths: hundredths / 100),
    ),
    retraced=st.booleans(),
    hidden_nanoseconds=integers,
    extra=st.tuples(st.integers(0, 2**24 - 1), st.integers(0, 2**24 - 1)),
)


@given(st.lists(integers, max_size=8))
def test_integers_are_exact_through_float32(values: list[int]) -> None:
    row = pack(values)
    assert row.dtype == np.float32
    assert row.shape == (2 * len(values),)
    assert unpack(row) == values


def test_what_lies_outside_is_clamped() -> None:
    assert unpack(pack([-1, LARGEST + 1, 10**30])) == [0, LARGEST, LARGEST]


@given(
    st.lists(st.tuples(st.integers(0, 10**6), *[st.integers(0, 10**9)] * 2), min_size=1),
    st.one_of(st.none(), st.integers(1, 10**6)),
)
def test_introductions_cross_in_millionths_of_a_sample(
    pieces: list[tuple[int, int, int]], most: int | None
) -> None:
    shape = tuple((start, work / 1e6, slope / 1e6) for start, work, slope in pieces)
    static_info = PeerInfo(shape, most, overhead=1.5)
    assert PeerInfo.unpack(static_info.pack()) == static_info


@given(messages)
def test_messages_are_exact_through_float32(message: StepMessage) -> None:
    row = encode(message)
    assert (row.shape, row.dtype) == ((WIDTH + 2,), np.float32)
    assert decode(row) == message
    assert decode(row.tolist()) == message


@given(st.lists(messages, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_sum_of_one_hot_slots_is_an_exact_gather(sent: list[StepMessage], random: object) -> None:
    """In whatever order an all-reduce adds, and in float32."""
    slots = np.zeros((len(sent), len(sent), WIDTH + 2), np.float32)
    for rank, message in enumerate(sent):
        slots[rank, rank] = encode(message)
    order = list(range(len(sent)))
    random.shuffle(order)  # type: ignore[attr-defined]
    total = np.zeros((len(sent), WIDTH + 2), np.float32)
    for rank in order:
        total += slots[rank]
    assert [decode(row) for row in total] == sent


def test_checksums_are_24_bits_of_the_whole_plan() -> None:
    plans = [(a, b, 100 - a - b) for a in range(30) for b in range(30)]
    sums = [checksum(plan) for plan in plans]
    assert all(0 <= value < 2**24 for value in sums)
    assert len(set(sums)) >= len(plans) - 1
    assert checksum([1, 2]) == checksum((1, 2))
    assert checksum((1, 2)) != checksum((2, 1))


def test_fingerprints_fit_and_differ() -> None:
    assert fingerprint("seed 0") != fingerprint("seed 1")
    assert 0 <= fingerprint("any text") < 2**31


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("seed", (7, 7, 8), "disagree on seed: worker 0 has 7, worker 2 has 8; .* the same seed"),
        ("number of samples", (70, 69), "worker 0 has 70, worker 1 has 69; pass the whole data"),
    ],
)
def test_a_disagreement_names_fact_ranks_values_and_remedy(
    name: str, values: tuple[int, ...], message: str
) -> None:
    compare_facts(["workers", name], [[3, values[0]]] * 3)
    compare_facts([], [[], []])
    with pytest.raises(DisagreementError, match=message):
        compare_facts(["workers", name], [[3, value] for value in values])


@given(st.floats())
def test_the_bits_of_a_float_survive(value):
    halves = pack_float(value)
    assert [*halves] == unpack(pack(halves))
    assert pack_float(unpack_float(halves)) == halves


def test_driving_factors_are_cut_off_where_an_integer_ends() -> None:
    sent = StepMessage(1, 2, 3, 4, drivers={"runnable": 1e9, "steal_percent": 12.344})
    assert decode(encode(sent)).drivers == {"runnable": 167_772.14, "steal_percent": 12.34}
