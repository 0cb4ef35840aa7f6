"""Stores that scripts create, and balance for `Module.fit`: `KVStore`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import mxnet as mx
from mxnet import gluon
from mxnet.kvstore import KVStoreBase

from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.options.options import Options, SessionOptions
from lbbsp_core.validate import require_flag, require_integer
from lbbsp_mx import cluster, compat, env
from lbbsp_mx.data.data_iter import ArraySamples, Columns, PlannedIter
from lbbsp_mx.data.sampler import Draws, make_sampler
from lbbsp_mx.module import module_data
from lbbsp_mx.module.pushes import NO_OPTIMIZER, BalancedIter, ModuleSteps
from lbbsp_mx.parameters import devices_of_module
from lbbsp_mx.store.kvstore import GLUON_NAME, KINDS, SharedStore
from lbbsp_mx.store.native import ALIASES, ASYNCHRONOUS, NAME, runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack


class KVStore(SharedStore):
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

    def balance(
        self,
        data: Columns | mx.io.NDArrayIter | mx.gluon.data.Dataset,
        label: Columns = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        mean_loss: bool = False,
        devices: int = 1,
        iter_params: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
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
            shuffle: Whether each epoch has another order. Defaults to what the ``NDArrayIter``
                does, else True. One that shuffles must be new, of the same arrays on all workers.
            mean_loss: Whether gradients are means over the worker's batch, as those of
                ``SoftmaxOutput(normalization='batch')`` are.
            devices: Devices of each worker, among which Module splits a batch; the largest number
                if workers have different ones. Each device then has a sample in every step.
            iter_params: Further arguments of `PlannedIter`: ``data_name`` and the like for arrays,
                options of ``DataLoader`` for a gluon data set.
            **options: Options of `lbbsp_core.SessionOptions`, such as ``policy``, ``record``
                and ``seed``, that of the order.

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
        self._steps.close()
        compat.refuse_fixed_batches(BalancedIter)
        self._check_exact()
        require_integer("devices", devices, 1)
        require_flag("mean_loss", mean_loss)
        if mean_loss and devices > 1:
            raise ValueError(
                f"mean_loss=True needs one device per worker, got devices={devices}: means of "
                "parts of a batch do not sum to its mean; use a loss that is a sum over samples"
            )
        module_data.check_arguments(data, label, iter_params or {})
        workers = self.num_workers
        total = module_data.total_of(data, global_batch_size, workers)
        if shuffle is None:
            shuffle = bool(data.shuffle) if isinstance(data, mx.io.NDArrayIter) else True
        require_flag("shuffle", shuffle)
        drop_last = module_data.drops_last(data)
        facts = {"global_batch_size": total, "seed": chosen.seed, "shuffle": int(shuffle),
                 "last_batch_handle='discard'": int(drop_last), "mean_loss": int(mean_loss),
                 "devices": devices}  # fmt: skip
        handshake.compare(self._collectives, facts)
        source, params = module_data.source_of(self._collectives, data, label, iter_params)
        session = runtime().open_session(
            self._collectives, total, chosen, parts=devices, devices=devices_of_module(devices)
        )
        samples = source if isinstance(source, gluon.data.Dataset) else ArraySamples(source)
        sampler = make_sampler(session, Draws(), samples, None, shuffle, drop_last=drop_last)
        last = sampler.order.size(sampler.order.steps_per_epoch - 1)
        most = devices if workers > 1 else max(devices, last)
        even, served = -(-total // workers), self.distributed
        self._steps = steps = ModuleSteps(
            session, even * workers, mean_loss=mean_loss, most_devices=most, in_servers=served
        )
        runtime().endings.add(steps.close)
        return BalancedIter(steps, even, sampler, source, **params)

    def _check_exact(self) -> None:
        """Raises ValueError if updates could not be exact and equal on all workers."""
        if not self.distributed:
            return
        if self.kind == ASYNCHRONOUS:
            raise ValueError(
                "a balanced store must be synchronous, got 'dist_async': use 'dist_sync'"
            )
        if not (self.is_capable(KVStoreBase.OPTIMIZER) and env.updates_on_store()):
            raise ValueError(NO_OPTIMIZER)
        runtime().require_exact_sums("a balanced store")


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

    def is_capable(self, capability: str) -> bool:
        """Returns False for optimizers; MXNet knows no other capability."""
        super().is_capable(capability)
        return False

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Raises NotImplementedError, as MXNet's interface asks for."""
        raise NotImplementedError(
            "the store 'lbbsp' keeps the optimizer in the workers: use lbbsp_mx.KVStore"
        )


def register() -> None:
    """Registers the stores by their names, so that `mx.kv.create` gives them."""
    for name in (NAME, GLUON_NAME):
        KVStoreBase.kv_registry[name] = WorkerSideStore
    for kind in (*ALIASES, *KINDS):
        KVStoreBase.kv_registry[f"{NAME}_{kind}"] = partial(KVStore, kind)
