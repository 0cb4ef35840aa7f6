"""Program that runs a parameter server or the scheduler: ``python -m lbbsp_mx.server``.

Use it on clusters without ``lbbsp launch``. ``DMLC_ROLE`` selects the role. The process serves
within the import of `lbbsp_mx`, and exits when the job ends: with status 0 if all processes have
left it in order, else with 1. After a SIGTERM, which schedulers send to all processes at once, it
serves on until the workers have written their checkpoint and left, and exits with status 143.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

import mxnet as mx
from mxnet.base import _LIB, check_call

from lbbsp_core.runtime.reliability.exit import LEFT, end_now
from lbbsp_core.runtime.reliability.liveness import Watch, print_message
from lbbsp_core.runtime.reliability.preemption import REPEAT_SECONDS
from lbbsp_mx import cluster, env
from lbbsp_mx.reliability import liveness
from lbbsp_mx.reliability.liveness import NodesWatch, SchedulerWatch

_OPTIMIZER = 0  # the only command that workers send
_ANSWER_SECONDS = 600.0  # for which a server waits for a scheduler; workers have `start_seconds`


def serve() -> NoReturn:
    """Runs the server or scheduler until the job ends, and exits."""
    store = mx.kv.create("dist")
    process = _Process(store)
    watching = Watch(process.check, process.name, end=process.end)
    watching.start()
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

    def control(command: int, body: bytes, _: object) -> None:
        try:
            if command == _OPTIMIZER:
                store.set_optimizer(read_optimizer(body))
            else:  # as MXNet's own server
                print_message(f"server {store.rank}: unknown command ({command}, {body!r})")
        except BaseException:  # MXNet would ignore it, and the workers would keep waiting
            end_now(1, traceback.format_exc())

    check_call(_LIB.MXKVStoreRunServer(store.handle, prototype(control), None))
    watching.stop()
    watching.join()
    end_now(0)


def read_optimizer(body: bytes) -> mx.optimizer.Optimizer:
    """Reads the optimizer that worker 0 has sent."""
    try:
        return pickle.loads(body)
    except (AttributeError, ImportError) as error:
        raise RuntimeError(
            f"a server cannot import the optimizer, or its lr_scheduler ({error}): define classes "
            "of your own in a module beside the script, and import it there"
        ) from error


class _Process:
    """This process, which is the scheduler or a server."""

    def __init__(self, store: mx.kv.KVStore) -> None:
        self._store, self._transport, self._runs = store, liveness.Nodes(store.handle), False
        self._is_scheduler = env.role() == "scheduler"
        seconds = env.silence_seconds()
        self._watch: NodesWatch | SchedulerWatch
        if self._is_scheduler:
            names = liveness.node_names(*cluster.counts())
            self._watch = NodesWatch(self.transport, liveness.peers, names, seconds)
        else:
            self._watch = SchedulerWatch(
                self.transport, liveness.scheduler_answers, seconds, answer_seconds=_ANSWER_SECONDS
            )
        self._asked_seconds: float | None = None  # since a SIGTERM
        # Python's own handlers would run on the main thread, which is in MXNet's library.
        self._signals, writer = os.pipe()
        for end in (self._signals, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGTERM, lambda *_: None)

    def check(self, seconds: float) -> str | None:
        """Returns why this process must end, or None; see `NodesWatch` and `SchedulerWatch`."""
        is_signalled = False
        with suppress(BlockingIOError):
            is_signalled = signal.SIGTERM in os.read(self._signals, 64)
        if self._asked_seconds is not None:
            self._asked_seconds += seconds
            if is_signalled and self._asked_seconds > REPEAT_SECONDS:
                end_now(LEFT)
        elif is_signalled:
            self._asked_seconds = 0.0
            print_message(
                f"{self.name()} got SIGTERM, and ends after the workers; another ends it now"
            )
        if self._asked_seconds is not None:
            self._watch.leaving = True
            other_nodes = cluster.counts()[1] if self._is_scheduler else 1  # than workers
            if len(liveness.peers()) <= other_nodes:
                end_now(LEFT)
        return self._watch.check(seconds)

    def end(self, status: int, why: str) -> NoReturn:
        end_now(status if self._asked_seconds is None else LEFT, why)

    def transport(self) -> liveness.Nodes | None:
        """Returns the transport; None until it runs, because a call before aborts the process."""
        self._runs = self._runs or liveness.is_listening()
        return self._transport if self._runs else None

    def name(self) -> str:
        """Returns the name; fails while the transport stops, as when a job has ended in order."""
        if self._is_scheduler:
            return "the scheduler"
        transport = self.transport()
        is_numbered = transport is not None and transport.is_ready()
        return f"server {self._store.rank}" if is_numbered else "this server"


if __name__ == "__main__":  # reached only if the role is neither server nor scheduler
    role = env.cluster().get("DMLC_ROLE")
    print(
        f"DMLC_ROLE must be server or scheduler, got {role!r}: workers run the training script",
        file=sys.stderr,
    )
    sys.exit(2)
