"""View of a strategy as a single replica, with which Keras's scaling of losses is neutral.

Keras multiplies the losses that its own reduction computes by 1 / replicas, and the logged loss by
the number of replicas. Losses that user code has reduced are only multiplied, so that they would be
logged N times too large.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from lbbsp_tf.compat.values import is_patched, patched

_view = threading.local()


@contextmanager
def one_replica_view() -> Iterator[None]:
    """Makes ``num_replicas_in_sync`` of each strategy 1 in this thread, inside the context."""
    _patch_strategy()
    _view.depth = _depth() + 1
    try:
        yield
    finally:
        _view.depth -= 1


def _depth() -> int:
    return getattr(_view, "depth", 0)


def _patch_strategy() -> None:
    strategy = tf.distribute.Strategy
    original = strategy.num_replicas_in_sync.fget
    if is_patched(original):
        return

    def num_replicas_in_sync(self: tf.distribute.Strategy) -> int:
        return 1 if _depth() else original(self)

    strategy.num_replicas_in_sync = property(patched(num_replicas_in_sync))
