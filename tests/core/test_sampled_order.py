"""Sampled order: what a sampler gives occurs exactly once, for any plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.checkpoint.checkpoint import from_json, to_json
from lbbsp_core.sampled_order import SampledOrder, cut, order_of


def sampled(items: list[object], total: int, workers: int = 1, epochs: int = 1) -> SampledOrder:
    indices, ends, by_batch, dropped = cut(items, total, workers)
    order = SampledOrder(len(indices), total, len(ends), by_batch, bool(dropped))
    for epoch in range(epochs):
        order.draw(epoch, indices, ends)
    return order


def any_plan(data: st.DataObject, workers: int, total: int) -> list[int]:
    cuts = data.draw(st.lists(st.integers(0, total), min_size=workers - 1, max_size=workers - 1))
    return np.diff([0, *sorted(cuts), total]).tolist()


@given(st.data(), st.integers(1, 4), st.integers(4, 9))
def test_each_given_index_occurs_once_under_changing_plans(
    data: st.DataObject, workers: int, total: int
) -> None:
    index = st.integers(0, 50)  # with replacement: a weighted sampler
    given = data.draw(st.lists(index, min_size=total, max_size=40))
    order = sampled(given, total, workers)
    kept = len(given) - (len(given) % total if len(given) % total < workers else 0)
    seen: list[int] = []
    for step in range(order.steps_per_epoch):
        assert order.position(step) == len(seen)
        sizes = any_plan(data, workers, order.size(step))
        for rank in range(workers):
            seen += order.slice(step, rank, sizes).tolist()
    assert seen == given[:kept]
    assert order.drop_last == (kept < len(given))


@given(st.data(), st.integers(1, 4), st.integers(4, 9))
def test_batches_of_a_sampler_are_the_steps(data: st.DataObject, workers: int, total: int) -> None:
    batch = st.lists(st.integers(0, 50), min_size=workers, max_size=total)
    batches = data.draw(st.lists(batch, min_size=1, max_size=9))
    order = sampled(list(batches), total, workers)
    assert [order.indices(step).tolist() for step in range(order.steps_per_epoch)] == batches
    assert [order.size(step) for step in range(order.steps_per_epoch)] == list(map(len, batches))
    before = np.cumsum([0, *map(len, batches)])
    assert [order.position(step) for step in range(len(batches))] == before[:-1].tolist()
    assert order.position(len(batches)) == order.num_samples == before[-1]


def test_batches_with_fewer_samples_than_workers_are_dropped() -> None:
    indices, ends, by_batch, dropped = cut([[1, 2], [3], [4, 5]], 2, workers=2)
    assert (indices.tolist(), ends.tolist(), by_batch, dropped) == ([1, 2, 4, 5], [2, 4], True, 1)


@pytest.mark.parametrize("items", [list(range(10)), [[3, 1], [2, 0, 4, 6], [5, 7, 8, 9]]])
def test_a_snapshot_within_an_epoch_holds_its_samples(items: list[object]) -> None:
    order = sampled(items, 4, epochs=2)
    arrays: dict[str, np.ndarray] = {}
    stored = to_json(order.snapshot(4), arrays)
    again = order_of(from_json(stored, arrays, {}))
    assert again == order
    assert [again.indices(k).tolist() for k in (3, 5)] == [
        order.indices(k).tolist() for k in (3, 5)
    ]
    fresh = sampled(list(range(9, -1, -1)), 4) if not order.by_batch else sampled(items[::-1], 4)
    fresh.adopt(again)
    assert fresh.indices(4).tolist() == order.indices(4).tolist()
    assert order.snapshot(3) == order.key, "a new epoch is drawn again"
    first = order_of(order.snapshot(1))
    assert first.indices(2).tolist() == order.indices(2).tolist()


def test_orders_of_samplers_and_of_seeds_differ() -> None:
    assert sampled(list(range(10)), 4) == sampled(list(range(10))[::-1], 4)
    assert sampled(list(range(10)), 4) != GlobalOrder(10, 4)
    assert order_of(GlobalOrder(10, 4, seed=3).snapshot(1)) == GlobalOrder(10, 4, seed=3)


def test_old_epochs_are_forgotten() -> None:
    order = sampled(list(range(8)), 4, epochs=5)
    assert [order.drawn(epoch) is not None for epoch in range(6)] == [False] * 3 + [True] * 2 + [
        False
    ]
    assert order.size(99) == 4
    with pytest.raises(LookupError, match="epoch 0 of the sampler is not drawn"):
        order.indices(1)


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([[1, 2, 3]], ValueError, "has 3 samples, more than global_batch_size = 2"),
        ([1], ValueError, "must give at least one global batch, got 1 samples"),
        ([], ValueError, "must give at least one global batch"),
        ([1, [2]], TypeError, "must give indices >= 0"),
        ([1, 2.5], TypeError, "must give indices >= 0"),
        ([-1, 2], TypeError, "must give indices >= 0"),
        (["a", "b"], TypeError, "must give indices >= 0"),
    ],
)
def test_what_is_no_order_is_named(
    items: list[object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cut(items, 2, workers=1)


def test_epochs_of_another_length_are_refused() -> None:
    order = sampled([1, 2, 3], 2)
    with pytest.raises(ValueError, match="must give 3 samples in 2 steps in every epoch"):
        order.draw(1, [1, 2], [2])
