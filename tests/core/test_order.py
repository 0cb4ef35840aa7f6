"""Global order: each sample occurs once per epoch, for any plans."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import GlobalOrder


@st.composite
def orders(draw: st.DrawFn) -> GlobalOrder:
    total = draw(st.integers(1, 24))
    return GlobalOrder(
        num_samples=draw(st.integers(total, 6 * total)),
        global_batch_size=total,
        seed=draw(st.integers(0, 2**40)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        steps_per_epoch=draw(st.none() | st.integers(1, 9)),
        by_batch=draw(st.booleans()),
    )


def any_plan(data: st.DataObject, workers: int, total: int) -> list[int]:
    """Draws a split of `total`, zeros included."""
    cuts = st.lists(st.integers(0, total), min_size=workers - 1, max_size=workers - 1)
    edges = [0, *sorted(data.draw(cuts)), total]
    return [right - left for left, right in itertools.pairwise(edges)]


@given(orders(), st.integers(1, 5), st.data())
def test_each_sample_occurs_once_per_pass_under_changing_plans(
    order: GlobalOrder, workers: int, data: st.DataObject
) -> None:
    for number in range(2):
        seen: list[int] = []
        for step in range(number * order.steps_per_pass, (number + 1) * order.steps_per_pass):
            sizes = any_plan(data, workers, order.size(step))
            parts = [order.slice(step, rank, sizes) for rank in range(workers)]
            assert [len(part) for part in parts] == sizes
            union = np.concatenate(parts)
            assert union.tolist() == order.indices(step).tolist(), "independent of the plan"
            seen += union.tolist()
        assert len(seen) == len(set(seen))
        if not order.drop_last:
            assert sorted(seen) == list(range(order.num_samples))


@given(orders())
def test_the_steps_of_a_pass(order: GlobalOrder) -> None:
    sizes = [order.size(step) for step in range(order.steps_per_pass)]
    assert set(sizes[:-1]) <= {order.global_batch_size}
    whole = math.floor if order.drop_last else math.ceil
    assert order.steps_per_pass == whole(order.num_samples / order.global_batch_size)
    for step, size in enumerate(sizes):
        indices = order.indices(step)
        assert indices.shape == (size,)
        assert indices.dtype == np.int64


def test_a_short_last_step() -> None:
    order = GlobalOrder(10, 4, shuffle=False)
    assert [order.indices(step).tolist() for step in (2, 3)] == [[8, 9], [0, 1, 2, 3]]
    assert [order.slice(2, rank, [1, 0, 1]).tolist() for rank in range(3)] == [[8], [], [9]]
    assert GlobalOrder(10, 4, drop_last=True).steps_per_epoch == 2


def test_epochs_differ_and_a_seed_repeats_them() -> None:
    def epoch(order: GlobalOrder, number: int) -> list[int]:
        steps = range(number * order.steps_per_epoch, (number + 1) * order.steps_per_epoch)
        return np.concatenate([order.indices(step) for step in steps]).tolist()

    order, twin = GlobalOrder(40, 7, seed=3), GlobalOrder(40, 7, seed=3)
    epochs = [epoch(order, number) for number in range(4)]
    assert len({tuple(indices) for indices in epochs}) == 4
    assert [epoch(twin, number) for number in (3, 0, 2, 1)] == [epochs[i] for i in (3, 0, 2, 1)]
    assert epoch(GlobalOrder(40, 7, seed=4), 0) != epochs[0]
    assert sorted(epochs[0]) != epochs[0], "shuffled"
    assert epoch(GlobalOrder(40, 10, seed=3), 0) == epochs[0], "the batch size only cuts"


def test_epochs_of_any_length_do_not_change_the_order() -> None:
    order, own = GlobalOrder(10, 4, seed=2), GlobalOrder(10, 4, seed=2, steps_per_epoch=5)
    assert (own.steps_per_epoch, own.steps_per_pass) == (5, 3)
    for step in range(12):
        assert own.indices(step).tolist() == order.indices(step).tolist()


def test_quotients_count_as_integers() -> None:
    order = GlobalOrder(np.float64(640), 64.0, steps_per_epoch=640 / 64)  # type: ignore[arg-type]
    assert order.key == GlobalOrder(640, 64, steps_per_epoch=10).key
    assert [type(each) for each in order.key[:3]] == [int] * 3
    with pytest.raises(ValueError, match=r"steps_per_epoch must be an integer >= 1, got 10.5"):
        GlobalOrder(640, 64, steps_per_epoch=10.5)  # type: ignore[arg-type]


def test_batches_stay_together_and_a_short_one_stays_last() -> None:
    order = GlobalOrder(10, 2, seed=1, by_batch=True)
    passes = [[order.indices(5 * n + k).tolist() for k in range(5)] for n in range(2)]
    whole = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [sorted(batches) for batches in passes] == [whole, whole]
    assert passes[0] != passes[1] != whole
    short = GlobalOrder(11, 4, seed=1, by_batch=True)
    assert [short.indices(step).tolist() for step in (2, 5)] == [[8, 9, 10]] * 2


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"by_batch": True}])
def test_indices_are_read_only(options: dict[str, bool]) -> None:
    order = GlobalOrder(12, 6, seed=1, **options)
    expected = order.indices(0).tolist()
    for indices in (order.indices(0), order.slice(0, 1, [2, 4])):
        with pytest.raises(ValueError, match="read-only"):
            indices[:] = 0
    assert order.indices(0).tolist() == expected


def test_equal_orders_are_equal() -> None:
    assert GlobalOrder(10, 4, seed=1) == GlobalOrder(10, 4, seed=1)
    assert hash(GlobalOrder(10, 4, seed=1)) == hash(GlobalOrder(10, 4, seed=1))
    others = [
        GlobalOrder(11, 4, seed=1),
        GlobalOrder(10, 5, seed=1),
        GlobalOrder(10, 4, seed=2),
        GlobalOrder(10, 4, seed=1, shuffle=False),
        GlobalOrder(10, 4, seed=1, drop_last=True),
        GlobalOrder(10, 4, seed=1, steps_per_epoch=7),
        GlobalOrder(10, 4, seed=1, by_batch=True),
    ]
    assert all(GlobalOrder(10, 4, seed=1) != other for other in others)
    assert GlobalOrder(10, 4) != "order"


@pytest.mark.parametrize("sizes", [[3, 2], [2, 1], [4, 4], []])
def test_plans_with_a_wrong_sum_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"the plan of step 1 must sum to 4, got \[.*\] which"):
        GlobalOrder(8, 4).slice(1, 0, sizes)
    with pytest.raises(ValueError, match=r"the plan of step 2 must sum to 1"):
        GlobalOrder(9, 4).slice(2, 0, [2, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), r"num_samples must be an integer >= 1, got 0"),
        ((8, 0), r"global_batch_size must be an integer >= 1, got 0"),
        ((8, 2.5), r"global_batch_size must be an integer >= 1, got 2\.5"),
        ((8, 4, -1), r"seed must be an integer >= 0, got -1"),
        ((8, 4, 0, True, False, 0), r"steps_per_epoch must be an integer >= 1, got 0"),
        ((3, 4), r"num_samples = 3 < global_batch_size = 4; lower global_batch_size or add data"),
    ],
)
def test_invalid_arguments_are_named(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlobalOrder(*arguments)
