"""What a balanced store does with the arguments of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import mxnet as mx
import numpy as np
from mxnet import gluon

from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.validate import require_integer
from lbbsp_mx.data.data_iter import ARRAY_PARAMS, Columns, array_iter

Source: TypeAlias = "mx.io.NDArrayIter | gluon.data.Dataset"


def check_arguments(data: object, label: Columns, iter_params: Mapping[str, Any]) -> None:
    """Raises if an argument would have no effect.

    Raises:
        TypeError: The data have labels or names already; names the remedy.
    """
    if label is not None and isinstance(data, mx.io.NDArrayIter | gluon.data.Dataset):
        raise TypeError(
            "label must be left out with an NDArrayIter or a gluon data set, whose labels are "
            f"used, got {type(label).__name__}: pass both as arrays, or both in one of these"
        )
    named = sorted(ARRAY_PARAMS.keys() & iter_params.keys())
    if named and isinstance(data, mx.io.NDArrayIter):
        raise TypeError(
            f"iter_params must leave out {', '.join(named)} with an NDArrayIter, whose own are "
            "used: pass them to NDArrayIter"
        )


def drops_last(data: object) -> bool:
    """Returns whether an ``NDArrayIter`` discards a short last batch.

    Raises:
        ValueError: It keeps that batch for the next epoch.
    """
    handle = getattr(data, "last_batch_handle", "pad")
    if handle == "roll_over":
        raise ValueError(
            "last_batch_handle must be 'pad' or 'discard' in the NDArrayIter, got 'roll_over': "
            "each epoch of a balanced store begins with a new order; 'pad' trains on the samples "
            "that are left in a short last step, 'discard' leaves them out"
        )
    return handle == "discard"


def total_of(data: object, size: int | None, workers: int) -> int:
    """Returns the global batch size: the given one, or an even batch for each worker."""
    if size is not None:
        return require_integer("global_batch_size", size, workers)
    if not isinstance(data, mx.io.NDArrayIter):
        raise ValueError(
            "global_batch_size must be given, because only an NDArrayIter has a batch size: it "
            "counts the samples of a step over all workers"
        )
    if data.batch_size == 1:
        raise ValueError(
            "batch_size of the NDArrayIter is 1, its default, so that each worker would train on "
            "single samples: pass it, or global_batch_size= if that is meant"
        )
    return int(data.batch_size) * workers


def source_of(
    collectives: Collectives, data: Any, label: Columns, iter_params: Mapping[str, Any] | None
) -> tuple[Source, dict[str, Any]]:
    """Returns the data by index, and the arguments of `PlannedIter` that are left for it."""
    params = dict(iter_params or {})
    if isinstance(data, gluon.data.Dataset):
        return data, params
    if isinstance(data, mx.io.NDArrayIter) and data.shuffle:
        return _restored_iter(data, collectives), params
    names = {name: params.pop(name, value) for name, value in ARRAY_PARAMS.items()}
    return array_iter(data, label, **names), params


def _restored_iter(source: mx.io.NDArrayIter, collectives: Collectives) -> mx.io.NDArrayIter:
    """Returns an iterator over the arrays as they were before `source` shuffled them; a collective.

    An ``NDArrayIter`` shuffles its arrays when it is created, and differently on each worker. The
    order of the epochs is drawn alike on all workers, which needs the same arrays on all: they are
    compared in full.
    """
    parts = [_restored(source, part) for part in (source.data, source.label)]
    if collectives.workers > 1:
        hasher = blake2b(digest_size=6)
        for array in (column for part in parts for column in part.values()):
            hasher.update(np.ascontiguousarray(array.asnumpy()).data)
        digests = collectives.all_gather([int.from_bytes(hasher.digest(), "big")])
        if any(digest != digests[0] for digest in digests):
            raise _not_restorable("workers have different arrays after it is undone")
    return mx.io.NDArrayIter(*parts, batch_size=source.batch_size, layout=source.layout)


def _restored(source: mx.io.NDArrayIter, part: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the arrays of data or labels in their first order, by name."""
    if source.layout.find("N") or not all(type(array) is mx.nd.NDArray for _, array in part):
        raise _not_restorable("it can only be undone for dense arrays whose first axis is N")
    where = np.argsort(source.idx)
    return {
        name: mx.nd.array(array.asnumpy()[where], array.context, array.dtype)
        for name, array in part
    }


def _not_restorable(why: str) -> ValueError:
    return ValueError(
        f"shuffle must be False in the NDArrayIter, got True, and {why}: create it with "
        "shuffle=False, from the same arrays on all workers and once; balance(...) shuffles them"
    )
