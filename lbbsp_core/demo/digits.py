"""What the demos of all frameworks share: the digits, the options, the result."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.policy import Even, LoadBalanced

GLOBAL_BATCH_SIZE: Final = 288
TRAINED_ON: Final = 1536  # of 1,797 digits; the others measure what was learned
SEED: Final = 0
POLICIES: Final = {"even": Even, "lbbsp": LoadBalanced}


class Digits(NamedTuple):
    """Images ``(samples, 8, 8, 1)`` in [-1, 1], labels ``(samples,)``."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]


def parse(description: str | None) -> argparse.Namespace:
    """What ``lbbsp demo`` asks of its workers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--policy", choices=sorted(POLICIES), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    return parser.parse_args()


def digits() -> tuple[Digits, Digits]:
    """Scikit-learn's real handwritten digits: to train on, and held out."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(SEED).permutation(len(bunch.target))
    x = (bunch.images[order, :, :, None] / 8 - 1).astype(np.float32)
    y = bunch.target[order].astype(np.int64)
    return Digits(x[:TRAINED_ON], y[:TRAINED_ON]), Digits(x[TRAINED_ON:], y[TRAINED_ON:])


def repeated(training: Digits, steps: int) -> Digits:
    """The training set, over and over, as one long epoch of `steps` steps.

    The first step of each epoch is not like the others, and nothing is learned from it.
    """
    drawn = np.resize(np.arange(TRAINED_ON), steps * GLOBAL_BATCH_SIZE)
    return Digits(training.x[drawn], training.y[drawn])


def save(path: Path, logits: Any, held_out: Digits, weights: Sequence[Any]) -> None:
    """Writes the share of held-out digits read rightly, and the weights."""
    read = np.argmax(np.asarray(logits), axis=1)
    named: dict[str, Any] = {f"weights_{i}": np.asarray(values) for i, values in enumerate(weights)}
    accuracy = np.mean(read == held_out.y)
    np.savez(path, accuracy=accuracy, **named)
