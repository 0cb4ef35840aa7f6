"""Trials of a train step on parts of a batch: what it computes and assigns, without any effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat import Array, Nest
from lbbsp_tf.exactness.probe import (
    Probe,
    Sketch,
    Written,
    same_for_all_samples,
    sketches_as_one_process,
)
from lbbsp_tf.rows import Batch, concatenate_rows, count_rows, first_leaf, slice_rows

Value = TypeVar("Value", float, Array)

# What a step does when none of its switches is on.
_NOISY, _SCALED_WITHIN, _AS_IT_IS, _SCALED = -4, -3, -2, -1
_LARGE = 2.0**27  # a power of two: divided by it, nothing is rounded


class Trial(NamedTuple):
    """What a train step did on some samples.

    Args:
        sketches: Sketch of the gradients of each `apply` and `sum_gradients`.
        scalars: Scalars that `Mean` metrics were updated with, in order; NaN for those of inner
            graphs, such as a branch of `tf.cond`.
        targets: Sums of the elements of each target whose gradient it took, in order; NaN likewise.
        written: Variables that it may have assigned.
    """

    sketches: Sequence[Sketch]
    scalars: Sequence[float]
    targets: Sequence[float]
    written: Sequence[Written]


class Split(NamedTuple):
    """Trials on some samples, and on two parts of them.

    Args:
        rows: Number of samples.
        cut: Number of samples in the first part.
        whole: Trial on all samples.
        first: Trial on the first part.
        second: Trial on the second part.
        rotated: Trial on all samples in another order, which shows the rounding.
    """

    rows: int
    cut: int
    whole: Trial
    first: Trial
    second: Trial
    rotated: Trial

    def mean(self, call: int) -> Sketch:
        """Returns the sketch of an `apply` of the whole, if it is the mean of those of parts."""
        return self.mean_of(self.first.sketches[call], self.second.sketches[call])

    def mean_of(self, first: Value, second: Value) -> Value:
        """Returns the mean of values of the parts, by their samples."""
        return (self.cut * first + (self.rows - self.cut) * second) / self.rows

    def values(self, name: str) -> Array:
        """Returns the scalars or targets of the whole, and of both parts, in rows."""
        return np.array([getattr(trial, name) for trial in (self.whole, self.first, self.second)])

    def sum(self, call: int) -> Sketch:
        """Returns the sketch of an `apply` of the whole, if it is the sum of those of parts."""
        return self.first.sketches[call] + self.second.sketches[call]

    def is_common(self, call: int) -> bool:
        """Returns whether the gradients of an `apply` are others than zeros, but no samples'."""
        first, second = self.first.sketches[call], self.second.sketches[call]
        whole = self.whole.sketches[call]
        return bool(whole.any()) and np.array_equal(first, whole) and np.array_equal(second, whole)

    @property
    def is_finite(self) -> bool:
        """True if all gradients are finite numbers."""
        trials = (self.whole, self.first, self.second, self.rotated)
        return all(np.isfinite(sketch).all() for trial in trials for sketch in trial.sketches)


@dataclass
class _Traced:
    """What a train step logs, and takes gradients of, while it is traced in a replica."""

    samples: tf.Tensor
    scale: tf.Tensor  # of gradients with respect to variables
    switches: compat.Switches
    token_means: set[str]
    at_tapes: bool
    scalars: list[tf.Tensor | float] = field(default_factory=list)
    targets: list[tf.Tensor | float] = field(default_factory=list)

    def patches(self) -> list[AbstractContextManager[None]]:
        """Returns the contexts in which the step runs."""
        graph = compat.current_graph()

        def record(value: tf.Tensor, weight: tf.Tensor | None) -> tuple[tf.Tensor, Nest]:
            is_inner = compat.current_graph() is not graph
            self.scalars.append(float("nan") if is_inner else tf.cast(value, tf.float64))
            return value, weight

        return [
            compat.intercepted_scalars(record),
            compat.intercepted_gradients(self._taken),
            compat.token_means_scaled(self._of_samples),
        ]

    def _of_samples(self, tokens: tf.Tensor, why: str) -> tf.Tensor:
        self.token_means.add(why)
        return tf.cast(tokens, tf.float64) / self.samples

    def _taken(self, total: compat.Method, of_variables: bool, take: compat.Method) -> Nest:
        self.targets.append(total())
        with self.switches.paused():
            gradients = take()
        if not of_variables:
            return gradients
        if self.at_tapes:
            return compat.sum_gradients(gradients)
        return tf.nest.map_structure(
            lambda g: None if g is None else g * tf.cast(self.scale, g.dtype), gradients
        )


class Trials:
    """Train step that can be tried on the samples ``begin .. end - 1`` of a batch.

    Args:
        strategy: Strategy of the model.
        train_step: Train step of the user.
        batch: Nest of tensors, whose first axis is that of samples.
        one_replica: Whether the train step sees a single replica.
        token_means: Collects why losses are divided by a number of tokens; the trials divide them
            by the number of samples instead.
        at_tapes: Whether all gradients with respect to variables are summed as they leave a tape.
        rows: Number of samples for which alone the step is traced, and not tried; None for any.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        train_step: Callable[[Nest], Nest],
        batch: Nest,
        *,
        one_replica: bool,
        token_means: set[str],
        at_tapes: bool = False,
        rows: int | None = None,
    ) -> None:
        self._rows = int(count_rows(first_leaf(batch)))
        self._has_noise = self._has_own_gradients = False
        batch = tf.nest.map_structure(self._and_rotated, batch)

        def replica(begin: tf.Tensor, end: tf.Tensor, switch: tf.Tensor) -> Nest:
            part = tf.nest.map_structure(lambda t: slice_rows(t, begin, end), batch)
            for tensor in tf.nest.flatten(part):
                if isinstance(tensor, tf.Tensor):
                    tensor.set_shape([rows, *tensor.shape[1:]])
            samples = tf.cast(end - begin, tf.float64)
            scale = tf.where(tf.equal(switch, _SCALED), _LARGE, 1.0)
            traced = _Traced(samples, scale, self._switches, token_means, at_tapes)
            patches = traced.patches()
            if one_replica:
                added = compat.added_vectors_scaled(1.0 / samples, part)
                patches = [compat.replicas_view(), added, *patches]
            like_all = same_for_all_samples
            sketches = sketches_as_one_process(train_step, part, *patches, summed=like_all)
            kinds = traced.scalars, traced.targets
            return sketches, *(
                [tf.convert_to_tensor(value, tf.float64) for value in values] for values in kinds
            )

        self._probe = Probe(strategy, replica, self._patches, (tf.int64, tf.int64, tf.int64))

    @contextmanager
    def _patches(self, begin: tf.Tensor, end: tf.Tensor, switch: tf.Tensor) -> Iterator[None]:
        def variants(rows: tf.Tensor) -> tf.Tensor:
            """Returns zeros or, if noisy, numbers of samples, whatever part they are tried in.

            Rows may also be parts of samples, such as tokens.
            """
            self._has_noise = True
            with self._switches.paused():
                samples = tf.cast(end - begin, tf.int32)
                is_by_sample = tf.equal(rows % samples, 0) & tf.equal(switch, _NOISY)
                number = tf.cast(begin, tf.int32)
                number += tf.range(rows) // tf.maximum(1, rows // samples)
                number += tf.where(number >= self._rows, self._rows // 3, 0)  # see `_and_rotated`
                return tf.where(is_by_sample, number % self._rows % compat.NOISES, 0)

        def scale() -> tf.Tensor:
            self._has_own_gradients = True
            return tf.where(tf.equal(switch, _SCALED_WITHIN), _LARGE, 1.0)

        is_first_part = tf.equal(begin, 0) & tf.less(end, self._rows)
        self._switches = compat.Switches(switch, is_first_part)
        noise, within = compat.same_noise(variants), compat.own_gradients_scaled(scale)
        with noise, within, compat.batch_norm_in_inference(), self._switches.installed():
            yield

    @property
    def is_double(self) -> bool:
        """True if all gradients are of double precision."""
        sketches, *_ = self._probe.outputs
        return all(sketch.dtype == tf.float64 for sketch in sketches)

    def splits(self, switch: int = _AS_IT_IS, fractions: Sequence[int] = (3, 2)) -> list[Split]:
        """Tries the step on the batch and on two parts of it, cut at each of some places."""
        rows = self._rows
        try_ = partial(self._try, switch)
        whole, rotated = try_(0, rows), try_(rows, 2 * rows)
        return [
            Split(rows, cut, whole, try_(0, cut), try_(cut, rows), rotated)
            for cut in (max(1, rows // fraction) for fraction in fractions)
        ]

    def again(self, *, is_noisy: bool) -> Trial:
        """Tries the step on the batch once more, as in `splits` or `noisy_splits`."""
        return self._try(_NOISY if is_noisy else _AS_IT_IS, 0, self._rows)

    def scaled_split(self) -> Split:
        """Tries the step with gradients with respect to variables multiplied by a large number."""
        return self.splits(_SCALED, (3,))[0]

    def scaled_within(self) -> Trial | None:
        """Tries the step with gradients scaled in functions that have their own, if it has any."""
        return self._try(_SCALED_WITHIN, 0, self._rows) if self._has_own_gradients else None

    def noisy_splits(self) -> list[Split]:
        """Tries the step with noise that differs by sample, if it has any."""
        return self.splits(_NOISY) if self._has_noise else []

    def switched_splits(self) -> Iterator[tuple[str, Split]]:
        """Tries the step with each of its `Switches` on; also yields what that changes."""
        for switch, what in self._switches.all():
            with suppress(tf.errors.InvalidArgumentError):  # such as an index that is too large
                yield what, self.splits(switch, (3,))[0]

    def other_splits(self) -> list[Split]:
        """Tries the step with other weights: with these, a term may have no gradient."""
        with self._probe.other_weights():
            return self.splits()

    def _and_rotated(self, tensor: Batch) -> Batch:
        """Returns the rows, and then the same rows from another one on."""
        start = tf.constant(self._rows // 3, tf.int64)
        zero, end = tf.zeros_like(start), count_rows(tensor)
        rotated = (slice_rows(tensor, start, end), slice_rows(tensor, zero, start))
        return concatenate_rows(tensor, *rotated)

    def _try(self, switch: int, begin: int, end: int) -> Trial:
        (sketches, scalars, targets), written = self._probe.run(begin, end, switch)
        return Trial(sketches, scalars, targets, written)
