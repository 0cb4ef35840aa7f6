"""Number of replicas as the user's code sees it.

Keras divides a loss by the number of replicas only where its own reduction reduces it: not a loss
function that returns a scalar, an overridden `compute_loss`, or the loss of a `train_step`. Where
it divides, other code multiplies again. Code that sees a single replica computes the same loss as
in a single process, whatever its form, and the step weights its gradients.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

import keras
import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import ReplicaContextBase, StrategyBase

from lbbsp_tf.compat.values import Method, Nest, PerThread

STRATEGIES = (tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.MirroredStrategy)
"""Strategies with several replicas that `LoadBalancer` supports."""


def _seen(number: int, original: Method, self: StrategyBase | ReplicaContextBase) -> int:
    # TensorFlow reads the same property to average the values of variables over replicas.
    caller = sys._getframe(3).f_globals.get("__name__", "")  # of the property, see `values.patch`
    return original(self) if caller.startswith("tensorflow.python.distribute") else number


_viewed = PerThread(
    *((owner, "num_replicas_in_sync", _seen) for owner in (StrategyBase, ReplicaContextBase))
)


def replicas_view(number: int = 1) -> AbstractContextManager[None]:
    """Sets `num_replicas_in_sync` in this thread, except for TensorFlow's own machinery."""
    return _viewed(number)


def bytes_per_pack(strategy: StrategyBase) -> int:
    """Returns `bytes_per_pack` of the strategy's CommunicationOptions; 0 if it is not set."""
    return getattr(getattr(strategy.extended, "_communication_options", None), "bytes_per_pack", 0)


def mean_over_replicas(logs: Nest, share: tf.Tensor) -> Nest:
    """Averages the fractional scalars in a nest over all replicas; other values are kept.

    Call it in a replica. Values that are the same in all of them stay the same. A replica whose
    `share` of all samples (of float64) is 0 does not count, not even if its values are NaN.
    """
    context = tf.distribute.get_replica_context()

    def mean(value: Nest) -> Nest:
        if not (tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating):
            return value
        part = tf.where(share > 0, share * tf.cast(value, tf.float64), 0.0)
        return tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, part), value.dtype)

    return keras.tree.map_structure(mean, logs)
