"""Orderly end of a job: no worker leaves while others still train or evaluate.

A worker that ends early is missed by the coordination service of TensorFlow. The other workers then
print errors ("failed to connect", "UNAVAILABLE"), although nothing has failed.
"""

from __future__ import annotations

import functools
import time

import tensorflow as tf

from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_core.runtime.reliability.exit import end_now, on_exit
from lbbsp_core.runtime.reliability.heartbeat import Heartbeat
from lbbsp_tf import compat, service
from lbbsp_tf.activity import current_activity

_LEADER_SECONDS = 1.0  # in which the others end before the leader, which serves the coordination
_POLL_MILLISECONDS = 1000


@functools.cache
def leave_together(rank: int, workers: int, heartbeat: Heartbeat) -> None:
    """Makes this process wait at its end until all workers have reached theirs.

    A process that fails does not wait, see `on_exit`. Worker 0 is the leader of the coordination
    service. The heartbeat of this process ends the wait if a worker is lost.
    """
    on_exit(functools.partial(leave, rank, workers, heartbeat))


@functools.cache
def leave(rank: int, workers: int, heartbeat: Heartbeat) -> None:
    """Waits until all workers have reached their end, once; see `leave_together`."""
    current_activity().enter(Activity.LEAVING)
    heartbeat.start()  # a script without a LoadBalancer has not
    try:
        _wait_for_all(rank, workers, heartbeat)
    except tf.errors.OpError as error:  # an orderly end would wait for the dead for a minute
        # The coordination service, which does not respond, is that of worker 0.
        lost = compat.lost_worker(error, lambda *_: heartbeat.names[0])
        end_now(1, f"lbbsp: {lost or f'another worker has died before its end: {error}'}")
    if rank == 0:
        time.sleep(_LEADER_SECONDS)


def _wait_for_all(rank: int, workers: int, heartbeat: Heartbeat) -> None:
    """Waits as `wait_at_barrier` of TensorFlow does, which would keep heartbeats from running."""
    if rank > 0:
        service.write(f"lbbsp/reached/{rank}", "")
        _wait_for("lbbsp/reached/all")
        service.write(f"lbbsp/left/{rank}", "")
        heartbeat.stop()
        return
    for worker in range(1, workers):
        _wait_for(f"lbbsp/reached/{worker}")
    service.write("lbbsp/reached/all", "")
    staying = set(range(1, workers))
    while staying:  # the leader must not end before they have been answered
        for worker in sorted(staying):
            if _is_set(f"lbbsp/left/{worker}"):
                heartbeat.forget(worker)
                staying.remove(worker)
    heartbeat.stop()


def _wait_for(key: str) -> None:
    while not _is_set(key):
        pass


def _is_set(key: str) -> bool:
    """Returns whether a worker sets a key within a second."""
    return service.wait_for(key, _POLL_MILLISECONDS) is not None
