"""What a balanced store does with the arguments of its data: `check_arguments`, `drops_last`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx
from mxnet import gluon

from lbbsp_mx.data.data_iter import ARRAY_PARAMS, Columns


def check_arguments(data: object, label: Columns, iter_params: Mapping[str, Any]) -> None:
    """Raises if an argument would have no effect.

    Raises:
        TypeError: The data have labels or names already; names the remedy.
    """
    if label is not None and isinstance(data, mx.io.NDArrayIter | gluon.data.Dataset):
        kind = "an NDArrayIter" if isinstance(data, mx.io.NDArrayIter) else "a gluon data set"
        raise TypeError(
            f"label must be left out with {kind}, whose labels are used, got "
            f"{type(label).__name__}: pass data and labels as arrays, or both in {kind}"
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
