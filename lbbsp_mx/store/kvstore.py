"""MXNet's store on keys of its own, which trainers and Module share: `SharedStore`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError

from lbbsp_core.runtime.exchange.collectives import gather_bytes
from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_mx import cluster
from lbbsp_mx.fence import wait_for
from lbbsp_mx.store.collectives import StoreCollectives, share_of
from lbbsp_mx.store.native import ASYNCHRONOUS, DISTRIBUTED, IN_ONE_PROCESS, NAME, kind_of, runtime
from lbbsp_mx.store.script_keys import Keys, ScriptKeys, flat
from lbbsp_mx.store.server_optimizer import ScriptOptimizer

KINDS = (*DISTRIBUTED, ASYNCHRONOUS, *IN_ONE_PROCESS)
GLUON_NAME = "dist_lbbsp"
"""Its name for stock gluon Trainers, which on one device ignore names without "dist" in them."""


class PushedSteps:
    """Steps of a training that pushes gradients, and pulls the new weights; here none."""

    def scaled(self, key: Keys, value: Any, optimizer: mx.optimizer.Optimizer | None) -> Any:
        """Returns the gradients to push in place of `value`."""
        return value

    def exchanged(self, key: Keys, pulled: Any = None) -> None:
        """Notes that keys were pushed, or pulled into the arrays `pulled`."""

    def close(self) -> None:
        """Ends the last step."""


class SharedStore(mx.kv.KVStore):
    """MXNet's store, whose native store several stores of a process share.

    It has the whole interface of `mxnet.kv.KVStore`. The steps of a balanced store, if it has any,
    see and scale what is pushed. `lbbsp_mx.KVStore` describes the arguments.
    """

    def __init__(
        self,
        kind: str | mx.kv.KVStore = "dist_sync",
        *,
        start_seconds: float = 120.0,
        wait_seconds: float = 1800.0,
    ) -> None:
        self.kind = _checked(kind)
        self.distributed = self.kind not in IN_ONE_PROCESS
        native_kind = self.kind if isinstance(kind, str) else getattr(kind, "native", kind)
        self.native = runtime().native(native_kind, start_seconds)
        super().__init__(self.native.handle)
        # Ends the process if the wait inside the context takes too long.
        self.waiting = partial(runtime().waiting, wait_seconds, owner="lbbsp_mx.KVStore")
        # In one process MXNet takes the script's keys themselves.
        self._keys = ScriptKeys(runtime().taken if self.distributed else set())
        self._compression: Mapping[str, object] = {}
        self._collectives = StoreCollectives(self.native, self.waiting)
        self._optimizer: mx.optimizer.Optimizer | None = None
        # Of the keys, as the optimizer has got them; None once values were pushed.
        self._sent_indices: dict[int, int] | None = None
        self._steps = PushedSteps()

    def __del__(self) -> None:
        """Leaves the handle to the native store, which frees it."""

    @property
    def type(self) -> str:
        """Name of the store's type, which gluon reads."""
        return f"{NAME}_{self.kind}"

    @property
    def rank(self) -> int:
        """Number of this worker, in [0, workers)."""
        return self._collectives.rank

    @property
    def num_workers(self) -> int:
        """Number of workers, N."""
        return self._collectives.workers

    # Values; MXNet's own docstrings describe the arguments

    def init(self, key: Keys, value: Any) -> None:
        """Introduces keys with the values of worker 0; a collective.

        Raises:
            MXNetError: A key exists already.
            DisagreementError: Workers introduce different keys.
            ValueError: The process has an `lbbsp_mx.AsyncTrainer`, whose keys these would be.
        """
        with self._introducing("init", key, value) as native:
            super().init(native, value)

    def broadcast(self, key: Keys, value: Any, out: Any, priority: int = 0) -> None:
        """Sends the values of worker 0 to all workers, and waits for them; a collective.

        Unlike those of MXNet's own store, keys may be sent again.

        Raises:
            MXNetError: Some of the keys exist already, or an optimizer updates them.
            DisagreementError: Workers send different keys.
        """
        unknown = self._keys.unknown(key)
        if not unknown:
            self._send_again(key, value, out, priority)
        elif len(unknown) < len(all_keys := list(flat(key))):
            raise MXNetError(
                f"broadcast must get keys that are all new or all known, and {unknown[0]!r} is "
                f"new among {all_keys}: send them in two calls"
            )
        else:
            with self._introducing("broadcast", key, (value, out)) as native:
                super().broadcast(native, value, out, priority)
        # MXNet orders operations by array, not by key: a gradient could overtake the value.
        with self.waiting("for the values of worker 0"):
            wait_for(out)

    def push(self, key: Keys, value: Any, priority: int = 0) -> None:
        """Pushes values: the servers sum those of all devices and workers."""
        self._before_push()
        with self._using(key) as native:
            super().push(native, self._steps.scaled(key, value, self._optimizer), priority)
        self._steps.exchanged(key)

    def pull(
        self, key: Keys, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Pulls the newest values into `out`."""
        with self._using(key) as native:
            super().pull(native, out, priority, ignore_sparse)
        self._steps.exchanged(key, out)

    def pushpull(self, key: Keys, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sums values over devices and workers, in place if `out` is None."""
        into = value if out is None else out
        if runtime().compresses and self.distributed:  # MXNet would end the process
            self.push(key, value, priority)
            self.pull(key, into, priority)
            return
        self._before_push()
        scaled = self._steps.scaled(key, value, self._optimizer)
        with self._using(key) as native:
            super().pushpull(native, scaled, into, priority)
        self._steps.exchanged(key, into)

    def row_sparse_pull(
        self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Pulls the rows `row_ids` of ``row_sparse`` values into `out`."""
        with self._using(key) as native:
            super().row_sparse_pull(native, out, priority, row_ids)

    # Options

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Lets the store update values by pushed gradients; a collective if it is distributed.

        On servers the optimizer of worker 0 is used.

        Raises:
            ValueError: The servers run the optimizer of an `lbbsp_mx.AsyncTrainer`.
        """
        self._optimizer = optimizer
        if not self.distributed:
            super().set_optimizer(optimizer)
            return
        _refuse_beside_async_trainer()
        self._send_optimizer(optimizer)
        self._sent_indices = self._keys.indices

    def set_gradient_compression(self, compression_params: Mapping[str, object]) -> None:
        """Compresses what is pushed from now on; a collective if the store is distributed.

        Raises:
            ValueError: An `lbbsp_mx.Trainer` or `balance` uses the store, whose sums must be exact,
                or the process has an `lbbsp_mx.AsyncTrainer`.
        """
        if not self.distributed:
            self._compression = compression_params
            super().set_gradient_compression(compression_params)
            return
        _refuse_beside_async_trainer()
        if runtime().has_trainer:
            raise ValueError(
                f"gradient compression ({dict(compression_params)}) cannot be combined with an "
                "lbbsp_mx.Trainer or a balanced store in one job, because it makes gradients "
                "inexact: leave it out"
            )
        self.barrier()
        runtime().compress()
        with runtime().lock:
            super().set_gradient_compression(compression_params)
        self.barrier()

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Saves the states of the optimizer, if it runs in this process.

        Raises:
            NotImplementedError: There is no optimizer, or it runs on servers.
        """
        self._require_own_optimizer()
        super().save_optimizer_states(fname, dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Loads the states of the optimizer, if it runs in this process.

        Raises:
            NotImplementedError: There is no optimizer, or it runs on servers.
        """
        self._require_own_optimizer()
        super().load_optimizer_states(fname)

    def empty_copy(self) -> SharedStore:
        """Returns a store of one process like this one, without its keys and its optimizer."""
        store: SharedStore = mx.kv.create(self.type)
        if self._compression:
            store.set_gradient_compression(self._compression)
        return store

    def barrier(self) -> None:
        """Waits until all workers have reached this call."""
        self._collectives.barrier()

    def _send_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Sends worker 0's optimizer to the servers; a collective."""
        self.barrier()
        if self.rank == 0:
            with self.waiting("for the servers to receive the optimizer"), runtime().lock:
                super().set_optimizer(ScriptOptimizer(optimizer, self._keys.indices))
        self.barrier()
        runtime().optimizer_of = "KVStore"

    def _require_own_optimizer(self) -> None:
        if self._updater is None:
            raise NotImplementedError(
                "the store has no optimizer in this process, whose states could be saved: call "
                "set_optimizer of a local store, or use save_states of an lbbsp_mx.Trainer"
            )

    def _before_push(self) -> None:
        """Sends the indices of keys that were introduced after the optimizer, as by Module.

        Only before the first push, because the servers then begin with new states, and only where
        all workers push together.
        """
        sent, self._sent_indices = self._sent_indices, None
        if sent is None or self.kind not in DISTRIBUTED:
            return
        indices = self._keys.indices
        if sent != indices and any(key != index for key, index in indices.items()):
            self._send_optimizer(self._optimizer)

    @contextmanager
    def _introducing(self, call: str, key: Keys, values: Any) -> Iterator[Any]:
        """Introduces keys around the call of the native store; yields its keys."""
        if not self.distributed:
            yield key
            self._keys.introduce(key)
            return
        _refuse_beside_async_trainer()
        unknown = self._keys.unknown(key)
        self._compare(call, key)
        if keys := [single_key for single_key in flat(key) if single_key not in unknown]:
            raise MXNetError(
                f"the keys {keys} exist already, and MXNet would never return: push or broadcast"
            )
        self._keys.introduce(key)
        wait_for(values)  # before the lock is taken, for which a layer that gathers could wait
        with self.waiting("for the other workers to introduce keys"), runtime().lock:
            yield self._keys.numbers(key)

    def _compare(self, call: str, key: Keys) -> None:
        """Checks that all workers introduce the same keys at the same time; a collective."""
        if self.kind == ASYNCHRONOUS or runtime().compresses:
            self.barrier()  # no sums without an optimizer, or no exact ones
            return
        own_message = f"{call} {list(flat(key))}".encode()
        texts = [message.decode() for message in gather_bytes(self._collectives, own_message)]
        if len(set(texts)) > 1:
            calls = ", ".join(f"worker {rank} {text}" for rank, text in enumerate(texts))
            raise DisagreementError(
                f"workers introduce different keys ({calls}): introduce the same keys in the same "
                "order on all workers, since the values of each call are exchanged with each other"
            )

    @contextmanager
    def _using(self, key: Keys) -> Iterator[Any]:
        """Yields the native keys of known keys, for a call of the native store."""
        if not self.distributed:
            yield key
            return
        if unknown := self._keys.unknown(key):
            raise MXNetError(
                f"the key {unknown[0]!r} is unknown: introduce it by init or broadcast first"
            )
        with runtime().lock:
            yield self._keys.numbers(key)

    def _send_again(self, key: Keys, value: Any, out: Any, priority: int) -> None:
        """Sends worker 0's values of known keys: as a sum, to which the others add zeros."""
        serves = runtime().optimizer_of if self.distributed else self._updater is not None
        if serves or self.kind == ASYNCHRONOUS:
            raise MXNetError(
                f"the keys {list(flat(key))} cannot be sent again, because an optimizer updates "
                "them: set parameters before set_optimizer, keep the optimizer in the workers, or "
                "give each Module a store of its own"
            )
        if self.distributed:
            self._compare("broadcast", key)
        share = self._shares(key, value)
        with self._using(key) as native:  # a balanced store does not scale it
            super().push(native, share, priority)
            super().pull(native, out, priority)

    def _shares(self, key: Keys, value: Any) -> Any:
        """Returns this worker's shares of sums that are the values of worker 0, as nested."""
        if isinstance(key, list | tuple) and isinstance(value, list | tuple):
            return [self._shares(*pair) for pair in zip(key, value, strict=True)]
        return share_of(value, self.rank)


def make_store(kvstore: mx.kv.KVStore | str | None) -> SharedStore:
    """Returns the store for the argument `kvstore` of a Trainer."""
    if isinstance(kvstore, mx.kv.KVStore):
        return kvstore if isinstance(kvstore, SharedStore) else SharedStore(kvstore)
    # MXNet's registry knows the class of our stores, which is in a room above this one.
    if kvstore not in (NAME, GLUON_NAME):
        kvstore = f"{NAME}_{_checked(kvstore or 'local')}"
    store: SharedStore = mx.kv.create(kvstore)
    return store


def _checked(kind: str | mx.kv.KVStore) -> str:
    """Returns the kind of a native store."""
    name = kind_of(kind)
    if name is None or name not in KINDS:
        raise ValueError(
            f"the store must be an lbbsp_mx.KVStore or one of {', '.join(KINDS)}, got {kind!r}: "
            "choose dist_sync in a cluster, device in one process with several GPUs"
        )
    if name not in IN_ONE_PROCESS and not cluster.in_cluster():
        raise ValueError(
            f"{name} needs a cluster, and no DMLC_* variable is set: start the script with "
            "`lbbsp launch --framework mxnet`, or use the store 'local'"
        )
    return name


def _refuse_beside_async_trainer() -> None:
    if runtime().optimizer_of == "AsyncTrainer":
        raise ValueError(
            "a KVStore cannot be used beside an lbbsp_mx.AsyncTrainer, because the servers run one "
            "optimizer and compress all keys or none: use a separate job for one of the two"
        )
