"""What a trainer needs of its arguments: `store_of`, and refusals with their remedies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import mxnet as mx
from mxnet import gluon
from mxnet.kvstore import KVStoreBase

from lbbsp_core.validate import require_integer
from lbbsp_mx import cluster
from lbbsp_mx.parameters import normalises_batches, require_unique_names
from lbbsp_mx.store.kvstore import GLUON_NAME, NAME, SharedStore, kind_of, make_store
from lbbsp_mx.store.native import ASYNCHRONOUS, DISTRIBUTED, IN_ONE_PROCESS

logger = logging.getLogger("lbbsp.mx")

Store: TypeAlias = "KVStoreBase | str | None"
"""Argument `kvstore` of a trainer."""


def trains_alone(kvstore: Store) -> bool:
    """Returns whether gluon's own code trains, because there are no other workers."""
    if isinstance(kvstore, KVStoreBase):
        return kvstore.num_workers == 1
    return _kind(kvstore) in IN_ONE_PROCESS or not _has_peers()


def store_of(kvstore: Store, alone: bool) -> SharedStore:
    """Returns the store whose workers train; it is local if gluon creates another one, or none."""
    kind = _kind(kvstore)
    if kind == ASYNCHRONOUS:
        raise ValueError(
            "the store must be synchronous, got 'dist_async': use 'dist_sync', or train with "
            "lbbsp_mx.AsyncTrainer"
        )
    is_distributed = kind in DISTRIBUTED
    if alone and (is_distributed or kvstore in (NAME, GLUON_NAME)):
        logger.warning("lbbsp_mx.Trainer is passive, because there is only one worker")
    elif alone and _has_peers():
        logger.warning(
            "kvstore = %r is not distributed, so that each worker trains a model of its own: use "
            "'dist_sync' to train one model together",
            kvstore,
        )
    is_ours = isinstance(kvstore, mx.kv.KVStore) or kind in IN_ONE_PROCESS
    joins = is_ours or (is_distributed and cluster.in_cluster())
    is_foreign = alone and not joins and isinstance(kvstore, KVStoreBase | str)
    return make_store("local" if is_foreign else kvstore)


def _has_peers() -> bool:
    """Returns whether the variables describe a cluster of several workers."""
    return cluster.in_cluster() and cluster.counts()[0] > 1


def gluon_store(kvstore: Store) -> Store:
    """Returns the store for gluon's own code: its default in place of a distributed one."""
    return "device" if _kind(kvstore) in DISTRIBUTED else kvstore


def _kind(kvstore: Store) -> str | None:
    """Returns the kind of a store of MXNet or of this package; None of those of others."""
    if isinstance(kvstore, SharedStore):
        return kvstore.kind
    if kvstore in (NAME, GLUON_NAME):
        return "dist_sync" if cluster.in_cluster() else "device"
    name = kvstore.type if isinstance(kvstore, mx.kv.KVStore) else kvstore or "local"
    return kind_of(name) if isinstance(name, str) else None


def check_options(
    alone: bool, compression: object, updates: bool | None, total: int | None, needing: list[str]
) -> None:
    """Raises an error if options do not fit the cluster, or a training in one process.

    `needing` names the given options that need the global batch size, `total`.
    """
    if not alone or cluster.in_cluster():
        if updates:
            raise ValueError(
                "update_on_kvstore must be False, got True: leave it out, because a server would "
                "divide by a constant batch size; the optimizer runs in the workers"
            )
        if compression:
            raise ValueError(
                f"compression_params must be None, got {compression!r}: leave it out, "
                "because compression makes gradients and the workers' messages inexact"
            )
        needing = ["several workers", *needing]
    if total is not None:
        require_integer("global_batch_size", total, 0)
    elif needing:
        raise ValueError(
            f"global_batch_size must be given for {', '.join(needing)}, got None: pass the samples "
            "per step over all workers to lbbsp_mx.Trainer, or beside=trainer for a trainer that "
            "steps on the batches of another one"
        )


def refuse_inexact(params: Sequence[gluon.Parameter], mean_loss: bool, accumulate: int) -> None:
    """Raises an error if the update would not be exact, or warns that it may not be."""
    require_unique_names(params)
    for param in params:
        if mean_loss and (param.grad_req == "add" or accumulate > 1):
            raise ValueError(
                f"mean_loss must be False where gradients accumulate (grad_req='add', "
                f"{param.name}): a sum of means is not a mean; use the loss per sample"
            )
    if normalises_batches(params):
        logger.warning(
            "BatchNorm normalises each worker's batch separately, so that the result depends "
            "on how the batch is split: use lbbsp_mx.SyncBatchNorm"
        )
