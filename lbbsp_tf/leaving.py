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

from lbbsp_core.runtime.activity import Activity
from lbbsp_core.runtime.exit import on_exit
from lbbsp_core.runtime.heartbeat import Heartbeat
from lbbsp_tf.liveness import current_activity

EXIT_SECONDS = 24 * 3600
"""Longest wait for other workers. A worker that has died, or is silent, ends the wait before."""

_UNWATCHED_EXIT_SECONDS = 120
"""The same without heartbeats."""

_LEADER_SECONDS = 1.0
"""Time in which the other processes end before the leader, which serves the coordination."""


@functools.cache
def leave_together(rank: int, heartbeat: Heartbeat | None) -> None:
    """Makes this process wait at its end until all workers have reached theirs.

    A process that fails does not wait, see `on_exit`.

    Args:
        rank: Number of this worker; 0 is the leader of the coordination service.
        heartbeat: Heartbeat of this process.
    """
    on_exit(functools.partial(_leave, rank, heartbeat))


def _leave(rank: int, heartbeat: Heartbeat | None) -> None:
    current_activity().enter(Activity.LEAVING)
    seconds = EXIT_SECONDS if heartbeat is not None else _UNWATCHED_EXIT_SECONDS
    # The main thread can be interrupted only while it does not wait inside TensorFlow.
    waiting = threading.Thread(target=_wait_for_all, args=(seconds,), daemon=True)
    waiting.start()
    waiting.join(seconds + 10)
    if heartbeat is not None:
        heartbeat.stop()
    if rank == 0:
        time.sleep(_LEADER_SECONDS)


def _wait_for_all(seconds: int) -> None:
    # The barrier fails if a worker has died or takes too long.
    with contextlib.suppress(tf.errors.OpError, RuntimeError, AttributeError):
        context.context().wait_at_barrier("lbbsp/exit", seconds * 1000)
