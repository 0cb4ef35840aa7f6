"""Row-sparse gradients, which are summed as dense copies, and parameters, which stay whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import TypeAlias

import mxnet as mx
import numpy as np
from mxnet import gluon

from lbbsp_mx.store.collectives import TrainerStore
from lbbsp_mx.trainer.means import clear

logger = logging.getLogger("lbbsp.mx")

Arrays: TypeAlias = "list[mx.nd.NDArray]"


class RowSums:
    """Dense copies of row-sparse gradients, which stores sum in their place.

    MXNet's servers return only dense sums. A copy has one more column, which tells the rows that
    occur in a batch: optimizers update these alone, also where the gradient is zero.
    """

    def __init__(
        self, store: TrainerStore, params: Sequence[gluon.Parameter], devices: int
    ) -> None:
        self._store = store
        self._copies: dict[int, Arrays] = {}
        self._params = dict(enumerate(params))
        has_sparse = any(param._grad_stype != "default" for param in params)
        self.is_needed = has_sparse and (store.workers > 1 or devices > 1)
        if has_sparse and store.workers > 1:
            logger.warning(
                "row-sparse gradients are summed over workers as dense arrays, because MXNet's "
                "servers sum no others, and row-sparse parameters are kept whole on each of them; "
                "if the table is large and most of its rows are used, sparse_grad=False saves the "
                "conversion"
            )

    def arrays_of(self, number: int) -> Arrays:
        """Returns the arrays to sum for a parameter, one per device: gradients, or copies."""
        param = self._params[number]
        has_none = param.grad_req == "null"  # here alone: the others wait for these sums
        gradients = [each.copy() for each in param._data] if has_none else param.list_grad()
        if not self.is_needed or param._grad_stype == "default":
            return gradients
        if number not in self._copies:
            self._copies[number] = self._create(number, gradients)
        for copy, gradient in zip(self._copies[number], gradients, strict=True):
            if not has_none:
                _fill(copy, gradient)
        return self._copies[number]

    def key(self, number: int) -> object:
        """Returns the key of the sums of a parameter, which the store has initialised."""
        return ("rows", number) if number in self._copies else number

    def weight(self, number: int, arrays: Arrays, factor: float) -> None:
        """Multiplies these arrays of a parameter; NaN times 0, of a mean of nothing, is 0."""
        for array in arrays:
            if factor:
                array *= factor
            elif number in self._copies:
                array[:, :-1] = 0  # the rows that occur are updated nevertheless
            else:
                array[:] = 0

    def put_back(self) -> None:
        """Replaces the gradients by the sums; waits for these."""
        for number, copies in self._copies.items():
            if self._params[number].grad_req == "null":  # frozen since
                continue
            for copy, gradient in zip(copies, self._params[number].list_grad(), strict=True):
                _restore(gradient, copy.asnumpy())

    def _create(self, number: int, gradients: Arrays) -> Arrays:
        """Creates the copies, and their key; all workers do so in the same order."""
        shape = (gradients[0].shape[0], int(np.prod(gradients[0].shape[1:])) + 1)
        copies = [mx.nd.zeros(shape, ctx=g.context, dtype=g.dtype) for g in gradients]
        self._store.broadcast(("rows", number), copies[0], copies)
        return copies


def is_sparse(param: gluon.Parameter) -> bool:
    """Returns whether the values of a parameter are row-sparse, and not its gradients alone."""
    return bool(param._stype != "default")


def keep_whole(params: Iterable[gluon.Parameter]) -> None:
    """Lets row-sparse parameters be read like dense ones, since each worker has all rows of them.

    MXNet's servers would have to update them otherwise, and divide by a constant batch size.
    """
    for param in filter(is_sparse, params):
        param.list_data = MethodType(_whole_arrays, param)


def _whole_arrays(param: gluon.Parameter) -> Arrays:
    arrays: Arrays = param._check_and_get(param._data, list)
    return arrays


def _set_whole(param: gluon.Parameter, values: mx.nd.NDArray) -> None:
    """Sets all rows of a row-sparse parameter, also those that are zero: optimizers need them."""
    rows = np.arange(param.shape[0])
    for array in _whole_arrays(param):
        mx.nd.sparse.row_sparse_array(
            (values.as_in_context(array.context), rows),
            shape=param.shape, ctx=array.context, dtype=array.dtype,
        ).copyto(array)  # fmt: skip


def exchange_whole(param: gluon.Parameter, exchange: Callable[[mx.nd.NDArray], None]) -> None:
    """Exchanges a row-sparse parameter as a dense copy, in which `exchange` puts its new values."""
    values = _whole_arrays(param)[0].tostype("default")
    exchange(values)
    _set_whole(param, values)


def copy_rows(param: gluon.Parameter, out: Arrays | mx.nd.NDArray) -> None:
    """Copies a whole row-sparse parameter, unless `out` are its own arrays."""
    own = _whole_arrays(param)
    for array in out if isinstance(out, list | tuple) else [out]:
        if not any(array is each for each in own):
            own[0].copyto(array)


def _fill(copy: mx.nd.NDArray, gradient: mx.nd.NDArray) -> None:
    occurs = np.zeros((copy.shape[0], 1), copy.dtype)
    occurs[gradient.indices.asnumpy().astype(np.int64)] = 1
    dense = gradient.tostype("default").reshape((copy.shape[0], -1))
    column = mx.nd.array(occurs, ctx=copy.context, dtype=copy.dtype)
    mx.nd.concat(dense, column, dim=1, out=copy)


def _restore(gradient: mx.nd.NDArray, summed: np.ndarray) -> None:
    rows = np.flatnonzero(summed[:, -1])
    if not len(rows):
        clear(gradient)
        return
    values = summed[rows, :-1].reshape(len(rows), *gradient.shape[1:])
    mx.nd.sparse.row_sparse_array(
        (values, rows), shape=gradient.shape, ctx=gradient.context, dtype=gradient.dtype
    ).copyto(gradient)
