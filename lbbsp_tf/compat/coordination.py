"""TensorFlow's coordination service: patience with silent workers, and news of a failure."""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager import context

from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_core.runtime.options.env import DEVICES_REMEDY
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_tf import service
from lbbsp_tf.activity import current_activity
from lbbsp_tf.cluster import rank_and_workers
from lbbsp_tf.compat.values import Method, patch_broken

HEARTBEAT_MILLISECONDS = 24_000
"""Time after which TensorFlow itself ends a job whose worker is silent.

With its default of 10 s it does so 5 to 10 s after a worker was suspended. That is before our own
heartbeats can, and without a word about what that worker did.
"""

FAILED = "has failed: see its output"

_BROADCAST = "_get_variable_creator_initial_value"

_PATIENCE_MILLISECONDS = 5_000
"""Longest wait for worker 0 to create the variable; its broadcast is then waited for."""

_created: list[str] = []
_job: list[tuple[int, int]] = []


def extend_heartbeat_timeout() -> None:
    """Makes strategies that are created from now on leave silent workers to our heartbeats."""
    name, sign = "configure_coordination_service", "heartbeat_timeout_in_ms"
    patch_broken(context.Context, name, sign, _configure)


def _configure(original: Method, self: context.Context, *args: object, **options: object) -> None:
    if len(args) < 5:  # as a positional argument, the time is the fifth
        options.setdefault("heartbeat_timeout_in_ms", HEARTBEAT_MILLISECONDS)
    original(self, *args, **options)


def restore_sigterm() -> None:
    """Makes SIGTERM end this process again, or call the script's own handler.

    The constructor of a strategy installs a handler, unknown to Python, which only notes the signal
    for TensorFlow's own preemption checkpoints: a launcher would wait for the process in vain.
    """
    handler = signal.getsignal(signal.SIGTERM)  # the last one of which Python knows
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def abort_collectives(worker: str) -> None:
    """Ends the collectives of all other workers with an error; this one must have met them."""
    with contextlib.suppress(tf.errors.OpError):
        context.context().report_error_to_cluster(tf.errors.ABORTED, f"{worker} {FAILED}")


def lost_worker(error: BaseException | None, name: Callable[[str, int], str]) -> str | None:
    """Returns why, or for which worker, a collective has failed; None if that is unknown."""
    if not isinstance(error, tf.errors.OpError):
        return None
    if match := re.search(rf"worker \d+ \(\S+\) {FAILED}", str(error)):
        return match[0]
    if "incompatible device type" in str(error):  # in the first variable of a strategy's scope
        return f"workers have devices of different types: {DEVICES_REMEDY}"
    unreached = re.search(r"remote target /job:(\w+)/replica:\d+/task:(\d+)", str(error))
    if unreached is None:
        return None
    return f"{name(unreached[1], int(unreached[2]))} cannot be reached any more: see its output"


def compare_variables() -> None:
    """Makes workers compare each variable that they create with that of worker 0.

    `MultiWorkerMirroredStrategy` broadcasts the initial value of each variable. Where the workers
    build different models, it fails with errors of collectives that name no variable, or broadcasts
    the value of another variable of the same shape.
    """
    patch_broken(CollectiveAllReduceExtended, _BROADCAST, "initial_value", _with_comparison)


def _with_comparison(
    create: Method, extended: Any, replica_id: int, device: str, primary_var: Any, **options: Any
) -> Callable[[], Any]:
    if not replica_id and extended._num_workers > 1 and "initial_value" in options:
        initial_value = options["initial_value"]

        def compared() -> Any:
            value = initial_value() if callable(initial_value) else initial_value
            _compare(extended, options.get("name"), value, options.get("dtype"))
            return value

        options = {**options, "initial_value": compared}
    create_value: Callable[[], Any] = create(extended, replica_id, device, primary_var, **options)
    if replica_id:
        return create_value

    @functools.wraps(create_value)
    def explained() -> Any:
        with current_activity().during(Activity.MEETING), explained_by_variables(own_variables=1):
            return create_value()

    return explained


@contextlib.contextmanager
def explained_by_variables(
    own_variables: int = 0,  # 1 if this worker creates one
) -> Iterator[None]:
    """Replaces an error of a collective by one that names the variables that differ, if any do."""
    try:
        yield
    except tf.errors.OpError as error:
        if not _job:
            raise
        failed = FAILED in str(error)  # that worker may have created fewer variables
        rank, workers = _job[0]
        number = len(_created) - own_variables
        own_text = _created[number] if own_variables and _created else None
        with contextlib.suppress(tf.errors.OpError):  # of a service that has gone with worker 0
            for other in range(workers):
                text = None if other == rank else service.wait_for(_key(other, number), 500)
                if text not in (None, own_text) and not (failed and own_text is None):
                    raise _difference(number, {other: text, rank: own_text}) from error
                if text is None and own_text is not None and other == 0 < rank and not failed:
                    raise _difference(number, {0: None, rank: own_text}) from error
        raise


def _compare(extended: Any, name: str | None, value: Any, dtype: Any) -> None:
    if not tf.executing_eagerly():
        return
    if not _job:
        _job.append(rank_and_workers(extended._container_strategy().cluster_resolver))
    rank, _ = _job[0]
    tensor = tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype)
    text = f"{tensor.dtype.name} {tuple(tensor.shape)}"
    if name == "learning_rate" and tensor.shape.rank == 0:
        text += f" = {float(tensor):.7g} (the learning rate)"
    number = len(_created)
    _created.append(text)
    with contextlib.suppress(tf.errors.OpError):  # of a service that has gone: its end is noticed
        service.write(_key(rank, number), text)
    if rank:
        expected = service.read(_key(0, number), _PATIENCE_MILLISECONDS)
        if expected is not None and expected != text:
            raise _difference(number, {0: expected, rank: text})


def _difference(number: int, texts: dict[int, str | None]) -> DisagreementError:
    listing = ", ".join(
        f"worker {rank} has {text or 'no such variable'}" for rank, text in sorted(texts.items())
    )
    return DisagreementError(
        f"workers disagree on variable {number}, counted in the order of creation: {listing}; "
        "build the same model, with the same optimizer, on all workers"
    )


def _key(rank: int, number: int) -> str:
    return f"lbbsp/variable/{rank}/{number}"
