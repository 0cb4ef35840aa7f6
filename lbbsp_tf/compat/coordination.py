"""TensorFlow's coordination service: patience with silent workers, and news of a failure."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import context

from lbbsp_core.runtime.options.env import DEVICES_REMEDY
from lbbsp_tf.compat.values import Method, patch_broken

HEARTBEAT_MILLISECONDS = 24_000
"""Time after which TensorFlow itself ends a job whose worker is silent.

With its default of 10 s it does so 5 to 10 s after a worker was suspended. That is before our own
heartbeats can, and without a word about what that worker did.
"""

FAILED = "has failed: see its output"


def be_patient() -> None:
    """Makes strategies that are created from now on leave silent workers to our heartbeats."""
    name, sign = "configure_coordination_service", "heartbeat_timeout_in_ms"
    patch_broken(context.Context, name, sign, _configure)


def _configure(original: Method, self: context.Context, *args: object, **options: object) -> None:
    if len(args) < 5:  # as a positional argument, the time is the fifth
        options.setdefault("heartbeat_timeout_in_ms", HEARTBEAT_MILLISECONDS)
    original(self, *args, **options)


def let_sigterm_end() -> None:
    """Makes SIGTERM end this process again, or call the script's own handler.

    The constructor of a strategy installs a handler, unknown to Python, which only notes the signal
    for TensorFlow's own preemption checkpoints: a launcher would wait for the process in vain.
    """
    handler = signal.getsignal(signal.SIGTERM)  # the last one of which Python knows
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def tell_of_failure(who: str) -> None:
    """Ends the collectives of all other workers with an error; this one must have met them."""
    with contextlib.suppress(tf.errors.OpError):
        context.context().report_error_to_cluster(tf.errors.ABORTED, f"{who} {FAILED}")


def lost_worker(error: BaseException | None, name: Callable[[str, int], str]) -> str | None:
    """Returns why, or for which worker, a collective has failed; None if that is unknown."""
    if not isinstance(error, tf.errors.OpError):
        return None
    if told := re.search(rf"worker \d+ \(\S+\) {FAILED}", str(error)):
        return told[0]
    if "incompatible device type" in str(error):  # in the first variable of a strategy's scope
        return f"workers have devices of different types: {DEVICES_REMEDY}"
    unreached = re.search(r"remote target /job:(\w+)/replica:\d+/task:(\d+)", str(error))
    if unreached is None:
        return None
    return f"{name(unreached[1], int(unreached[2]))} cannot be reached any more: see its output"
