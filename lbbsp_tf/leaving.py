"""Orderly end of a job: no worker leaves while others still train or evaluate.

A worker that ends early is missed by the coordination service of TensorFlow. The other workers then
print errors ("failed to connect", "UNAVAILABLE"), although nothing has failed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time

import tensorflow as tf
from tensorflow.python.eager import context

from lbbsp_core.runtime.exit import on_exit

EXIT_SECONDS = 120
"""Longest wait for other workers. A worker that has died ends the wait at once."""

_LEADER_SECONDS = 1.0
"""Time in which the other processes end before the leader, which serves the coordination."""


@functools.cache
def leave_together(rank: int) -> None:
    """Makes this process wait at its end until all workers have reached theirs.

    A process that fails does not wait, see `on_exit`.

    Args:
        rank: Number of this worker; 0 is the leader of the coordination service.
    """
    on_exit(functools.partial(_leave, rank))


def _leave(rank: int) -> None:
    # The main thread can be interrupted only while it does not wait inside TensorFlow.
    waiting = threading.Thread(target=_wait_for_all, daemon=True)
    waiting.start()
    waiting.join(EXIT_SECONDS + 10)
    if rank == 0:
        time.sleep(_LEADER_SECONDS)


def _wait_for_all() -> None:
    # The barrier fails if a worker has died or takes too long.
    with contextlib.suppress(tf.errors.OpError, RuntimeError, AttributeError):
        context.context().wait_at_barrier("lbbsp/exit", EXIT_SECONDS * 1000)
