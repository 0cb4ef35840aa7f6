"""Contract of predictors."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from lbbsp_core.predict import Predictor, trained
from lbbsp_core.testing._contract import SLACK, check_value, copied, pickled, unchanged
from lbbsp_core.types import Measurement

_SCALES = (1e-3, 1.0, 1e6)  # samples per second: a large model on a CPU, and a tiny one on a GPU
_HORIZONS = (1, 2, 3, 8)


def check_predictor(
    predictor: Predictor, *, drivers: int = 0, arrays: bool = False, updates: int = 2000
) -> None:
    """Checks the contract of `Predictor`.

    The predictor must be a frozen value that compares, hashes, pickles and prints its
    parameters; `init`, `update` and `predict` must change neither it nor a state; a pickled state
    must replay to the same bits; predictions must be NaN before the first update, then finite and
    > 0 at any horizon, over jumps, outliers and constant stretches; a state must not grow.

    Args:
        predictor: Predictor to check.
        drivers: Number of driving factors in each measurement.
        arrays: Whether it also takes arrays of shape ``(workers,)``, elementwise.
        updates: Length of the series over which a state may not grow; its first half fills
            windows.

    Raises:
        AssertionError: The contract is broken; names the rule and the value.

    Example:
        >>> from lbbsp_core import Ema
        >>> check_predictor(Ema(0.2), arrays=True)
    """
    check_value(predictor)
    for seed, scale in enumerate(_SCALES):
        _check_predictions(predictor, list(_series(300, seed, scale, drivers)))
    _check_transitions(predictor, list(_series(40, 3, 1.0, drivers)))
    _check_replay(predictor, list(_series(120, 4, 1.0, drivers)))
    _check_bounded(predictor, list(_series(updates, 5, 1.0, drivers)))
    if arrays:
        _check_arrays(predictor, [list(_series(60, 6 + worker, 1.0)) for worker in range(3)])


def _series(length: int, seed: int, scale: float, drivers: int = 0) -> Iterator[Measurement]:
    """Yields speeds around `scale`: noise, new levels, outliers, and a constant stretch."""
    source = random.Random(seed)
    level = 1.0
    for step in range(length):
        if source.random() < 0.03:
            level = min(max(level * source.choice((0.25, 0.5, 2.0, 4.0)), 1 / 16), 16.0)
        speed = scale * level
        if step % 100 < 70:
            speed *= source.uniform(0.9, 1.1)
            speed *= source.choice((0.02, 50.0)) if source.random() < 0.02 else 1.0
        samples = source.randint(1, 64)
        factors = tuple(source.uniform(0.0, 100.0) for _ in range(drivers))
        yield Measurement(samples, samples / speed, factors)


def _check_predictions(predictor: Predictor, series: Sequence[Measurement]) -> None:
    state = predictor.init()
    for horizon in _HORIZONS:
        unknown = predictor.predict(state, series[0].drivers, horizon)
        is_nan = isinstance(unknown, float) and math.isnan(unknown)
        assert is_nan, f"{predictor!r} must predict NaN before the first update, got {unknown!r}"
    for step, measurement in enumerate(series):
        state = predictor.update(state, measurement)
        for horizon in _HORIZONS:
            speed = predictor.predict(state, measurement.drivers, horizon)
            is_speed = isinstance(speed, float) and 0.0 < speed < math.inf
            assert is_speed, (
                f"{predictor!r} must predict a finite float > 0, got {speed!r} after "
                f"{step + 1} updates at horizon {horizon}; the last speed was "
                f"{measurement.samples_per_second:g}"
            )


def _check_transitions(predictor: Predictor, series: Sequence[Measurement]) -> None:
    """Checks that calls are pure and that only `update` influences what is learned."""
    itself = pickled(predictor)
    state = silent = predictor.init()
    for measurement in series:
        ask = partial(predictor.predict, state, measurement.drivers, 2)
        first, second = unchanged("predict", state, ask), ask()
        assert _same(first, second), f"predict gave {first!r}, then {second!r}: it is not pure"
        state = unchanged("train", state, partial(trained, predictor, state))
        state = unchanged("update", state, partial(predictor.update, state, measurement))
        silent = predictor.update(silent, measurement)
    assert pickled(predictor) == itself, f"a call changed {predictor!r} itself"
    drivers = series[-1].drivers
    asked, unasked = predictor.predict(state, drivers), predictor.predict(silent, drivers)
    assert _same(asked, unasked), (
        f"predict or train changed what is learned: {asked!r}, {unasked!r}"
    )


def _check_replay(predictor: Predictor, series: Sequence[Measurement]) -> None:
    half = len(series) // 2
    _, saved = _drive(predictor, predictor.init(), series[:half])
    kept = copied(saved)
    expected, _ = _drive(predictor, saved, series[half:])
    _drive(predictor, predictor.init(), series[::-1])  # another worker's series in between
    for title, again in (("the same", predictor), ("a pickled", copied(predictor))):
        replayed, _ = _drive(again, copied(kept), series[half:])
        for step, (old, new) in enumerate(zip(expected, replayed, strict=True)):
            assert _same(old, new), (
                f"{title} {predictor!r} must replay a pickled state to the same bits: {old!r} "
                f"became {new!r} at step {step}"
            )


def _check_bounded(predictor: Predictor, series: Sequence[Measurement]) -> None:
    half = len(series) // 2
    _, state = _drive(predictor, predictor.init(), series[:half])
    early = len(pickled(state))
    _, state = _drive(predictor, state, series[half:])
    late = len(pickled(state))
    assert late <= early + SLACK, (
        f"the state of {predictor!r} must stay bounded: {early} bytes pickled after {half} "
        f"updates, {late} after {len(series)}"
    )


def _check_arrays(predictor: Predictor, workers: Sequence[Sequence[Measurement]]) -> None:
    joint = [
        Measurement(*np.array([(entry.samples, entry.busy_seconds) for entry in row], float).T)
        for row in zip(*workers, strict=True)
    ]
    together, _ = _drive(predictor, predictor.init(), joint)
    alone = [_drive(predictor, predictor.init(), series)[0] for series in workers]
    for step, (got, *expected) in enumerate(zip(together, *alone, strict=True)):
        assert np.allclose(got, expected, rtol=1e-9, atol=0.0, equal_nan=True), (
            f"{predictor!r} must treat arrays elementwise: got {got!r} at step {step}, one by "
            f"one {expected!r}"
        )


def _drive(
    predictor: Predictor, state: object, series: Sequence[Measurement]
) -> tuple[list[npt.ArrayLike], object]:
    """Returns the predictions before each update, and the last state."""
    predictions: list[npt.ArrayLike] = []
    for measurement in series:
        predictions.append(predictor.predict(state, measurement.drivers))
        state = predictor.update(state, measurement)
    return predictions, state


def _same(prediction: npt.ArrayLike, other: npt.ArrayLike) -> bool:
    return bool(np.array_equal(prediction, other, equal_nan=True))
