"""Liveness of a job's workers: waiting for those that have not started, then heartbeats.

It begins with the import of this package, and ends with the script.
"""

from __future__ import annotations

import functools
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from lbbsp_core.runtime import marks
from lbbsp_core.runtime.activity import CurrentActivity
from lbbsp_core.runtime.exit import fail_fast, on_failure
from lbbsp_core.runtime.heartbeat import Heartbeat
from lbbsp_core.runtime.options import SessionOptions
from lbbsp_tf import env

START_REPORT_SECONDS: Final = 15.0
"""Time between two reports on workers that have not started."""

_PROBE_SECONDS: Final = 1.0
_CONNECT_SECONDS: Final = 2.0


@functools.cache
def current_activity() -> CurrentActivity:
    """Returns what this process does now."""
    return CurrentActivity()


def watch_from_import() -> None:
    """Starts liveness in a worker of several, as ``TF_CONFIG`` names them; call it once.

    A script that fails anywhere then ends at once, and says which workers it waits for at its
    start. Without such a cluster this has no effect, nor in jobs with parameter servers.
    """
    config = json.loads(env.tf_config() or "{}")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    addresses = [*cluster.get("chief", ()), *cluster.get("worker", ())]
    if len(addresses) < 2 or cluster.get("ps") or task.get("type") not in ("chief", "worker"):
        return
    fail_fast()
    marks.begin()
    own = cluster[task["type"]][task["index"]]
    rank = addresses.index(own)
    watch = _StartWatch(addresses, rank)
    threading.Thread(target=watch.run, name="lbbsp-start", daemon=True).start()
    from lbbsp_tf import compat
    from lbbsp_tf.board import CoordinationBoard

    on_failure(lambda: compat.tell_of_failure(_name(rank, own)))
    if CoordinationBoard.is_available():
        compat.be_patient()


def start_heartbeat(
    rank: int, addresses: Sequence[str], options: SessionOptions
) -> Heartbeat | None:
    """Starts the heartbeat of this process, or changes its times if it has one.

    Args:
        rank: Number of this worker.
        addresses: Addresses of all workers, by rank.
        options: Options of the user.

    Returns:
        The heartbeat; None before TensorFlow 2.19, whose reads have no time limit.
    """
    from lbbsp_tf.board import CoordinationBoard

    if not CoordinationBoard.is_available():
        return None
    heartbeat = _heartbeat(rank, tuple(addresses))
    heartbeat.use_times(options.silence_seconds, options.limit_seconds)
    heartbeat.start()
    return heartbeat


@functools.cache
def _heartbeat(rank: int, addresses: tuple[str, ...]) -> Heartbeat:
    from lbbsp_tf.board import CoordinationBoard

    names = [_name(each, address) for each, address in enumerate(addresses)]
    activity = current_activity()
    return Heartbeat(CoordinationBoard(rank), rank, len(addresses), activity, names=names)


def _name(rank: int, address: str) -> str:
    return f"worker {rank} ({address})"


class _StartWatch:
    """Reports workers that have not started, while this one waits for them.

    The constructor of the strategy waits without a word, but it listens on the port of its worker
    before. So a worker waits as long as its own port accepts connections and TensorFlow is not
    initialised, for the workers whose ports accept none.

    Args:
        addresses: Addresses of all workers, by rank.
        rank: Number of this worker.
    """

    def __init__(self, addresses: Sequence[str], rank: int) -> None:
        self._addresses, self._rank = list(addresses), rank

    def run(self) -> None:
        """Waits until all workers have started."""
        waiting_since, reports = None, 0
        with ExitStack() as waiting:
            while not _is_initialized():
                missing = self._missing()
                if missing and waiting_since is None:
                    waiting_since = time.monotonic()
                    waiting.enter_context(marks.waiting())
                if missing and time.monotonic() >= waiting_since + START_REPORT_SECONDS * (
                    reports + 1
                ):
                    reports += 1
                    names = ", ".join(_name(rank, self._addresses[rank]) for rank in missing)
                    verb = "has" if len(missing) == 1 else "have"
                    print(
                        f"lbbsp: {_name(self._rank, self._addresses[self._rank])} is waiting for "
                        f"{names}, which {verb} not started",
                        file=sys.stderr,
                        flush=True,
                    )
                time.sleep(_PROBE_SECONDS)

    def _missing(self) -> list[int]:
        """Returns the workers for which this one waits."""
        _, _, port = self._addresses[self._rank].rpartition(":")
        if not _accepts(f"localhost:{port}"):
            return []
        return [rank for rank, each in enumerate(self._addresses) if not _accepts(each)]


def _accepts(address: str) -> bool:
    """Returns whether something accepts connections at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _is_initialized() -> bool:
    """Returns whether the constructor of a strategy, or any other use of TensorFlow, has ended."""
    context = sys.modules.get("tensorflow.python.eager.context")
    return context is not None and bool(context.context()._initialized)
