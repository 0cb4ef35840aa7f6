"""Digests: far apart for different values, close for values that differ in the last bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core.runtime.exchange.digest import Digest, different_row, sampled
from lbbsp_core.runtime.exchange.protocol import LIMB, StepMessage, decode, encode


def weights(seed: int = 0, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in [(300, 70), (70,), (70, 9), ()]]


def sent(digest: Digest) -> Digest:
    """What arrives of a digest."""
    message = decode(encode(StepMessage(1, 2, 3, 4, extra=divmod(digest.to_integer(), LIMB))))
    high, low = message.extra
    return Digest.from_integer(high * LIMB + low)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_equal_but_rounded_weights_are_close(dtype: str) -> None:
    first = Digest.of(weights(dtype=dtype))
    rounded = [w * np.asarray(1 + 1e-5, w.dtype) for w in weights(dtype=dtype)]
    assert sent(first).is_close(sent(Digest.of(rounded)))
    assert first.norm == pytest.approx(
        np.sqrt(sum(float((w.astype("f8") ** 2).sum()) for w in weights(dtype=dtype))), rel=1e-3
    )


def scaled(number: int, factor: float) -> list[np.ndarray]:
    return [w * np.float32(factor) if i == number else w for i, w in enumerate(weights())]


def changed_places() -> list[np.ndarray]:
    first, *rest = weights()
    return [first[::-1], *rest]


def moved_within_a_row() -> list[np.ndarray]:
    """The gradient of a softmax sums to zero over classes: a plain sum would not show it."""
    *before, last, scalar = weights()
    push = np.zeros(9, np.float32)
    push[:2] = 0.5, -0.5
    return [*before, last + push, scalar]


@pytest.mark.parametrize(
    "other",
    [weights(1), scaled(0, 1.01), scaled(2, 1.1), scaled(1, -1.0), changed_places(),
     moved_within_a_row(), weights()[::-1]],
)  # fmt: skip
def test_different_weights_are_not_close(other: list[np.ndarray]) -> None:
    assert not sent(Digest.of(weights())).is_close(sent(Digest.of(other)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_on_all_workers_are_equal(bad: float) -> None:
    first, *rest = weights()
    lost = Digest.of([first * bad, *rest])
    assert sent(lost).is_close(sent(lost))
    assert not sent(lost).is_close(sent(Digest.of(weights())))


@given(projection=st.floats(-1e30, 1e30), norm=st.floats(0, 1e30))
def test_a_digest_fits_in_an_integer_of_a_message(projection: float, norm: float) -> None:
    digest = Digest(projection, norm)
    found = sent(digest)
    assert 0 <= digest.to_integer() < 2**48
    assert found.projection == pytest.approx(projection, rel=1e-4, abs=1e-37)
    assert found.norm == pytest.approx(norm, rel=1e-4, abs=1e-37)


def test_no_weights() -> None:
    assert Digest.of([]).to_integer() == 0, "nothing to compare"


def test_integers_are_exact() -> None:
    labels = np.array([2**40, 2**40 + 1])
    assert Digest.of([labels]).norm == pytest.approx(2**40.5)


def test_the_first_sample_that_differs() -> None:
    row = [Digest.of([np.array([x])]) for x in (1.0, 2.0, 3.0)]
    assert different_row([row, row]) is None
    assert different_row([row, row, [*row[:2], Digest.of([np.array([3.1])])]]) == (2, 2)


def images(seed: int, count: int = 64) -> np.ndarray:
    """Smooth images with levels from 0 to 255."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(120, 45, (count, 4, 4, 3))
    return np.clip(np.kron(coarse, np.ones((1, 8, 8, 1))), 0, 255).round()


@pytest.mark.parametrize(("mean", "deviation"), [(0, 1), (0, 255), (127.5, 127.5), (118, 45)])
def test_images_of_another_decoder_are_the_same_and_other_images_are_not(
    mean: float, deviation: float
) -> None:
    def row(values: np.ndarray) -> list[Digest]:
        return [Digest.of([((each - mean) / deviation).astype("f4")]) for each in values]

    rng = np.random.default_rng(3)  # not that of the projection
    decoded = images(1) + rng.choice([-1, 0, 1], images(1).shape, p=[0.125, 0.75, 0.125])
    assert different_row([row(images(1)), row(decoded)]) is None
    first, last = images(1, 2), images(2, 2)
    last[0] = first[0]
    assert different_row([row(first), row(last)]) == (1, 1)


def test_another_order_of_samples_that_are_alike_is_found() -> None:
    kelvin = np.random.default_rng(0).normal(290, 5, (64, 8))
    rows = [[Digest.of([each]) for each in order] for order in (kelvin, kelvin[::-1])]
    assert different_row(rows) is not None


def test_samples_are_spread_over_the_data_set() -> None:
    chosen = sampled(10_000)
    assert len(np.unique(chosen)) == 64
    assert chosen.min() < 1000
    assert chosen.max() >= 9000
    assert sampled(3).tolist() == [0, 1, 2]
