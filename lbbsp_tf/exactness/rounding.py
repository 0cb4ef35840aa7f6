"""Rounding: which differences between the gradients of a batch and of its parts it explains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_tf.exactness.probe import COARSE_FLOOR, Sketch
from lbbsp_tf.exactness.trial import Split


class Precision(NamedTuple):
    """Precision of gradients that are computed without long sums."""

    tolerance: float  # largest difference of a gradient, relative to its norm
    floor: float  # of the largest norm: differences of smaller gradients are relative to it


DOUBLE: Final = Precision(1e-6, 1e-7)
SINGLE: Final = Precision(1e-3, 1e-4)
INEXACT: Final = Precision(3e-2, COARSE_FLOOR)
"""Precision of 16-bit numbers, and of float32 that is multiplied with fewer bits."""

# How much larger the differences between a batch and its parts may be, by rounding, than those
# between the batch and the same samples in another order: measured up to 200 for gradients that
# consist of rounding only, such as those of biases before a normalisation, and up to 11 for others.
_ROUNDINGS_OF_NOTHING = 3000
_ROUNDINGS = 100
_LARGEST_ROUNDING = 0.3  # of a gradient


class Comparison:
    """Comparison of sketches of one `apply`, to within the rounding that `splits` show."""

    def __init__(self, precision: Precision, splits: Sequence[Split], call: int) -> None:
        trials = [trial for split in splits for trial in (split.whole, split.first, split.second)]
        whole, rotated = (trial.sketches[call] for trial in (splits[0].whole, splits[0].rotated))
        # Gradients of samples may cancel each other in the whole batch. Their rounding does not.
        norms = np.max([_norms(trial.sketches[call]) for trial in trials], axis=0)
        rounding = _differences(rotated, whole)
        negligible = precision.tolerance * COARSE_FLOOR * norms.max()
        self._exact = precision.tolerance * np.maximum(norms, precision.floor * norms.max())
        # On a CPU, the gradient of a convolution's bias is summed over all positions one by one:
        # for images of 224 x 224, it is rounded by up to 3e-3 of it.
        self._allowed = np.max(
            [
                self._exact,
                np.minimum(_ROUNDINGS_OF_NOTHING * rounding, negligible),
                np.minimum(_ROUNDINGS * rounding, _LARGEST_ROUNDING * norms),
            ],
            axis=0,
        )
        self._norms = np.maximum(_norms(whole), precision.floor * _norms(whole).max())

    def agree(self, sketch: Sketch, expected: Sketch) -> bool:
        """Returns whether two sketches are those of the same gradients."""
        differences = _differences(sketch, expected)
        return bool(np.isfinite(differences).all() and (differences <= self._allowed).all())

    def repeats(self, sketch: Sketch, again: Sketch) -> bool:
        """Returns whether two sketches are those of the same samples in the same order.

        What is not finite is taken for the same.
        """
        differences = _differences(sketch, again)
        return not (np.isfinite(differences) & (differences > self._exact)).any()

    def difference(self, sketch: Sketch, expected: Sketch) -> float:
        """Returns the largest difference that rounding does not explain, relative to the whole."""
        differences = _differences(sketch, expected)
        with np.errstate(invalid="ignore", divide="ignore"):  # a gradient may be zero
            relative = differences / self._norms
        return float(np.max(relative, where=differences > self._allowed, initial=0.0))


def _norms(sketch: Sketch) -> npt.NDArray[np.float64]:
    return abs(sketch[:, 2])


def _differences(sketch: Sketch, other: Sketch) -> npt.NDArray[np.float64]:
    largest: npt.NDArray[np.float64] = abs(sketch[:, :2] - other[:, :2]).max(axis=1)
    return largest
