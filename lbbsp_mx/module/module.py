"""Balanced input for `mx.mod.Module.fit` and other loops that push to a store: `balance`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import mxnet as mx
from mxnet import gluon
from mxnet.io import DataBatch, DataDesc
from mxnet.kvstore import KVStoreBase

from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.validate import require_integer
from lbbsp_mx import compat, env
from lbbsp_mx.data.data_iter import ARRAY_PARAMS, Columns, PlannedIter, array_iter
from lbbsp_mx.data.draws import Draws
from lbbsp_mx.data.sampler import BatchSampler, make_sampler
from lbbsp_mx.devices import devices_of_module
from lbbsp_mx.module.module_data import check_arguments, drops_last
from lbbsp_mx.module.pushes import NO_OPTIMIZER, PushedSteps
from lbbsp_mx.module.shuffled import Samples, restored
from lbbsp_mx.store.collectives import StoreCollectives
from lbbsp_mx.store.native import ASYNCHRONOUS, runtime

if TYPE_CHECKING:
    from lbbsp_mx.store.kvstore import KVStore

Source = mx.io.NDArrayIter | gluon.data.Dataset


class BalancedIter(PlannedIter):
    """Data iterator of a balanced store; `lbbsp_mx.KVStore.balance` creates it.

    Its own shapes are those of an even batch, from which Module computes ``rescale_grad``; those
    of each batch are in the batch.

    Args:
        steps: Steps of the training.
        batch_size: Samples of an even batch.
        sampler: Yields the indices of each batch.
        source: The data.
        **params: Further arguments of `PlannedIter`.
    """

    def __init__(
        self,
        steps: PushedSteps,
        batch_size: int,
        sampler: BatchSampler,
        source: Source,
        **params: Any,
    ) -> None:
        super().__init__(sampler, source, **params)
        self._steps = steps
        self._axis = self._layout.find("N")
        self._even = (
            batch_size,
            *(
                [_resized(desc, self._axis, batch_size) for desc in part]
                for part in (self.provide_data, self.provide_label)
            ),
        )
        self._show_even()

    def next(self) -> DataBatch:
        """Ends the step before, and returns this worker's batch of the next one.

        Raises:
            StopIteration: The epoch has ended; `reset` lets the next one begin.
            ValueError: No gradients were pushed for the batch before.
        """
        if not self._steps.in_own_thread:
            return _Unplanned()
        self._steps.begin_draw()
        try:
            batch = super().next()
        finally:
            self._show_even()
        self._steps.drawn(batch.data[0].shape[self._axis])
        return batch

    def reset(self) -> None:
        """Ends the step before, and lets the next batch be the first of the next epoch."""
        self._steps.end()
        super().reset()

    def _show_even(self) -> None:
        self.batch_size, self.provide_data, self.provide_label = self._even


class _Unplanned:
    """What another thread gets for a batch: an error in it could leave the training waiting."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            "a balanced iterator must be read by the thread that has called balance, because the "
            "plan of a batch is known when the update before it is made: leave PrefetchingIter and "
            "other threads out"
        )


def balance(
    store: KVStore,
    data: Columns | mx.io.NDArrayIter | gluon.data.Dataset,
    label: Columns,
    *,
    global_batch_size: int | None,
    seed: int | None,
    shuffle: bool | None,
    mean_loss: bool,
    devices: int,
    iter_params: Mapping[str, Any] | None,
    options: SessionOptions,
) -> tuple[BalancedIter, PushedSteps]:
    """Creates the iterator and the steps of a balanced store; see `lbbsp_mx.KVStore.balance`."""
    compat.refuse_fixed_batches(BalancedIter)
    _check_store(store)
    _check_devices(devices, mean_loss)
    check_arguments(data, label, iter_params or {})
    collectives = StoreCollectives(store)
    total = _total(data, global_batch_size, store.num_workers)
    seed = options.seed if seed is None else seed
    if shuffle is None:
        shuffle = data.shuffle if isinstance(data, mx.io.NDArrayIter) else True
    drop_last = drops_last(data)
    facts = {"mean_loss": int(mean_loss), "devices": devices}
    if store.num_workers > 1:
        order = {"global_batch_size": total, "seed": seed, "shuffle": int(shuffle)}
        discards = {"last_batch_handle='discard'": int(drop_last)}
        handshake.compare(collectives, {**order, **discards, **facts})
    source, params = _source(collectives, data, label, iter_params)
    session = PipelinedSession(
        collectives,
        total,
        options,
        framework="mxnet",
        versions={"mxnet": mx.__version__},
        activity=runtime().activity,
        facts=facts,
        parts=devices,
        devices=devices_of_module(devices),
    )
    samples = source if isinstance(source, gluon.data.Dataset) else Samples(source)
    sampler = make_sampler(session, Draws(), samples, seed, bool(shuffle), None, None, drop_last)
    last = sampler.order.size(sampler.order.steps_per_epoch - 1)
    even = -(-total // store.num_workers)
    steps = PushedSteps(
        session,
        even * store.num_workers,
        mean_loss=mean_loss,
        devices=devices,
        most_devices=devices if store.num_workers > 1 else max(devices, last),
        in_servers=store.distributed,
    )
    runtime().has_trainer |= store.distributed
    runtime().use_options(options)
    runtime().endings.add(steps.close)
    return BalancedIter(steps, even, sampler, source, **params), steps


def _check_store(store: KVStore) -> None:
    """Raises if updates could not be exact and equal on all workers.

    Raises:
        ValueError: Names the remedy.
    """
    if not store.distributed:
        return
    if store.kind == ASYNCHRONOUS:
        raise ValueError(
            "a balanced store must be synchronous, got 'dist_async': use lbbsp_mx.KVStore("
            "'dist_sync')"
        )
    if runtime().compresses:
        raise ValueError(
            "a balanced store needs exact sums, and gradient compression was set: leave out "
            "set_gradient_compression"
        )
    if not (store.is_capable(KVStoreBase.OPTIMIZER) and env.updates_on_store()):
        raise ValueError(NO_OPTIMIZER)


def _check_devices(devices: int, mean_loss: bool) -> None:
    require_integer("devices", devices, 1)
    if mean_loss and devices > 1:
        raise ValueError(
            f"mean_loss=True needs one device per worker, got devices={devices}: means of parts "
            "of a batch do not sum to its mean; use a loss that is a sum over samples"
        )


def _total(data: object, given: int | None, workers: int) -> int:
    """Returns the global batch size: the given one, or an even batch for each worker."""
    if given is None and isinstance(data, mx.io.NDArrayIter):
        if data.batch_size == 1:
            raise ValueError(
                "batch_size of the NDArrayIter is 1, its default, so that each worker would train "
                "on single samples: pass batch_size= to the NDArrayIter, or global_batch_size= if "
                "that is meant"
            )
        return int(data.batch_size) * workers
    if given is None:
        raise ValueError(
            "global_batch_size must be given, because only an NDArrayIter has a batch size: it "
            "counts the samples of a step over all workers"
        )
    return require_integer("global_batch_size", given, workers)


def _source(
    collectives: StoreCollectives, data: Any, label: Columns, given: Mapping[str, Any] | None
) -> tuple[Source, dict[str, Any]]:
    """Returns the data by index, and the arguments of `PlannedIter` that are left for it."""
    params = dict(given or {})
    if isinstance(data, gluon.data.Dataset):
        return data, params
    if isinstance(data, mx.io.NDArrayIter) and data.shuffle:
        return restored(data, collectives), params
    names = {name: params.pop(name, value) for name, value in ARRAY_PARAMS.items()}
    return array_iter(data, label, **names), params


def _resized(desc: DataDesc, axis: int, size: int) -> DataDesc:
    """Returns the description of a batch of another size."""
    shape = (*desc.shape[:axis], size, *desc.shape[axis + 1 :])
    return DataDesc(desc.name, shape, desc.dtype, layout=desc.layout)
