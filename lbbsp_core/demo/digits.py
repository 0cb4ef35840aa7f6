"""Data, options and result of the demo's workers, the same for all frameworks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

GLOBAL_BATCH_SIZE: Final = 288
TRAINED_ON: Final = 1536  # of 1,797 digits; the others are held out
SEED: Final = 0


class Digits(NamedTuple):
    """Images of shape ``(samples, 8, 8, 1)`` in [-1, 1], and labels of shape ``(samples,)``."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]


def parse(description: str | None) -> argparse.Namespace:
    """Parses the options that ``lbbsp demo`` gives to its workers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    return parser.parse_args()


def digits() -> tuple[Digits, Digits]:
    """Returns scikit-learn's handwritten digits: the training set and the held-out set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(SEED).permutation(len(bunch.target))
    x = (bunch.images[order, :, :, None] / 8 - 1).astype(np.float32)
    y = bunch.target[order].astype(np.int64)
    return Digits(x[:TRAINED_ON], y[:TRAINED_ON]), Digits(x[TRAINED_ON:], y[TRAINED_ON:])


def repeated(training: Digits, steps: int) -> Digits:
    """Repeats the training set to one long epoch of `steps` steps.

    The first step of each epoch takes longer than the others and is excluded from learning.
    """
    drawn = np.resize(np.arange(TRAINED_ON), steps * GLOBAL_BATCH_SIZE)
    return Digits(training.x[drawn], training.y[drawn])


def save(
    path: Path, logits: npt.ArrayLike, held_out: Digits, weights: Sequence[npt.ArrayLike]
) -> None:
    """Writes the accuracy on the held-out digits, and the weights."""
    predicted = np.argmax(np.asarray(logits), axis=1)
    named = {f"weights_{i}": np.asarray(values) for i, values in enumerate(weights)}
    np.savez(path, accuracy=np.mean(predicted == held_out.y), **named)
