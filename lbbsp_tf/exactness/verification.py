"""Numerical check of the weighting: a step on all replicas against one on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat import Gradients, Nest
from lbbsp_tf.exactness.probe import Probe, deviation, sketch_of, sketches_as_one_process
from lbbsp_tf.rows import slice_rows


def uneven_sizes(total: int, workers: int) -> tuple[int, ...]:
    """Returns sizes >= 1 with the sum `total`, one a worker, about as 1 : 2 : ... : workers.

    Example:
        >>> uneven_sizes(64, 3)
        (11, 21, 32)
    """
    remainder = total - workers
    ends = [remainder * i * (i + 1) // (workers * (workers + 1)) for i in range(workers + 1)]
    return tuple(1 + int(size) for size in np.diff(ends))


def largest_error(
    strategy: tf.distribute.Strategy,
    train_step: Callable[[Nest], Nest],
    weighted_step: Callable[[Nest, tf.Tensor, Callable[[Gradients], None]], None],
    batch: Nest,
    sizes: Sequence[int],
) -> float:
    """Returns the largest relative difference of a weighted step's gradient from the whole batch's.

    Both are computed from the same samples and weights, and with the same noise for all samples;
    nothing is applied. Every worker must call it at the same time.
    """

    def whole() -> list[tf.Tensor]:
        return sketches_as_one_process(train_step, batch, compat.replicas_view())

    def weighted() -> list[tf.Tensor]:
        sketches: list[tf.Tensor] = []
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        rank = int(tf.get_static_value(replica))
        begin = sum(sizes[:rank])
        part = tf.nest.map_structure(lambda t: slice_rows(t, begin, begin + sizes[rank]), batch)
        share = tf.constant(sizes[rank] / sum(sizes), tf.float64)
        weighted_step(part, share, lambda grads: sketches.append(sketch_of(grads)))
        return sketches

    # Two probes, because both must start from the same state of the random generators.
    (results, _), (expected, _) = (
        Probe(strategy, function, compat.same_noise).run() for function in (weighted, whole)
    )
    return max(deviation(e, r) for e, r in zip(expected, results, strict=True))
