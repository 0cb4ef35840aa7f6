"""Store for MXNet scripts, with the whole interface of MXNet's own: `KVStore`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError
from mxnet.kvstore import KVStoreBase

from lbbsp_core.runtime.exchange.collectives import gather_bytes
from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_mx import cluster
from lbbsp_mx.data.data_iter import Columns, PlannedIter
from lbbsp_mx.fence import arrays_in, wait_for
from lbbsp_mx.module.module import balance
from lbbsp_mx.module.pushes import PushedSteps
from lbbsp_mx.store.collectives import StoreCollectives
from lbbsp_mx.store.native import ALIASES, ASYNCHRONOUS, DISTRIBUTED, IN_ONE_PROCESS, runtime
from lbbsp_mx.store.script_keys import Keys, ScriptKeys, flat
from lbbsp_mx.store.server_optimizer import ScriptOptimizer

KINDS = (*DISTRIBUTED, ASYNCHRONOUS, *IN_ONE_PROCESS)
NAME = "lbbsp"
"""Name in MXNet's registry; ``lbbsp_KIND`` gives the store of a kind."""

GLUON_NAME = "dist_lbbsp"
"""Its name for stock gluon Trainers, which on one device ignore names without "dist" in them."""


class KVStore(mx.kv.KVStore):
    """Store of MXNet that an `lbbsp_mx.Trainer` can share, in one process or in a cluster.

    It has the whole interface of `mxnet.kv.KVStore`, and passes keys and values on to a native
    store. Several stores of a process share the distributed native store, because MXNet hangs if a
    second one is created; each has keys of its own. All workers must introduce keys (by `init` or
    `broadcast`) in the same order. This is checked where servers have exact sums, unlike with
    ``dist_async`` or gradient compression. A process with an `AsyncTrainer` can have no keys.

    ``mx.kv.create("lbbsp")`` gives a store that keeps the optimizer in the workers, and
    ``mx.kv.create("lbbsp_dist_sync")`` and the like the store of a kind.

    Args:
        kind: "dist_sync" (or "dist"), "dist_device_sync" or "dist_async" in a cluster; "local",
            "device" or another kind of MXNet's local stores in one process; or an existing native
            store of one of these kinds.
        start_seconds: Maximum seconds to wait until all processes of the cluster have started.
        wait_seconds: Maximum seconds that a step waits for the other workers or for a server.

    Raises:
        ValueError: The kind is unknown, or needs a cluster and no ``DMLC_*`` variable is set.

    Example::

        store = lbbsp_mx.KVStore("dist_sync")
        trainer = lbbsp_mx.Trainer(params, "sgd", kvstore=store, global_batch_size=256)
    """

    def __init__(
        self,
        kind: str | mx.kv.KVStore = "dist_sync",
        *,
        start_seconds: float = 120.0,
        wait_seconds: float = 1800.0,
    ) -> None:
        self.kind = _checked(kind)
        native = kind.native if isinstance(kind, KVStore) else kind
        if isinstance(native, str):
            native = self.kind
        self.native = runtime().native(native, start_seconds)
        super().__init__(self.native.handle)
        self._rank, self._workers = self.native.rank, self.native.num_workers
        self._wait_seconds = wait_seconds
        self._keys = ScriptKeys(runtime().taken)
        self._sent: set[Any] = set()  # keys of a store in one process
        self._compression: Mapping[str, object] = {}
        self._collectives = StoreCollectives(self)
        self._optimizer: mx.optimizer.Optimizer | None = None
        self._has_pushed = False  # since the optimizer was set
        self._sent_indices: dict[int, int] = {}
        self._steps: PushedSteps | None = None

    def __del__(self) -> None:
        """Leaves the handle to the native store, which frees it."""

    @property
    def distributed(self) -> bool:
        """True if the store has several processes."""
        return self.kind not in IN_ONE_PROCESS

    @property
    def type(self) -> str:
        """Name of the store's type, which gluon reads."""
        return f"{NAME}_{self.kind}"

    @property
    def rank(self) -> int:
        """Number of this worker, in [0, workers)."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """Number of workers, N."""
        return self._workers

    # Values; MXNet's own docstrings describe the arguments

    def init(self, key: Keys, value: Any) -> None:
        """Introduces keys with the values of worker 0; a collective.

        Raises:
            MXNetError: A key exists already.
            DisagreementError: Workers introduce different keys.
            ValueError: The process has an `lbbsp_mx.AsyncTrainer`, whose keys these would be.
        """
        with self._introducing("init", key, value) as number:
            super().init(number(key), value)

    def broadcast(self, key: Keys, value: Any, out: Any, priority: int = 0) -> None:
        """Sends the values of worker 0 to all workers, and waits for them; a collective.

        Unlike those of MXNet's own store, keys may be sent again.

        Raises:
            MXNetError: Some of the keys exist already, or an optimizer updates them.
            DisagreementError: Workers send different keys.
        """
        if self._exists(key):
            self._send_again(key, value, out, priority)
        else:
            with self._introducing("broadcast", key, (value, out)) as number:
                super().broadcast(number(key), value, out, priority)
        # MXNet orders operations by array, not by key: a gradient could overtake the value.
        with self.waiting("for the values of worker 0"):
            wait_for(out)

    def push(self, key: Keys, value: Any, priority: int = 0) -> None:
        """Pushes values: the servers sum those of all devices and workers."""
        self._before_push()
        with self._using(key) as number:
            super().push(number(key), self._scaled(key, value), priority)
        self._exchanged(key)

    def pull(
        self, key: Keys, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Pulls the newest values into `out`."""
        with self._using(key) as number:
            super().pull(number(key), out, priority, ignore_sparse)
        self._exchanged(key, out)

    def pushpull(self, key: Keys, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sums values over devices and workers, in place if `out` is None."""
        if runtime().compresses and self.distributed:  # MXNet would end the process
            self.push(key, value, priority)
            self.pull(key, value if out is None else out, priority)
            return
        self._before_push()
        scaled, into = self._scaled(key, value), value if out is None else out
        with self._using(key) as number:
            super().pushpull(number(key), scaled, into, priority)
        self._exchanged(key, into)

    def row_sparse_pull(
        self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Pulls the rows `row_ids` of ``row_sparse`` values into `out`."""
        with self._using(key) as number:
            super().row_sparse_pull(number(key), out, priority, row_ids)

    # Options

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Lets the store update values by pushed gradients; a collective if it is distributed.

        On servers the optimizer of worker 0 is used.

        Raises:
            ValueError: The servers run the optimizer of an `lbbsp_mx.AsyncTrainer`.
        """
        if not self.distributed:
            self._optimizer = optimizer
            super().set_optimizer(optimizer)
            return
        _refuse_beside_async_trainer()
        self._optimizer, self._has_pushed = optimizer, False
        self._send_optimizer(optimizer)

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

    # Balancing

    def balance(
        self,
        data: Columns | mx.io.NDArrayIter | mx.gluon.data.Dataset,
        label: Columns = None,
        *,
        global_batch_size: int | None = None,
        seed: int | None = None,
        shuffle: bool | None = None,
        mean_loss: bool = False,
        devices: int = 1,
        iter_params: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> PlannedIter:
        """Balances the workers of ``Module.fit(train, kvstore=store)``; a collective.

        The iterator that it returns gives each worker its part of the global batch, by the plan
        of each step. Gradients that are pushed to the store are scaled so that the optimizer on the
        servers makes the update of one process with the whole global batch. The loop must draw a
        batch before each update, in one thread, as `Module.fit` does.

        Without a cluster, full batches that are not shuffled train as with MXNet's own store. A
        short last batch is not padded, and shuffled data follow the seed.

        Args:
            data: The whole data set on all workers: an ``NDArrayIter``, arrays as for one, or a
                gluon data set; see `PlannedIter`. An ``NDArrayIter`` that discards a short last
                batch drops the short last step of each epoch.
            label: Arrays of labels, as for ``NDArrayIter``, if `data` are arrays.
            global_batch_size: X, samples per step over all workers; constant. Defaults to the
                batch size of the ``NDArrayIter`` times the number of workers.
            seed: Seed of the order. Defaults to that of the options.
            shuffle: Whether each epoch has another order. Defaults to what the ``NDArrayIter``
                does, else True. One that shuffles must be new, of the same arrays on all workers.
            mean_loss: Whether gradients are means over the worker's batch, as those of
                ``SoftmaxOutput(normalization='batch')`` are.
            devices: Devices of each worker, among which Module splits a batch; the largest number
                if workers have different ones. Each device then has a sample in every step.
            iter_params: Further arguments of `PlannedIter`: ``data_name`` and the like for arrays,
                options of ``DataLoader`` for a gluon data set.
            **options: Options of `lbbsp_core.SessionOptions`, such as ``policy`` and ``record``.

        Raises:
            ValueError: No plan can satisfy the options, or updates would not be exact, as with
                ``dist_async``, compression, or the optimizer in the workers; or the ``NDArrayIter``
                keeps samples for its next epoch, or has the batch size 1 that is its default.
            TypeError: An argument would have no effect, or the data cannot be read by index.
            DisagreementError: Workers have other data or options.

        Example::

            store = lbbsp_mx.KVStore("dist_sync")
            train = store.balance(mx.io.NDArrayIter(images, labels, batch_size=64))
            module.fit(train, eval_data=test, kvstore=store, num_epoch=10)
        """
        chosen = SessionOptions.of(options, KVStore.balance)
        if self._steps is not None:
            self._steps.close()
        train, self._steps = balance(
            self,
            data,
            label,
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            mean_loss=mean_loss,
            devices=devices,
            iter_params=iter_params,
            options=chosen,
        )
        return train

    # Copies

    def empty_copy(self) -> KVStore:
        """Returns a store of one process like this one, without its keys and its optimizer."""
        store = self._like_this()
        if self._compression:
            store.set_gradient_compression(self._compression)
        return store

    # Waits

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Ends the process if the wait inside the context takes too long."""
        return runtime().waiting(self._rank, self._wait_seconds, what, "lbbsp_mx.KVStore")

    def barrier(self) -> None:
        """Waits until all workers have reached this call."""
        self._collectives.barrier()

    # Helpers

    def _send_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Sends worker 0's optimizer to the servers; a collective."""
        self.barrier()
        if self._rank == 0:
            with self.waiting("for the servers to receive the optimizer"), runtime().lock:
                super().set_optimizer(ScriptOptimizer(optimizer, self._keys.indices))
        self.barrier()
        runtime().optimizer_of = "KVStore"
        self._sent_indices = self._keys.indices

    def _before_push(self) -> None:
        """Sends the indices of keys that were introduced after the optimizer, as by Module.

        Only before the first push, because the servers then begin with new states, and only where
        all workers push together.
        """
        if self._optimizer is None or self.kind not in DISTRIBUTED or self._has_pushed:
            return
        self._has_pushed = True
        if self._keys.indices != self._sent_indices and any(
            number != index for number, index in self._keys.indices.items()
        ):
            self._send_optimizer(self._optimizer)

    def _scaled(self, key: Keys, value: Any) -> Any:
        """Returns gradients as a balanced store pushes them."""
        if self._steps is None:
            return value
        return self._steps.scaled(key, value, self._optimizer)

    def _exchanged(self, key: Keys, pulled: Any = None) -> None:
        if self._steps is not None:
            self._steps.exchanged(key, pulled)

    def _like_this(self) -> KVStore:
        return KVStore(self.kind, wait_seconds=self._wait_seconds)

    def _exists(self, key: Keys) -> bool:
        if not self.distributed:
            return self._sent.issuperset(flat(key))
        try:
            return self._keys.has(key)
        except KeyError as error:
            raise MXNetError(
                f"broadcast must get keys that are all new or all known, and {error.args[0]!r} is "
                f"new among {list(flat(key))}: send them in two calls"
            ) from None

    @contextmanager
    def _introducing(self, what: str, key: Keys, values: Any) -> Iterator[Callable[[Keys], Any]]:
        """Introduces keys around the call of the native store.

        Yields a function from keys to native keys. The values must be computed before other threads
        are locked out, since a layer that gathers could wait for the lock.
        """
        if not self.distributed:
            yield lambda keys: keys
            self._sent.update(flat(key))
            return
        _refuse_beside_async_trainer()
        known = [each for each in flat(key) if self._keys.has(each)]
        self._compare(what, key)
        if known:
            raise MXNetError(
                f"the keys {known} exist already, and MXNet would wait indefinitely: use push, or "
                "broadcast"
            )
        self._keys.introduce(key)
        wait_for(values)
        with self.waiting("for the other workers to introduce keys"), runtime().lock:
            yield self._keys.numbers

    def _compare(self, what: str, key: Keys) -> None:
        """Checks that all workers introduce the same keys at the same time; a collective."""
        if self.kind == ASYNCHRONOUS or runtime().compresses:
            self.barrier()  # no sums without an optimizer, or no exact ones
            return
        texts = [
            each.decode()
            for each in gather_bytes(self._collectives, f"{what} {list(flat(key))}".encode())
        ]
        if len(set(texts)) > 1:
            said = ", ".join(f"worker {rank} {text}" for rank, text in enumerate(texts))
            raise DisagreementError(
                f"workers introduce different keys ({said}): introduce the same keys in the same "
                "order on all workers, since the values of each call are exchanged with each other"
            )

    @contextmanager
    def _using(self, key: Keys) -> Iterator[Callable[[Keys], Any]]:
        """Yields a function from keys to native keys, for a call of the native store."""
        if not self.distributed:
            yield lambda keys: keys
            return
        try:
            numbers = self._keys.numbers(key)
        except KeyError as error:
            raise MXNetError(
                f"the key {error.args[0]!r} is unknown: introduce it by init or broadcast on all "
                "workers first"
            ) from None
        with runtime().lock:
            yield lambda _: numbers

    def _send_again(self, key: Keys, value: Any, out: Any, priority: int) -> None:
        """Sends worker 0's values of known keys: as a sum, to which the others add nothing."""
        serves = runtime().optimizer_of if self.distributed else self._updater is not None
        if serves or self.kind == ASYNCHRONOUS:
            raise MXNetError(
                f"the keys {list(flat(key))} cannot be sent again, because an optimizer updates "
                "them: set parameters before set_optimizer, keep the optimizer in the workers, or "
                "give each Module a store of its own"
            )
        if self.distributed:
            self._compare("broadcast", key)
        factor = 1.0 if self._rank == 0 else 0.0
        # Of values on several devices only the first one counts.
        share = _per_key(key, value, lambda arrays: next(arrays_in(arrays)) * factor)
        with self._using(key) as number:  # a balanced store does not scale it
            super().push(number(key), share, priority)
            super().pull(number(key), out, priority)


class WorkerSideStore(KVStore):
    """`KVStore` for ``mx.kv.create("lbbsp")``: its sums are exact, optimizers run in the workers.

    It is distributed in a cluster, and local in one process.
    """

    def __init__(self) -> None:
        super().__init__("dist_sync" if cluster.in_cluster() else "device")

    @property
    def type(self) -> str:
        """Name in MXNet's registry."""
        return NAME

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Returns False for optimizers."""
        if capability.lower() == KVStoreBase.OPTIMIZER:
            return False
        raise ValueError(f"capability must be {KVStoreBase.OPTIMIZER!r}, got {capability!r}")

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Raises NotImplementedError, as MXNet's interface asks for."""
        raise NotImplementedError(
            "the store 'lbbsp' keeps the optimizer in the workers: use lbbsp_mx.KVStore for one "
            "on the servers"
        )

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Raises NotImplementedError, as MXNet's interface asks for."""
        raise NotImplementedError("the store 'lbbsp' has no optimizer: save the trainer's states")

    def load_optimizer_states(self, fname: str) -> None:
        """Raises NotImplementedError, as MXNet's interface asks for."""
        raise NotImplementedError("the store 'lbbsp' has no optimizer: load the trainer's states")

    def _like_this(self) -> KVStore:
        return WorkerSideStore()


def register() -> None:
    """Registers the stores by their names, so that `mx.kv.create` gives them."""
    for name in (NAME, GLUON_NAME):
        KVStoreBase.kv_registry[name] = WorkerSideStore
    for kind in (*ALIASES, *KINDS):
        KVStoreBase.kv_registry[f"{NAME}_{kind}"] = partial(KVStore, kind)


def kind_of(name: str) -> str:
    """Returns the kind of store that a name of MXNet, or of its registry, stands for."""
    kind = name.removeprefix(f"{NAME}_")
    return ALIASES.get(kind, kind)


def make_store(kvstore: mx.kv.KVStore | str | None) -> KVStore:
    """Returns the `KVStore` for the argument `kvstore` of a Trainer."""
    if isinstance(kvstore, KVStore):
        return kvstore
    if kvstore is None:
        return KVStore("local")
    if kvstore in (NAME, GLUON_NAME):
        return WorkerSideStore()
    if isinstance(kvstore, mx.kv.KVStore | str):
        return KVStore(kind_of(kvstore) if isinstance(kvstore, str) else kvstore)
    raise ValueError(
        f"kvstore must be an lbbsp_mx.KVStore or one of {', '.join(KINDS)}, got {kvstore!r}: "
        "choose dist_sync in a cluster, or leave it out"
    )


def _checked(kind: str | mx.kv.KVStore) -> str:
    """Returns the kind of a native store."""
    if isinstance(kind, KVStore):
        return kind.kind
    name = kind_of(kind if isinstance(kind, str) else kind.type)
    if name not in KINDS:
        raise ValueError(
            f"the store must be one of {', '.join(KINDS)}, got {name!r}: choose dist_sync in a "
            "cluster, device in one process with several GPUs"
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


def _per_key(key: Keys, value: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to the values of each key, as they are nested."""
    if isinstance(key, list | tuple) and isinstance(value, list | tuple):
        return [_per_key(*each, function) for each in zip(key, value, strict=True)]
    return function(value)
