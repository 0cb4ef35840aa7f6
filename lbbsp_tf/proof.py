"""Proof that a train step's gradients can be weighted: on a few samples, before training.

The gradient g(B) of a batch B is a mean over samples if for any two parts B1 and B2 of it
``|B| g(B) = |B1| g(B1) + |B2| g(B2)``. It is a sum if ``g(B) = g(B1) + g(B2) - c``, with a part c,
such as that of regularisers, that does not depend on the samples. Both equations are checked on
the model's own train step and weights, with the same noise for all samples. They fail for losses
that compare the samples of a batch with each other, for means over tokens, and for gradients that
are clipped on the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat import Nest
from lbbsp_tf.probe import Probe, Sketch, deviation, sketches_as_one_process
from lbbsp_tf.rows import count_rows, first_leaf, slice_rows
from lbbsp_tf.train_step import TrainStep
from lbbsp_tf.weighting import Weighting

logger = logging.getLogger("lbbsp.tf")

SAMPLES = 16
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 3e-2  # half precision, and the reduced precision of GPUs
_LARGE = 1e8


@dataclass(frozen=True)
class Refusal:
    """Reason why a train step cannot be weighted.

    Args:
        problem: What was found.
        remedy: What the user can do.
    """

    problem: str
    remedy: str


def gradient_probe(
    strategy: tf.distribute.Strategy,
    train_step: Callable[[Nest], Nest],
    batch: Nest,
    *,
    one_replica: bool,
    token_means: set[str],
) -> Probe:
    """Returns a probe of a train step's gradients on the samples ``begin .. end - 1`` of a batch.

    It is called as ``probe(begin, end, scale)``, where `scale` multiplies gradients with respect
    to variables, and returns a sketch for each `apply`.

    Args:
        strategy: Strategy of the model.
        train_step: Train step of the user.
        batch: Nest of tensors, whose first axis is that of samples.
        one_replica: Whether the train step sees a single replica.
        token_means: Collects why losses are divided by a number of tokens; the probe divides them
            by the number of samples instead.
    """

    def replica(begin: tf.Tensor, end: tf.Tensor, scale: tf.Tensor) -> list[tf.Tensor]:
        part = tf.nest.map_structure(lambda t: slice_rows(t, begin, end), batch)
        samples = tf.cast(end - begin, tf.float32)

        def of_samples(tokens: tf.Tensor, why: str) -> tf.Tensor:
            token_means.add(why)
            return tokens / samples

        patches = [compat.token_means_scaled(of_samples)]
        if one_replica:
            added = compat.added_vectors_scaled(1.0 / samples, first_leaf(part))
            patches = [compat.one_replica_view(), added, *patches]
        return sketches_as_one_process(train_step, part, *patches)

    @contextmanager
    def patches(begin: tf.Tensor, end: tf.Tensor, scale: tf.Tensor) -> Iterator[None]:
        with (
            compat.noise_alike_for_all_samples(),
            compat.batch_norm_in_inference(),
            compat.scaled_gradients(scale),
        ):
            yield

    return Probe(strategy, replica, (tf.int64, tf.int64, tf.float32), patches)


def prove(
    train_step: TrainStep,
    strategy: tf.distribute.Strategy,
    batch: Nest,
    *,
    by_tokens: bool = False,
) -> Weighting | Refusal:
    """Returns how the gradients of a train step are to be weighted.

    Every worker must call it at the same time with the same batch.

    Args:
        train_step: Train step of the user.
        strategy: Strategy under which it runs.
        batch: At least two samples, as tensors; all of them are the same on all workers.
        by_tokens: Whether means over tokens are weighted by tokens.
    """
    token_means: set[str] = set()

    def probe(one_replica: bool) -> Probe:
        return gradient_probe(
            strategy, train_step.function, batch, one_replica=one_replica, token_means=token_means
        )  # fmt: skip

    alone = probe(one_replica=True)
    if token_means and not by_tokens:
        return Refusal(
            f"{' and '.join(sorted(token_means))}, which is no mean over samples then",
            'pass weight_by="mask" to LoadBalancer, which weights workers by tokens',
        )
    rows = int(count_rows(keras.tree.flatten(batch)[0]))
    cuts = (max(1, rows // 3), max(1, rows // 2))
    whole = alone(0, rows, 1.0)
    if not whole:
        return Refusal(
            f"{train_step.name} applied no gradients",
            "call optimizer.apply (or apply_gradients) in it, so that they can be weighted",
        )
    tolerance = _LOW_PRECISION_TOLERANCE if train_step.is_inexact else _TOLERANCE
    every_part = [(cut, alone(0, cut, 1.0), alone(cut, rows, 1.0)) for cut in cuts]
    parts = [part for part in every_part if _are_finite([*part[1], *part[2]])]
    if not parts or not _are_finite(whole):
        logger.warning(
            "the gradients of the first samples are not finite, so that it could not be proven that"
            " the loss is a mean over samples: it is assumed to be"
        )
        return Weighting(by_tokens=by_tokens)
    calls = range(len(whole))
    errors = [
        max(
            deviation(rows * whole[k], cut * first[k] + (rows - cut) * second[k])
            for cut, first, second in parts
        )
        for k in calls
    ]
    means = [error <= tolerance for error in errors]
    clipping = Refusal(
        f"{train_step.name} or a subclass of an optimizer clips gradients (or changes them in "
        "another way that is not linear), on each worker's own batch",
        "let the optimizer do it: clipnorm, global_clipnorm or clipvalue",
    )

    def clips(means: Sequence[bool]) -> bool:
        return not train_step.keeps_gradients and _clips(alone, rows, cuts[0], means, tolerance)

    if all(means):
        if clips(means):
            return clipping
        return Weighting(sums=(False,), by_tokens=by_tokens)
    # What is the same for all batches, if the loss is a sum over samples.
    constants = [[first[k] + second[k] - whole[k] for _, first, second in parts] for k in calls]
    sums = [
        deviation(constants[k][0], constants[k][-1], scale=whole[k]) <= tolerance for k in calls
    ]
    free = [sums[k] and deviation(constants[k][0], 0 * whole[k], scale=whole[k]) <= tolerance
            for k in calls]  # fmt: skip
    if all(mean or alone_sum for mean, alone_sum in zip(means, free, strict=True)):
        if clips(means):
            return clipping
        return Weighting(sums=tuple(not mean for mean in means), by_tokens=by_tokens)
    if all(sums) and _divides_constants(probe(one_replica=False), constants, whole, rows, cuts[0],
                                        strategy.num_replicas_in_sync, tolerance):  # fmt: skip
        return Weighting(one_replica=False, sums=(True,), by_tokens=by_tokens)
    worst = max(k for k in calls if not means[k])
    return Refusal(
        f"the loss of {train_step.loss_name} is neither a mean nor a sum over samples: the "
        f"gradient of a batch differs by {errors[worst]:.1%} from the mean of those of its parts",
        "average a loss of each sample, with no term that depends on several samples of the batch "
        'or on their number (for a mean over valid tokens, let Keras divide: weight_by="mask" with '
        "masks or reduction='mean_with_sample_weight')",
    )


def _are_finite(sketches: Sequence[Sketch]) -> bool:
    return all(np.isfinite(sketch).all() for sketch in sketches)


def _clips(probe: Probe, rows: int, cut: int, means: Sequence[bool], tolerance: float) -> bool:
    """Returns whether gradients are changed non-linearly between the tape and the optimizer."""
    whole, first, second = probe(0, rows, _LARGE), probe(0, cut, _LARGE), probe(cut, rows, _LARGE)
    return any(
        deviation(*((rows * w, cut * a + (rows - cut) * b) if mean else (w, a + b))) > tolerance
        for w, a, b, mean in zip(whole, first, second, means, strict=True)
        if _are_finite([w])
    )


def _divides_constants(
    probe: Probe,
    constants: Sequence[Sequence[Sketch]],
    whole: Sequence[Sketch],
    rows: int,
    cut: int,
    replicas: int,
    tolerance: float,
) -> bool:
    """Returns whether a step that sees all replicas divides what does not depend on samples."""
    found, first, second = probe(0, rows, 1.0), probe(0, cut, 1.0), probe(cut, rows, 1.0)
    return all(
        deviation(
            replicas * (first[k] + second[k] - found[k]), constants[k][0], scale=replicas * whole[k]
        )
        <= tolerance
        for k in range(len(found))
    )
