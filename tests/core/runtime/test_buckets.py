"""Buckets of gradients: which ones they are, and when several of them pay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core.runtime.exchange.buckets import Transfer, choose_bytes, in_buckets

MS = 10**6  # nanoseconds
SLOW = Transfer(empty=MS, full=43 * MS, processor=7 * MS, cores=2000)  # 200 Mbit/s
NEAR = Transfer(empty=MS, full=6 * MS, processor=5 * MS, cores=2000)  # processes of one machine


@given(st.lists(st.integers(0, 200), min_size=1), st.integers(0, 300))
def test_buckets_are_filled_from_the_last_gradient_on(sizes, least):
    buckets = in_buckets(sizes, least)
    assert [place for bucket in buckets for place in bucket] == [*range(len(sizes))][::-1]
    filled = [[sizes[place] for place in bucket] for bucket in buckets]
    for bucket in filled[:-1]:
        assert sum(bucket) >= least > sum(bucket[:-1]), "closed as soon as it is full"
    assert filled[-1]
    assert sum(filled[-1][:-1]) < max(least, 1) or not least


@pytest.mark.parametrize(
    ("sizes", "least", "expected"),
    [
        ([8, 8, 8], 0, [[2, 1, 0]]),
        ([8, 8, 8], 1, [[2], [1], [0]]),
        ([8, 8, 8], 9, [[2, 1], [0]]),
        ([8, 8, 8], 24, [[2, 1, 0]]),
        ([8, 0, 8], 8, [[2], [1, 0]]),
        ([0], 1, [[0]]),
    ],
)
def test_buckets_of_some_gradients(sizes, least, expected):
    assert in_buckets(sizes, least) == expected


@pytest.mark.parametrize(
    ("transfers", "hosts", "expected"),
    [
        # It travels for 42 ms a MiB: 10 ms are a quarter of a MiB.
        ([SLOW, SLOW], "ab", 10 * 2**20 // 42),
        ([SLOW, SLOW], "aa", 10 * 2**20 // 42),  # 14 ms of work in 86 ms of two processors
        ([NEAR, NEAR], "aa", 0),  # 10 ms in 12 ms
        ([NEAR, NEAR], "ab", 2 * 2**20),  # 5 ms in 12 ms
        ([NEAR, NEAR._replace(cores=500)], "ab", 0),  # 5 ms in 3 ms of half a processor
        ([SLOW] * 6 + [NEAR] * 2, "abcdefgg", 0),
        ([SLOW, SLOW._replace(empty=3 * MS)], "ab", 30 * 2**20 // 40),
        ([Transfer(MS, MS, 0, 1000)], "a", 10 * MS * 2**20),  # nothing to measure
    ],
)
def test_buckets_pay_where_processors_are_idle_meanwhile(transfers, hosts, expected):
    assert choose_bytes(transfers, hosts) == expected
