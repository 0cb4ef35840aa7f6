"""State that all stores of this process share: the native store, its shutdown, time limits."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import mxnet as mx

from lbbsp_core.runtime.loop.pipelined import PipelinedCollectives, PipelinedSession
from lbbsp_core.runtime.options.defaults import SILENCE_SECONDS
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.reliability import marks
from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity
from lbbsp_core.runtime.reliability.exit import on_exit
from lbbsp_core.runtime.reliability.heartbeat import Heartbeat
from lbbsp_core.runtime.reliability.liveness import Watch, Watchdog, background_thread
from lbbsp_mx import cluster, compat, env
from lbbsp_mx.reliability import liveness
from lbbsp_mx.reliability.board import KeyBoard
from lbbsp_mx.reliability.endings import Endings
from lbbsp_mx.reliability.liveness import SchedulerWatch
from lbbsp_mx.store.script_keys import FIRST_OWN_KEY

DISTRIBUTED = ("dist_sync", "dist_device_sync")
"""Kinds whose servers sum what all workers push."""

ASYNCHRONOUS = "dist_async"

_LOCAL = "local_allreduce_cpu", "local_allreduce_device", "local_update_cpu"
IN_ONE_PROCESS = ("local", "device", *_LOCAL)

ALIASES = {"dist": "dist_sync"}
"""Other names of MXNet for its stores."""

NAME = "lbbsp"
"""Name in MXNet's registry; ``lbbsp_KIND`` gives the store of a kind."""

LEAVE_SECONDS = 1800.0
"""Seconds that a finished worker waits for the others, which may still be evaluating."""

_TAIL_SECONDS = 60.0  # for which the sums of the last step may travel to the slowest worker
_LEFT_REMEDY = (
    "let all workers make the same number of steps, or call trainer.request_stop(), after which "
    "trainer.stopping is true on all workers after the same step"
)
_SHUTDOWN_SECONDS = 12.0  # for which the servers may need to end, when all workers have finished


def kind_of(store: object) -> str | None:
    """Returns the kind of a store, or that for which a name of MXNet or its registry stands.

    Of stores of others, which are none of MXNet's KVStores, it is None.
    """
    if isinstance(store, mx.kv.KVStore):  # of ours not all types tell the kind
        store = getattr(store, "kind", store.type)
    if not isinstance(store, str):
        return None
    kind = store.removeprefix(f"{NAME}_")
    return ALIASES.get(kind, kind)


class Runtime:
    """State that all stores of a process share."""

    def __init__(self) -> None:
        self.watchdog = Watchdog()
        self.activity = CurrentActivity()
        self.lock = threading.Lock()
        """Lock for calls of the distributed store, which keeps tables without one."""
        self.numbers = itertools.count(FIRST_OWN_KEY)
        self.taken: set[int] = set()
        """Native numbers of keys that scripts use."""
        self.has_trainer = False
        self.compresses = False
        """True if MXNet compresses what is pushed."""
        self.distributed: mx.kv.KVStore | None = None
        self.endings = Endings()
        """Work that must be done before this process leaves the cluster."""
        self.optimizer_of = ""
        """Name of the class whose optimizer the servers run, if they run one."""
        self.drawn_for: Callable[[], object] = lambda: None
        """Returns the steps for which batches are drawn, if they still exist."""
        self._transport: liveness.Nodes | None = None
        watch = SchedulerWatch(
            lambda: self._transport,
            liveness.scheduler_answers,
            env.silence_seconds(),
            self._explain,
        )
        self._name = "this worker"  # until its number is known, for which MXNet asks its library
        self._watching = Watch(watch.check, lambda: self._name)
        self._exchange: _Exchange | None = None

    def native(self, kind: str | mx.kv.KVStore, start_seconds: float) -> mx.kv.KVStore:
        """Returns a native store; a process has only one distributed store.

        `kind` may also be an existing native store.
        """
        if not isinstance(kind, str):
            if kind.type.startswith("dist") and self.distributed is None:
                self._adopt(kind)
            return kind
        if kind in IN_ONE_PROCESS:
            return mx.kv.create(kind)
        if (store := self.distributed) is None:
            message = (
                f"the cluster of {cluster.describe()} has not started within {start_seconds:g} s: "
                "start the scheduler, all servers and all workers, each once, and check that they "
                "can connect to each other"
            )
            self._watching.start()
            with self.watchdog.deadline(start_seconds, message), marks.waiting():
                store = self._adopt(mx.kv.create(kind))
        if kind_of(store) != kind:
            raise ValueError(
                f"this process already has a store {store.type!r}, and MXNet cannot "
                f"create a second one: use the first one instead of {kind!r}"
            )
        return store

    def compress(self) -> None:
        """Ends this package's own exchanges, since MXNet compresses everything that is pushed."""
        self.compresses = True
        self._end_exchange()

    def waiting(self, seconds: float, reason: str, owner: str) -> AbstractContextManager[None]:
        """Ends the process if the wait inside the context takes longer than `seconds`.

        `reason` completes "has waited ..."; `owner` is the class whose `wait_seconds` is the limit.
        """
        return self.watchdog.deadline(
            seconds,
            f"{self._name} has waited {seconds:g} s {reason} and exits: a worker or server did not "
            f"respond; if it only needs more time, raise wait_seconds of {owner}",
        )

    def open_session(
        self, collectives: PipelinedCollectives, total: int, options: SessionOptions, **more: Any
    ) -> PipelinedSession:
        """Creates the session of a training of this process; `total` is its global batch size."""
        made = PipelinedSession(
            collectives, total, options, framework="mxnet", versions={"mxnet": mx.__version__},
            activity=self.activity, **more,
        )  # fmt: skip
        self.use_options(options)
        return made

    def require_exact_sums(self, user: str) -> None:
        """Raises ValueError if MXNet compresses what is pushed, and lets nothing do so later."""
        if self.compresses:
            raise ValueError(
                f"{user} needs exact sums, and gradient compression was set on the store: leave "
                "out set_gradient_compression"
            )
        self.has_trainer = True

    def use_options(self, options: SessionOptions) -> None:
        """Uses the options that concern lost workers."""
        if options.silence_seconds not in (SILENCE_SECONDS, env.silence_seconds()):
            raise ValueError(
                f"silence_seconds = {options.silence_seconds!r} is no option of MXNet's workers, "
                "because its scheduler watches over them: set LBBSP_SILENCE_SECONDS in the "
                "environment of all processes"
            )
        if self._exchange is not None:
            self._exchange.heartbeat.use_times(math.inf, options.limit_seconds)

    def _adopt(self, native: mx.kv.KVStore) -> mx.kv.KVStore:
        """Lives and ends with a distributed store from now on; a collective."""
        self.distributed, self._name = native, f"worker {native.rank}"
        self._transport = transport = liveness.Nodes(native.handle)
        on_exit(partial(self._leave, native))
        compat.guard_profiler(partial(self._quiet, transport))
        # Watches over the scheduler, which in turn watches over all other processes.
        self._watching.start()
        native._barrier()
        if kind_of(native) in DISTRIBUTED and native.num_workers > 1:
            self._exchange = _Exchange(native, self)
        return native

    @contextmanager
    def _quiet(self, transport: liveness.Nodes) -> Iterator[None]:
        """Keeps the threads of this package out of MXNet's library."""
        background_thread().start(lambda: None).result()  # after the barrier of the last step
        board = self._exchange.board.using() if self._exchange else nullcontext()
        with board, transport.lock:  # last: meanwhile nothing watches over the scheduler
            yield

    def _explain(self) -> str:
        exchange = self._exchange  # which another thread may end
        return exchange.board.explain() if exchange else ""

    def _end_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _leave(self, native: mx.kv.KVStore) -> None:
        """Leaves the cluster together with all workers.

        MXNet itself leaves when Python frees the store. This is too late: its threads still run
        when its library is unloaded, and abort the process.
        """
        self.endings.run()
        message = f"the other workers have not finished within {LEAVE_SECONDS:g} s: exiting"
        with self.watchdog.deadline(LEAVE_SECONDS, message):
            mx.nd.waitall()  # the others do not need this worker any more, unless they continue
            self.activity.enter(Activity.LEAVING)
            if self._exchange is not None:
                self._exchange.wait_for_peers()
            native._barrier()
        self._end_exchange()
        self._watching.stop()
        self._watching.join()
        message = f"the servers have not ended within {_SHUTDOWN_SECONDS:g} s: exiting"
        with self.watchdog.deadline(_SHUTDOWN_SECONDS, message):
            native.__del__()
            native.handle = None  # freed: Python must not free it again


class _Exchange:
    """What workers exchange beside their training: what each of them does; a collective."""

    def __init__(self, native: mx.kv.KVStore, process: Runtime) -> None:
        self._native, self._lock = native, process.lock
        self._end_key = next(process.numbers)
        native.init(self._end_key, mx.nd.zeros(1))
        keys = [next(process.numbers) for _ in range(native.num_workers)]
        self.board = KeyBoard(native, keys, process.lock)
        self.heartbeat = Heartbeat(
            self.board, native.rank, native.num_workers, process.activity,
            silence_seconds=math.inf,  # the scheduler knows better
            tail_seconds=_TAIL_SECONDS, apart_seconds=_TAIL_SECONDS, left_remedy=_LEFT_REMEDY,
        )  # fmt: skip
        self.heartbeat.start()

    def close(self) -> None:
        """Stops it."""
        self.heartbeat.stop()
        self.board.close()

    def wait_for_peers(self) -> None:
        """Waits until all workers have reached their end.

        MXNet counts who waits at a barrier, not at which one: a worker that leaves too early would
        let others pass one of their training, and fail in places without a meaning. The sum of a
        key is complete when all workers have pushed it.
        """
        array = mx.nd.zeros(1)
        with self._lock:
            self._native.pushpull(self._end_key, array)
        array.wait_to_read()


@lru_cache(maxsize=1)
def runtime() -> Runtime:
    """Returns the runtime of this process."""
    return Runtime()
