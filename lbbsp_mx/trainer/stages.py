"""What happens to gradients on their way to the update: `GradientStage`, one class each.

A trainer has a list of stages, chosen when it is created. A single worker has none, except one for
devices without samples, where a plan may give it fewer samples than devices.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx.parameters import Arrays, learning, set_rows
from lbbsp_mx.store.trainer_store import TrainerStore
from lbbsp_mx.trainer.steps import StepSizes

logger = logging.getLogger("lbbsp.mx")

_FRESHNESS: Final = "freshness"
"""Key by which workers tell each other of their gradients."""


class Gradients:
    """Gradients of a step, by the numbers of their parameters.

    `arrays` are summed in place over the devices and the workers; those with numbers in `copies`
    are dense copies of row-sparse ones. `weight` is that of this worker's batch, if it has one.
    """

    def __init__(
        self, params: Sequence[gluon.Parameter], sizes: StepSizes, weight: float | None
    ) -> None:
        self.params, self.sizes, self.weight = params, sizes, weight
        self.arrays: dict[int, Arrays] = {i: params[i].list_grad() for i in learning(params)}
        self.copies: set[int] = set()

    def sum_over(self, store: TrainerStore) -> None:
        """Queues the sums over devices and workers."""
        for number, arrays in self.arrays.items():
            key = ("rows", number) if number in self.copies else number
            store.pushpull(key, arrays, priority=-number)


class GradientStage:
    """A stage of the way; what a stage does not override, it does not do."""

    def before_backward(self) -> None:
        """Sees gradients to which others may be added."""

    def after_backward(self) -> None:
        """Sees gradients, or a part of them that others will be added to, as they are computed."""

    def before_sums(self, gradients: Gradients) -> None:
        """Prepares the gradients of this worker, which have been queued, and not yet summed."""

    def reads_sums(self, *, ignores_stale: bool) -> bool:
        """Returns whether the sums must be complete before the update is queued."""
        return False

    def after_sums(self, gradients: Gradients) -> None:
        """Puts the sums back; they are complete if any stage reads them."""

    def before_update(self, *, ignores_stale: bool) -> None:
        """Prepares the update by the sums."""

    def after_update(self) -> None:
        """Cleans up, when the update has been queued."""


class IdleDevices(GradientStage):
    """Zeroes the gradients of devices without samples: a batch may be smaller than their number.

    A store that updates leaves the marks of new gradients as they are; they are removed here, so
    that the next step sees which devices had samples.
    """

    def __init__(self, updates_in_store: Callable[[], bool]) -> None:
        self._updates_in_store = updates_in_store
        self._marked: list[gluon.Parameter] = []  # after the update
        self._has_removed = False

    def before_sums(self, gradients: Gradients) -> None:
        """Zeroes them, if the batch has a plan."""
        sizes, params = gradients.sizes, [gradients.params[i] for i in gradients.arrays]
        if sizes.is_planned:
            largest = max(sizes.parts or (sizes.local,))
            clear_stale(param for param in params if largest < len(param._data))
        self._marked = params if sizes.is_planned and self._updates_in_store() else []
        if self._has_removed:
            mark_gradients(self._marked, is_fresh=True)

    def after_update(self) -> None:
        """Removes the marks that the store has left."""
        mark_gradients(self._marked, is_fresh=False)
        self._has_removed = self._has_removed or bool(self._marked)


class Freshness(GradientStage):
    """Lets workers tell each other in each step which parameters learn and have new gradients.

    Where a batch does not use a parameter, such as the head of another task, its gradient is that
    of an earlier step, which gluon calls stale. It counts as zero, and the parameter is updated on
    all workers if any of them has a new gradient, as in one process. When it is created, the same
    parameters must learn on all workers.
    """

    def __init__(
        self, store: TrainerStore, session: PipelinedSession, params: Sequence[gluon.Parameter]
    ) -> None:
        self._store, self._session, self._params = store, session, params
        self._counts = mx.nd.zeros((2, len(params)))  # one array, by which MXNet orders sums
        self._summed = learning(params)  # by all workers
        store.broadcast(_FRESHNESS, self._counts, self._counts)

    def before_sums(self, gradients: Gradients) -> None:
        """Zeroes stale gradients, and tells the other workers."""
        learns = learning(self._params)
        row = np.zeros((2, len(self._params)), np.float32)
        row[0, learns] = 1
        row[1, learns] = clear_stale(self._params[number] for number in learns)
        mx.nd.from_numpy(row).copyto(self._counts)
        self._store.pushpull(_FRESHNESS, self._counts, priority=1)
        if learns != self._summed:
            self._session.exclude_step()  # because it waits for the others here
            # If they have not changed the same, all sum as before, until settings are compared.
            if np.isin(self._counts[0].asnumpy(), (0, self._store.workers)).all():
                self._summed = learns
            else:
                gradients.arrays = {number: self._arrays(number) for number in self._summed}

    def reads_sums(self, *, ignores_stale: bool) -> bool:
        """Returns whether others may have a gradient that this worker has not."""
        return ignores_stale and self._is_partial()

    def before_update(self, *, ignores_stale: bool) -> None:
        """Marks gradients as new that any worker has computed."""
        if ignores_stale and self._is_partial():
            counts = self._counts[1].asnumpy()
            new = (self._params[i] for i in learning(self._params) if counts[i])
            mark_gradients(new, is_fresh=True)

    def _is_partial(self) -> bool:
        """Returns whether this worker has no new gradient of a parameter that learns."""
        learns = (self._params[number]._data for number in learning(self._params))
        return not all(any(data._fresh_grad for data in devices) for devices in learns)

    def _arrays(self, number: int) -> Arrays:
        param = self._params[number]
        is_fixed = param.grad_req == "null"  # here alone: the others wait for these sums
        return [array.copy() for array in param._data] if is_fixed else param.list_grad()


class RowSums(GradientStage):
    """Sums row-sparse gradients as dense copies, because MXNet's servers return no others.

    A copy has one more column, which tells the rows that occur in a batch: optimizers update these
    alone, also where the gradient is zero.
    """

    def __init__(self, store: TrainerStore) -> None:
        self._store = store
        self._copies: dict[int, Arrays] = {}
        logger.warning(
            "row-sparse gradients are summed over workers as dense arrays, because MXNet's servers "
            "sum no others, and row-sparse parameters are kept whole on each of them; if the table "
            "is large and most of its rows are used, sparse_grad=False saves the conversion"
        )

    def before_sums(self, gradients: Gradients) -> None:
        """Replaces row-sparse gradients by their copies."""
        for number, arrays in gradients.arrays.items():
            param = gradients.params[number]
            if param._grad_stype == "default":
                continue
            if number not in self._copies:
                self._copies[number] = self._create(number, arrays)
            if param.grad_req != "null":
                for copy, gradient in zip(self._copies[number], arrays, strict=True):
                    _fill(copy, gradient)
            gradients.arrays[number] = self._copies[number]
            gradients.copies.add(number)

    def reads_sums(self, *, ignores_stale: bool) -> bool:
        """Returns true: the rows are found in the sums."""
        return True

    def after_sums(self, gradients: Gradients) -> None:
        """Replaces the gradients by the sums."""
        for number, copies in self._copies.items():
            param = gradients.params[number]
            if param.grad_req == "null":  # frozen since
                continue
            for copy, gradient in zip(copies, param.list_grad(), strict=True):
                _restore(gradient, copy.asnumpy())

    def _create(self, number: int, gradients: Arrays) -> Arrays:
        """Creates the copies, and their key; all workers do so in the same order."""
        shape = (gradients[0].shape[0], int(np.prod(gradients[0].shape[1:])) + 1)
        copies = [mx.nd.zeros(shape, ctx=g.context, dtype=g.dtype) for g in gradients]
        self._store.broadcast(("rows", number), copies[0], copies)
        return copies


class MeanLosses(GradientStage):
    """Makes sums of gradients of losses that are means over a worker's batch."""

    def before_sums(self, gradients: Gradients) -> None:
        """Multiplies the means by this worker's samples, or its weight."""
        weight = gradients.weight
        factor = float(gradients.sizes.local if weight is None else weight)
        for number, arrays in gradients.arrays.items():
            for array in arrays:
                if factor:
                    array *= factor
                elif number in gradients.copies:
                    array[:, :-1] = 0  # the rows that occur are updated nevertheless
                else:  # a product would be NaN where the mean is that of nothing
                    array[:] = 0


class LeftSums(GradientStage):
    """Divides the sums of a step, if the script leaves them where gradients are added.

    All workers have the same sums there. They would be added once for each worker.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._left: list[Arrays] = []

    def before_sums(self, gradients: Gradients) -> None:
        """Remembers to which gradients others are added."""
        adding = (i for i in gradients.arrays if gradients.params[i].grad_req == "add")
        self._left = [gradients.params[number].list_grad() for number in adding]

    def before_backward(self) -> None:
        """Divides them; `zero_grad` may have cleared them."""
        with mx.autograd.pause():
            for array in itertools.chain.from_iterable(self._left):
                array /= self._workers
        self._left = []


def stages_of(
    store: TrainerStore, session: PipelinedSession, params: Sequence[gluon.Parameter], mean: bool
) -> list[GradientStage]:
    """Returns the stages of several workers, whose losses may be means; a collective."""
    stages: list[GradientStage] = [Freshness(store, session, params), LeftSums(store.workers)]
    if any(param._grad_stype != "default" for param in params):
        stages.append(RowSums(store))
    if mean:
        stages.append(MeanLosses())
    return stages


def _fill(copy: mx.nd.NDArray, gradient: mx.nd.NDArray) -> None:
    occurs = np.zeros((copy.shape[0], 1), copy.dtype)
    occurs[gradient.indices.asnumpy().astype(np.int64)] = 1
    dense = gradient.tostype("default").reshape((copy.shape[0], -1))
    column = mx.nd.array(occurs, ctx=copy.context, dtype=copy.dtype)
    mx.nd.concat(dense, column, dim=1, out=copy)


def _restore(gradient: mx.nd.NDArray, summed: npt.NDArray[Any]) -> None:
    rows = np.flatnonzero(summed[:, -1])
    if len(rows):
        set_rows(gradient, summed[rows, :-1].reshape(len(rows), *gradient.shape[1:]), rows)
    else:
        clear(gradient)


# Gradients that a batch has computed, which gluon marks as fresh


def clear_stale(params: Iterable[gluon.Parameter]) -> list[bool]:
    """Zeroes stale gradients, which count as new if another device has one; returns who has any."""
    have_any = []
    for param in params:
        fresh = [data._fresh_grad for data in param._data]
        if not all(fresh):
            for data, gradient, is_new in zip(param._data, param.list_grad(), fresh, strict=True):
                if not is_new:
                    clear(gradient)
                    data._fresh_grad = any(fresh)
        have_any.append(any(fresh))
    return have_any


def clear(array: mx.nd.NDArray) -> None:
    """Zeroes an array; a row-sparse one has no rows afterwards."""
    if array.stype == "default":
        array[:] = 0
    else:  # which an assignment would give all rows
        zeros = mx.nd.sparse.zeros(array.stype, array.shape, array.context, array.dtype)
        zeros.copyto(array)


def mark_gradients(params: Iterable[gluon.Parameter], *, is_fresh: bool) -> None:
    """Marks gradients as computed since the last step, or not, on all devices."""
    for param in params:
        for data in param._data:
            data._fresh_grad = is_fresh
