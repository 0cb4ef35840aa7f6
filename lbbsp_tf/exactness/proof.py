"""Proof that a train step's gradients can be weighted: on a few samples, before training.

The gradient g(B) of a batch B is a mean over samples if for any two parts B1 and B2 of it
``|B| g(B) = |B1| g(B1) + |B2| g(B2)``. It is a sum if ``g(B) = g(B1) + g(B2) - c``, with a part c,
such as that of regularisers, that does not depend on the samples. Both equations are checked on
the model's own train step and weights, with the same noise for all samples, and then with noise of
each sample. They fail for losses that compare the samples of a batch with each other, for means
over tokens, also those that noise has chosen, and for gradients that are clipped on the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from operator import and_
from traceback import walk_tb
from typing import NamedTuple

import keras
import tensorflow as tf

from lbbsp_tf.compat import Nest
from lbbsp_tf.compat.probing import whole_tracebacks
from lbbsp_tf.exactness.effects import assigned_from_samples, factors_of_logged, targets_are_sums
from lbbsp_tf.exactness.equations import Equations
from lbbsp_tf.exactness.rounding import DOUBLE, INEXACT, SINGLE
from lbbsp_tf.exactness.trial import Split, Trials
from lbbsp_tf.rows import count_rows, first_leaf
from lbbsp_tf.step.train_step import TrainStep, Weighting

logger = logging.getLogger("lbbsp.tf")

SAMPLES = 16
_STATE_OF_GENERATOR = "StateVar"
_OTHER = 9973  # samples: nobody writes a model for just so many


class Refusal(NamedTuple):
    """Reason why a train step cannot be weighted, and what the user can do."""

    problem: str
    remedy: str


def prove(
    train_step: TrainStep,
    strategy: tf.distribute.Strategy,
    batch: Nest,
    *,
    by_tokens: bool = False,
    at_tapes: bool = False,
) -> Weighting | Refusal:
    """Returns how the gradients of a train step are to be weighted.

    Every worker must call it at the same time with the same batch.

    Args:
        train_step: Train step of the user.
        strategy: Strategy under which it runs.
        batch: At least two samples, as tensors; all of them are the same on all workers.
        by_tokens: Whether means over tokens are weighted by tokens.
        at_tapes: Whether to prove what holds if gradients are summed as they leave a tape.
    """
    token_means: set[str] = set()
    trials = partial(
        Trials, strategy, train_step.function, batch, token_means=token_means, at_tapes=at_tapes
    )
    alone = trials(one_replica=True)
    if token_means and not by_tokens:
        return Refusal(
            f"{' and '.join(sorted(token_means))}, which is no mean over samples then",
            'pass weight_by="mask" to LoadBalancer, which weights workers by tokens',
        )
    try:
        splits = alone.splits()
    except tf.errors.InvalidArgumentError as error:
        _check_any_size(train_step, partial(trials, one_replica=True, rows=_OTHER))
        alone.again(is_noisy=False)  # which fails likewise, unless it is about few samples
        rows = int(count_rows(first_leaf(batch)))
        raise ValueError(
            f"{train_step.loss_name} works for {rows} samples, but not for {rows // 3}, and "
            "batches of workers may be as small: let it work for any number"
        ) from error
    noisy = [] if any(split.is_finite for split in splits) else alone.noisy_splits()
    splits = noisy or splits  # the same noise may choose no sample at all
    inexact = INEXACT if train_step.is_inexact else SINGLE
    precision = DOUBLE if alone.is_double else inexact
    if refusal := _without_equations(train_step, splits, precision.tolerance):
        return refusal
    finite = [split for split in splits if split.is_finite]
    if not finite:
        _warn_of("not finite")
        return Weighting(by_tokens=by_tokens)
    if any(not sketch.any() for sketch in splits[0].whole.sketches):
        _warn_of("zero")
    equations, replicas = Equations(precision, finite), strategy.num_replicas_in_sync
    repeats = equations.repeats(alone.again(is_noisy=bool(noisy)))
    if not repeats:
        logger.warning(
            "%s draws random numbers in another way than by keras.random or tf.random (NumPy, a "
            "candidate sampler), so that its gradients could only roughly be compared",
            train_step.name,
        )

    def weighted(
        splits_of_step: Sequence[Split], means: Sequence[bool], one_replica: bool
    ) -> Weighting:
        sums = (False,) if all(means) else tuple(not mean for mean in means)
        summed = tuple(map(and_, means, equations.common)) if any(equations.common) else ()
        logged = factors_of_logged(splits, splits_of_step, replicas, tolerance=precision.tolerance)
        targets = targets_are_sums(splits_of_step, tolerance=precision.tolerance)
        return Weighting(one_replica, sums, by_tokens, summed, logged, targets)

    refuted = partial(_refuted, train_step, alone, equations)
    if equations.are_free:
        means = equations.means
        if not train_step.keeps_gradients and equations.error_of(alone.scaled_split(), means):
            return _changed(train_step)
        within = alone.scaled_within() if repeats and not noisy and any(means) else None
        if within and not equations.repeats(within):
            return _changed_within(train_step)
        return refuted(means) or weighted(splits, means, True)
    if all(equations.sums):
        splits_of_replicas = trials(one_replica=False).splits()
        if (shared := equations.shared(splits_of_replicas[0], replicas)) is not None:
            return refuted(shared) or weighted(splits_of_replicas, shared, False)
        if len(finite) > 1 and not any(equations.common):
            return _with_a_term(train_step)
    if not (at_tapes or train_step.keeps_gradients):
        summed = prove(train_step, strategy, batch, by_tokens=by_tokens, at_tapes=True)
        if isinstance(summed, Weighting) and any(summed.summed):
            return _changed(train_step)
    return _not_over_samples(train_step, "the loss", equations.worst_error())


def _without_equations(
    train_step: TrainStep, splits: Sequence[Split], tolerance: float
) -> Refusal | None:
    """Returns a refusal of what a step does, or does not do, besides its gradients."""
    if not splits[0].whole.sketches:
        return Refusal(
            f"{train_step.name} applied no gradients",
            "call optimizer.apply (or apply_gradients) in it, so that they can be weighted",
        )
    assigned = assigned_from_samples(splits, tolerance=tolerance)
    if _STATE_OF_GENERATOR in assigned:
        return Refusal(
            f"{train_step.name} draws from a tf.random.Generator, which goes on by the samples of "
            "each worker",
            "draw by keras.random or tf.random",
        )
    if assigned:
        return Refusal(
            f"{train_step.name} assigns {', '.join(assigned)} a value that depends on the samples, "
            "of which each worker has others",
            "sum gradients by balancer.sum_gradients first, or let an optimizer keep what is "
            "computed from them (gradient_accumulation_steps, momentum, updates), and a metric or "
            "BatchNormalization(synchronized=True) what is computed from samples",
        )
    return None


def _refuted(
    train_step: TrainStep, alone: Trials, equations: Equations, means: Sequence[bool]
) -> Refusal | None:
    """Returns a refusal of what a step does with other noise, weights or branches."""
    precision = equations.precision
    for split in alone.noisy_splits():
        if error := equations.error_of(split, means):
            quantity = "the loss, with noise that differs by sample,"
            return _not_over_samples(train_step, quantity, error)
    for what, split in alone.switched_splits():
        if refusal := _without_equations(train_step, [split], precision.tolerance):
            return refusal
        if error := equations.error_of(split, means):
            return _not_over_samples(train_step, what, error)
    others = alone.other_splits()
    if all(split.is_finite for split in others):
        at_others = Equations(precision, others)
        if (error := at_others.largest_error(means)) > 0:
            return _not_over_samples(train_step, "the loss, with other weights,", error)
    return None


def _not_over_samples(train_step: TrainStep, quantity: str, error: float) -> Refusal:
    return Refusal(
        f"{quantity} of {train_step.loss_name} is neither a mean nor a sum over samples: the "
        f"gradient of a batch differs by {100 * error:.3g} % from the mean of those of its parts",
        "average a loss of each sample, with no term that depends on several samples of the batch "
        'or on their number (for a mean over valid tokens, let Keras divide: weight_by="mask" with '
        "masks or reduction='mean_with_sample_weight')",
    )


def _check_any_size(train_step: TrainStep, trace: Callable[[], Trials]) -> None:
    """Raises an error that names what in a step works for some sizes of a batch only."""
    try:
        with whole_tracebacks():
            trace()
    except Exception as error:
        callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        layers = [
            f"layer {caller.name!r}"
            for caller in callers
            if isinstance(caller, keras.Operation) and not isinstance(caller, keras.Model)
        ]
        where = " in ".join(dict.fromkeys(reversed(layers))) or train_step.loss_name
        raise ValueError(
            f"{where} fixes the size of a batch, but the sizes of workers change from step to "
            "step: take it from the batch, as by keras.ops.shape(x)[0], or write -1 in shapes"
        ) from error


def _changed(train_step: TrainStep) -> Refusal:
    return Refusal(
        f"{train_step.name} or a subclass of an optimizer clips gradients (or changes or uses them "
        "in another way that is not linear), on each worker's own batch",
        "call gradients = balancer.sum_gradients(gradients) after each tape, for those of the "
        "global batch; or let the optimizer do it: clipnorm, global_clipnorm or clipvalue",
    )


def _changed_within(train_step: TrainStep) -> Refusal:
    return Refusal(
        f"a function of {train_step.loss_name} with a gradient of its own (tf.custom_gradient) "
        "clips it (or changes it in another way that is not linear), and the gradients of a mean "
        "are larger if the batch has fewer samples",
        "add up the losses of samples instead, and divide the learning rate by their number, or "
        "clip gradients of variables: clipnorm, global_clipnorm or clipvalue of the optimizer",
    )


def _with_a_term(train_step: TrainStep) -> Refusal:
    return Refusal(
        f"{train_step.loss_name} is a sum over samples and of a term without samples, such "
        "as the squares of weights, which every worker would add",
        "regularise by keras.regularizers, or let the step divide the term by "
        "strategy.num_replicas_in_sync",
    )


def _warn_of(problem: str) -> None:
    logger.warning(
        "the gradients of the first samples are %s, so that it could not be proven that the loss "
        "is a mean over samples: it is assumed to be",
        problem,
    )
