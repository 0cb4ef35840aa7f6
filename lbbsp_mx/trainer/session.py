"""The session of a trainer: `start_session`; without a global batch size, `Unplanned`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeAlias, cast

import mxnet as mx
from mxnet import gluon
from mxnet.kvstore import KVStoreBase

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Proportional
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.runtime.exchange.handshake import compare_facts
from lbbsp_core.runtime.extensions.record_file import Recording
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_core.runtime.options.naming import limits_by_rank
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.validate import require_integer
from lbbsp_mx import cluster
from lbbsp_mx.parameters import devices_of, normalises_batches, require_unique_names
from lbbsp_mx.store.kvstore import GLUON_NAME, SharedStore, make_store
from lbbsp_mx.store.native import ASYNCHRONOUS, DISTRIBUTED, IN_ONE_PROCESS, NAME, kind_of, runtime
from lbbsp_mx.trainer.base import UnavailableError

logger = logging.getLogger("lbbsp.mx")

Store: TypeAlias = "KVStoreBase | str | None"
"""Argument `kvstore` of a trainer."""


def trains_alone(kvstore: Store) -> bool:
    """Returns whether gluon's own code trains, because there are no other workers."""
    if isinstance(kvstore, KVStoreBase):
        return bool(kvstore.num_workers == 1)
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
    if kvstore in (NAME, GLUON_NAME):
        return "dist_sync" if cluster.in_cluster() else "device"
    return kind_of(kvstore or "local")


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


def start_session(
    trainer: gluon.Trainer, total: int | None, options: SessionOptions, parts: int
) -> PipelinedSession:
    """Creates the session of a trainer with the global batch size `total`.

    `parts` are the loader batches of a step.
    """
    store, contexts = trainer._store, trainer._contexts
    if total is None:
        return cast(PipelinedSession, Unplanned(store))
    options = options.for_workers(store.workers, total)
    if options.granularity is None:
        rows = store.all_gather([parts, len(contexts)])
        compare_facts(["accumulate"], [row[:1] for row in rows])
        options = with_granularity(options, [count for _, count in rows], total, parts)
    facts = {"parameters": len(trainer._params), "accumulate": parts}
    devices = devices_of(contexts)
    return runtime().open_session(store, total, options, facts=facts, parts=parts, devices=devices)


def with_granularity(
    options: SessionOptions, devices: Sequence[int], total: int, parts: int = 1
) -> SessionOptions:
    """Returns the options with a granularity for which all devices get equal shares.

    Workers may have different numbers of `devices`: it is a multiple of each.
    """
    workers, granularity = len(devices), parts * math.lcm(*devices)
    if granularity == 1:
        return options
    limits_of_workers = limits_by_rank(options.limits, workers)
    limits = [replace(bounds, minimum=max(bounds.minimum, parts)) for bounds in limits_of_workers]
    with suppress(ValueError):  # there is no such plan
        allocate([Proportional(1.0)] * workers, total=total, limits=limits, granularity=granularity)
        if total % granularity == 0 and total >= granularity * workers:
            return replace(options, granularity=granularity)
    logger.warning(
        "global_batch_size = %d cannot be divided among %d workers in multiples of %d, the number "
        "of devices times accumulate: split batches with even_split=False, or change it",
        total,
        workers,
        granularity,
    )
    return options


class Unplanned:
    """Stands for the session of a trainer in one process that has no global batch size.

    Steps are counted, and a request to stop works. What needs a plan raises an error.
    """

    rank, workers, order, step = 0, 1, None, 0
    # There are no other workers, and nothing is learned or recorded.
    exclude_step = finish_barrier = flush = load_state = staticmethod(lambda *_: None)
    excluded_wait = staticmethod(nullcontext)
    facts: Any = staticmethod(dict)  # a state of the optimizer fits any data

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        session: Any = self
        self._stopping = Stopping(session)
        self.extensions = {Stopping: self._stopping, Recording: Recording(session)}
        self.request_stop = self._stopping.request

    def __getattr__(self, name: str) -> Any:
        """Refuses all that needs a plan."""
        raise UnavailableError(
            "batch_sampler, sizes, rows and checkpoints need the samples per step: pass "
            "global_batch_size to lbbsp_mx.Trainer"
        )

    def end_step(self, *_: object) -> None:
        """Counts a step."""
        self.step += 1
        self._stopping.take(self._stopping.offer())

    @property
    def stopping(self) -> bool:
        """Whether `request_stop` was called before the last step ended."""
        return self._stopping.stopping

    def pass_inner(
        self, _number: int, _computed: Any, _summed: Any, size: int, _weight: Any
    ) -> Any:
        """Returns the batch size, because steps have no barrier."""
        return (size,)

    def save_state(self, *, alone: bool) -> tuple[None, dict[str, Any]]:
        """Returns an empty state."""
        return None, {}
