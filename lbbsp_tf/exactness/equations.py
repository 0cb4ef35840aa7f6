"""Equations between the gradients of a batch and of its parts, and which of them hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbbsp_tf.exactness.rounding import Comparison, Precision
from lbbsp_tf.exactness.trial import Split, Trial


class Equations:
    """Equations of each `apply` of a train step, to within rounding.

    Args:
        precision: Precision of the gradients, also an attribute.
        splits: Trials of the same samples, as one process, whose gradients are finite.

    Attributes:
        means: Whether the gradient of the batch is the mean of those of its parts, by `apply`.
        sums: Whether it is their sum, less a constant that does not depend on samples.
        are_free: Whether each gradient is such a mean, or such a sum without a constant.
        common: Whether all gradients of an `apply` are the same, and not zero.
    """

    def __init__(self, precision: Precision, splits: Sequence[Split]) -> None:
        self.precision, self._splits = precision, splits
        self._whole = whole = splits[0].whole.sketches
        self._calls = calls = range(len(whole))
        self._compared = compared = [Comparison(precision, splits, k) for k in calls]
        ends = splits[0], splits[-1]
        first, last = ([split.sum(k) - whole[k] for k in calls] for split in ends)
        self._constants = first
        self.means = [all(compared[k].agree(whole[k], s.mean(k)) for s in splits) for k in calls]
        self.sums = [compared[k].agree(first[k], last[k]) for k in calls]
        self.are_free = all(
            self.means[k] or (self.sums[k] and compared[k].agree(first[k], 0 * whole[k]))
            for k in calls
        )
        self.common = [all(split.is_common(k) for split in splits) for k in calls]

    def repeats(self, again: Trial) -> bool:
        """Returns whether a trial of the same samples had the same gradients, where finite."""
        return all(
            self._compared[k].repeats(self._whole[k], again.sketches[k]) for k in self._calls
        )

    def shared(self, split: Split, replicas: int) -> list[bool] | None:
        """Returns which gradients all replicas share, in a step that sees all of them.

        Such a step divides what is not shared by their number, but no sum over samples. None if
        this one does something else.
        """
        whole, constants, sketches = self._whole, self._constants, split.whole.sketches
        shared = [self.common[k] and np.array_equal(whole[k], sketches[k]) for k in self._calls]
        divides = all(
            shared[k]
            or self._compared[k].agree(split.sum(k) - sketches[k], constants[k] / replicas)
            for k in self._calls
        )
        return shared if divides else None

    def error_of(self, split: Split, means: Sequence[bool]) -> float:
        """Returns how far gradients are from the means or sums that they should be."""
        errors = [0.0]
        for k, is_mean in enumerate(means):
            whole = split.whole.sketches[k]
            expected = split.mean(k), split.sum(k) - self._constants[k]
            if np.isfinite([whole, *expected]).all():
                comparison = Comparison(self.precision, [split], k)
                errors.append(comparison.difference(whole, expected[not is_mean]))
        return max(errors)

    def largest_error(self, means: Sequence[bool]) -> float:
        """Returns how far the gradients that it was made of are from these means or sums."""
        return max(self.error_of(split, means) for split in self._splits)

    def worst_error(self) -> float:
        """Returns how far the gradients of the last `apply` that is no mean are from one."""
        k = max(k for k in self._calls if not self.means[k])
        whole = self._whole[k]
        return max(self._compared[k].difference(whole, split.mean(k)) for split in self._splits)
