"""Arrays of an ``NDArrayIter`` by number, also of one that has shuffled them: `restored`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import mxnet as mx
import numpy as np

from lbbsp_core.runtime.exchange.collectives import Collectives


class Samples(Sequence[Any]):
    """Samples of arrays by number, for comparisons between workers."""

    def __init__(self, source: mx.io.NDArrayIter) -> None:
        self._axis = source.layout.find("N")
        self._arrays = [array for _, array in source.data + source.label]

    def __len__(self) -> int:
        return min(array.shape[self._axis] for array in self._arrays)

    def __getitem__(self, number: Any) -> list[Any]:
        where = (slice(None),) * self._axis + (number,)
        return [array[where] for array in self._arrays]


def restored(source: mx.io.NDArrayIter, collectives: Collectives) -> mx.io.NDArrayIter:
    """Returns an iterator over the arrays as they were before `source` shuffled them; a collective.

    An ``NDArrayIter`` shuffles its arrays when it is created, and differently on each worker. The
    order of the epochs is drawn alike on all workers, which needs the same arrays on all: they are
    compared in full.
    """
    parts = [_restored(source, part) for part in (source.data, source.label)]
    if collectives.workers > 1:
        seen = blake2b(digest_size=6)
        for array in (each for part in parts for each in part.values()):
            seen.update(np.ascontiguousarray(array.asnumpy()))
        digests = collectives.all_gather([int.from_bytes(seen.digest(), "big")])
        if any(each != digests[0] for each in digests):
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
        "shuffle=False, from the same arrays on all workers and once; balance(...) shuffles alike "
        "on all workers"
    )
