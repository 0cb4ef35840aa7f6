"""Liveness of a job's workers: waiting for those that have not started, then heartbeats.

It begins with the import of this package, and ends with the script.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.reliability import marks
from lbbsp_core.runtime.reliability.exit import fail_fast, on_exit, on_failure
from lbbsp_core.runtime.reliability.heartbeat import Heartbeat
from lbbsp_core.runtime.reliability.liveness import daemon_thread, print_message
from lbbsp_core.runtime.reliability.preemption import keep_forks
from lbbsp_tf import env
from lbbsp_tf.activity import current_activity
from lbbsp_tf.reliability import _start_watch

# What imports TensorFlow is imported where it is used: this module checks TF_CONFIG before.

START_REPORT_SECONDS: Final = 15.0  # between two reports on workers that have not started
_POLL_SECONDS: Final = 0.5


def watch_from_import() -> None:
    """Starts liveness in a worker of several, as ``TF_CONFIG`` names them; call it once.

    A script that fails anywhere then ends at once, and says which workers it waits for at its
    start. Without such a cluster this has no effect.
    """
    if multiprocessing.parent_process() is not None:
        return  # a process that reads data, say
    config = json.loads(env.tf_config() or "{}")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    addresses = [*cluster.get("chief", ()), *cluster.get("worker", ())]
    if len(addresses) < 2 or task.get("type") not in ("chief", "worker"):
        return
    fail_fast()
    marks.begin()
    keep_forks()
    own_address = cluster[task["type"]][task["index"]]
    rank = addresses.index(own_address)
    _watch_start(rank, addresses)
    from lbbsp_tf import compat

    if not marks.are_read():  # a launcher ends the others, and must see first who has failed
        on_failure(lambda: _say_who_is_lost(cluster))
        on_failure(
            lambda: compat.abort_collectives(_name(rank, own_address)) if _has_started() else None
        )
    compat.extend_heartbeat_timeout()


def start_heartbeat(rank: int, addresses: Sequence[str], options: SessionOptions) -> Heartbeat:
    """Starts the heartbeat of this process, or changes its times."""
    heartbeat = _heartbeat(rank, tuple(addresses))
    heartbeat.use_times(options.silence_seconds, options.limit_seconds)
    heartbeat.start()
    return heartbeat


@functools.cache
def _heartbeat(rank: int, addresses: tuple[str, ...]) -> Heartbeat:
    from lbbsp_tf.reliability.board import CoordinationBoard

    names = [_name(*worker) for worker in enumerate(addresses)]
    return Heartbeat(CoordinationBoard(rank), rank, len(names), current_activity(), names=names)


def _say_who_is_lost(cluster: Mapping[str, Sequence[str]]) -> None:
    """Says for which worker this one has failed, as its last line."""
    from lbbsp_tf import compat

    def name(job: str, index: int) -> str:
        chiefs = len(cluster.get("chief", ()))
        return _name(index + (chiefs if job == "worker" else 0), cluster[job][index])

    lost = compat.lost_worker(getattr(sys, "last_value", None), name)
    if lost is not None:
        print_message(lost)


def _name(rank: int, address: str) -> str:
    return f"worker {rank} ({address})"


def _watch_start(rank: int, addresses: Sequence[str]) -> None:
    """Starts a process that names workers that have not started, until all give signs of life."""
    mark = marks.waiting_mark()
    arguments = str(rank), json.dumps(addresses), str(START_REPORT_SECONDS), str(mark or "")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _start_watch.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C at the terminal need not end it
    )

    def end() -> None:
        with suppress(OSError, ValueError):  # it may have ended already
            process.communicate(b"\n")  # a fork may hold the pipe open

    def watch_start() -> None:
        while not _has_started() or (mark is None and not _all_beat(len(addresses))):
            time.sleep(_POLL_SECONDS)
        end()

    def at_exit() -> None:
        if _has_started():  # else the others may wait for this worker in vain
            from lbbsp_tf.reliability.leaving import leave

            leave(rank, len(addresses), _heartbeat(rank, tuple(addresses)))
            end()

    daemon_thread(watch_start, "lbbsp-start").start()
    on_exit(at_exit)


def _all_beat(workers: int) -> bool:
    """Returns whether all workers give signs of life, by which they know of each other's end."""
    from lbbsp_tf.reliability.board import CoordinationBoard

    board = CoordinationBoard(0)
    return all(board.read(rank) is not None for rank in range(workers))


def _has_started() -> bool:
    """Returns whether this worker has met the others, in the constructor of a strategy."""
    find = getattr(sys.modules.get("tensorflow.python.eager.context"), "context", None)
    if find is None:
        return False  # it is still being imported
    context = find()
    initialized = getattr(context, "_initialized", True)
    return bool(initialized and context.coordination_service is not None)
