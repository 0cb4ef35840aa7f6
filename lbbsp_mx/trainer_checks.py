"""What a trainer needs of its arguments: `store_of`, and refusals with their remedies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import mxnet as mx
from mxnet import gluon

from lbbsp_mx import cluster
from lbbsp_mx.kvstore import GLUON_NAME, NAME, KVStore, make_store
from lbbsp_mx.native import ALIASES, ASYNCHRONOUS, DISTRIBUTED
from lbbsp_mx.parameters import require_dense_values, require_unique_names

logger = logging.getLogger("lbbsp.mx")

Store: TypeAlias = "mx.kv.KVStore | str | None"
"""Argument `kvstore` of a trainer."""


def store_of(kvstore: Store) -> KVStore:
    """Returns the store for `kvstore`; without a cluster, a local one instead of a distributed.

    Raises:
        ValueError: The store is not supported.
    """
    names = (*DISTRIBUTED, *ALIASES, NAME, GLUON_NAME)
    alone = isinstance(kvstore, str) and kvstore in names
    if alone and not cluster.in_cluster():
        logger.warning("lbbsp_mx.Trainer is passive, because there is only one worker")
        return KVStore("local" if kvstore != "dist_device_sync" else "device")
    named = kvstore.type if isinstance(kvstore, mx.kv.KVStore) else kvstore
    if isinstance(named, str) and named.removeprefix("lbbsp_") == ASYNCHRONOUS:
        raise ValueError(
            "the store must be synchronous, got 'dist_async': use 'dist_sync', or train with "
            "lbbsp_mx.AsyncTrainer"
        )
    return make_store(kvstore)


def refuse_updates_by_servers(compression_params: object, update_on_kvstore: bool | None) -> None:
    """Raises an error if servers would update the parameters, or compress gradients.

    Raises:
        ValueError: An option is given; names the remedy.
    """
    if update_on_kvstore:
        raise ValueError(
            "update_on_kvstore must be False, got True: leave it out, because a server would "
            "divide by a constant batch size; the optimizer runs in the workers"
        )
    if compression_params:
        raise ValueError(
            f"compression_params must be None, got {compression_params!r}: leave it out, because "
            "compression makes gradients and the workers' messages inexact"
        )


def refuse_inexact(
    params: Sequence[gluon.Parameter], workers: int, mean_loss: bool, accumulate: int
) -> None:
    """Raises an error if the update would not be exact, or warns that it may not be.

    Raises:
        ValueError: Two parameters have one name, one is sparse on several workers, or means
            accumulate.
    """
    require_unique_names(params)
    for param in params:
        if workers > 1:
            require_dense_values(param)
        if mean_loss and (param.grad_req == "add" or accumulate > 1):
            raise ValueError(
                f"mean_loss must be False where gradients accumulate (grad_req='add', "
                f"{param.name}): a sum of means is not a mean; use the loss per sample"
            )
    if any(_is_plain_batch_norm(param) for param in params):
        logger.warning(
            "BatchNorm normalises each worker's batch separately, so that the result depends "
            "on how the batch is split: use lbbsp_mx.SyncBatchNorm"
        )


def _is_plain_batch_norm(param: gluon.Parameter) -> bool:
    return param.name.endswith("running_mean") and not hasattr(param, "lbbsp_synchronised")
