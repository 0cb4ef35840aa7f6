"""What a train step does beside its gradients: variables that it assigns, scalars, targets."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from lbbsp_tf.cluster import rank_and_workers
from lbbsp_tf.compat import Nest
from lbbsp_tf.compat.evaluation import Kind, has_mean_loss, has_rows, regularisation
from lbbsp_tf.exactness.probe import Written
from lbbsp_tf.exactness.rounding import INEXACT, SINGLE
from lbbsp_tf.exactness.trial import Split, Trials
from lbbsp_tf.exchange.collectives import mirrored_collectives
from lbbsp_tf.rows import concatenate_rows, slice_rows
from lbbsp_tf.step.train_step import is_inexact

logger = logging.getLogger("lbbsp.tf")


def assigned_from_samples(splits: Sequence[Split], *, tolerance: float) -> list[str]:
    """Returns names of variables that a train step assigns values that depend on its samples.

    Each worker would assign a value of its own samples. Metrics, which combine the values of
    workers when they are read, are left out.
    """
    names = {
        of_whole.name
        for split in splits
        for part in (split.first, split.second)
        for of_whole, of_part in zip(split.whole.written, part.written, strict=True)
        if not of_whole.is_local and _differ(of_whole, of_part, tolerance)
    }
    return sorted(names)


def _differ(whole: Written, other: Written, tolerance: float) -> bool:
    try:
        epsilon = float(ml_dtypes.finfo(whole.after.dtype).eps)
    except ValueError:  # no floating-point numbers
        return not np.array_equal(whole.after, other.after)
    if np.array_equal(whole.after, other.after, equal_nan=True):
        return False
    before, after, other_after = (np.float64(a) for a in (whole.before, whole.after, other.after))
    size = np.abs(after).max()
    change = np.fmin(np.abs(after - before).max(), size)  # it may have been infinite, or 1e9
    return not np.abs(after - other_after).max() <= max(tolerance * change, 8 * epsilon * size)


def factors_of_logged(
    alone: Sequence[Split], splits: Sequence[Split], replicas: int, *, tolerance: float
) -> tuple[float | None, ...]:
    """Returns how the scalars that a train step logs on each worker make up that of all samples.

    A sum over samples consists of parts that add up and of a constant c, such as regularisers. N
    workers, each with its own samples, log ``v_1 + ... + v_N = v - c + N c``, where v is what one
    of them would log of all samples: `alone`, as one process. In `splits`, the step sees what it
    will see. The factors are those of the sum over workers; None is for what is no sum.
    """
    workers = max(2, replicas)  # with a single one, nothing would be shown
    agree = []  # of each split, for each factor and number
    for split_alone, split in zip(alone, splits, strict=True):
        expected = np.array(split_alone.whole.scalars)
        value, first, second = split.values("scalars")
        constant = first + second - value
        total = value - constant + workers * constant
        scale = np.abs([expected, first, second]).max(axis=0)
        candidates = np.stack([split.mean_of(first, second), total, total / workers])
        agree.append(np.abs(candidates - expected) <= tolerance * scale)
    factors = (None, 1.0, 1 / workers)
    return tuple(
        next((factor for factor, holds in zip(factors, verdicts, strict=True) if holds), None)
        for verdicts in np.all(agree, axis=0).T
    )


def targets_are_sums(splits: Sequence[Split], *, tolerance: float) -> tuple[bool | None, ...]:
    """Returns whether the targets of gradients are sums over samples or means; None if neither."""
    kinds = _kinds(splits, "targets", tolerance)
    return tuple(None if kind == Kind.OTHER else kind != Kind.MEAN for kind in kinds)


def kinds_of_evaluated(model: keras.Model, batch: Nest) -> Sequence[Kind]:
    """Returns what the scalars of a test step are, in order; a collective.

    Losses that are not Keras's own are tried on a few samples of each worker.
    """
    if has_mean_loss(model) or not all(map(has_rows, tf.nest.flatten(batch))):
        return ()
    few = tf.nest.map_structure(lambda leaf: slice_rows(leaf, 0, 4), batch)
    few = tf.nest.map_structure(lambda leaf: concatenate_rows(leaf, leaf), few)  # at least two
    strategy = model.distribute_strategy
    splits = Trials(strategy, model.test_step, few, one_replica=True, token_means=set()).splits()
    constant = float(regularisation(model))
    is_coarse = is_inexact(keras.config.dtype_policy().compute_dtype)
    kinds = _kinds(splits, "scalars", (INEXACT if is_coarse else SINGLE).tolerance, constant)
    rank, workers = rank_and_workers(strategy.cluster_resolver)
    rows = mirrored_collectives(strategy).all_gather(kinds) if workers > 1 else [kinds]
    kinds = [Kind(max(column)) for column in zip(*rows, strict=True)]  # of zeros, none is known
    if Kind.OTHER in kinds and rank == 0:
        logger.warning(
            "%s.test_step logs a number that is neither a mean nor a sum over samples: the mean of "
            "the workers' numbers, weighted by their samples, is shown, and depends on how many "
            "workers there are",
            type(model).__name__,
        )
    return kinds


def _kinds(
    splits: Sequence[Split], name: str, tolerance: float, constant: float = 0.0
) -> list[Kind]:
    """Returns what each number of trials is, of which the `constant` depends on no samples."""
    errors = []
    for split in splits:
        whole, first, second = numbers = split.values(name)
        scale = np.abs(numbers).max(axis=0)
        both = first + second
        candidates = np.stack([split.mean_of(first, second), both, both - constant])
        errors.append(np.abs(candidates - whole) / np.where(scale > 0, scale, 1.0))
    worst = np.max(errors, axis=0)  # of each kind and number
    best = np.where(worst.min(axis=0) <= tolerance, worst.argmin(axis=0), Kind.OTHER)
    return [Kind(kind) for kind in best]
