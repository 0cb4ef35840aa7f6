"""What the sum of a step's gradients is divided by: `StepSizes`, and weights of samples."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, SupportsFloat, TypeAlias

import mxnet as mx
import numpy as np
from mxnet import gluon

from lbbsp_mx import compat

if TYPE_CHECKING:
    from lbbsp_core.runtime.loop.pipelined import PipelinedSession
    from lbbsp_mx.store.collectives import TrainerStore

logger = logging.getLogger("lbbsp.mx")

_FRESHNESS: Final = "freshness"
"""Key by which workers tell each other of their gradients."""

Weight: TypeAlias = "SupportsFloat | mx.nd.NDArray | None"
"""Weight of a worker's batch: a number, an array with one value, or none."""


class StepSizes(NamedTuple):
    """Sizes of the batches of a step.

    Args:
        local: Samples of this worker.
        parts: Samples of the parts of its batch.
        total: Samples of all workers, X_k.
        rank: Number of this worker.
        is_planned: False in a single worker without a batch sampler, whose batches are unknown.
    """

    local: int
    parts: tuple[int, ...]
    total: int
    rank: int
    is_planned: bool

    def check(self, batch_size: int) -> None:
        """Checks the batch size that is passed to `step`."""
        if self.is_planned and batch_size != self.local and batch_size not in self.parts:
            raise ValueError(
                f"step must be called with the {self.local} samples that the plan gives to worker "
                f"{self.rank}{self._or_a_part}, got {batch_size!r}: draw batches by "
                "trainer.batch_sampler(...), or of trainer.sizes[trainer.kvstore.rank] samples, "
                "and make a step for each; to accumulate gradients over several batches, pass "
                "accumulate to the trainer"
            )

    def divisor_of_means(self, batch_size: float) -> float:
        """Returns 1, by which `update` divides mean gradients, if its batch size is plausible."""
        if self.is_planned and batch_size not in (1, self.local, *self.parts, self.total):
            raise ValueError(
                f"update must be called with 1, the {self.local} samples of worker {self.rank}"
                f"{self._or_a_part}, or the {self.total} samples of all workers, got "
                f"{batch_size!r}: allreduce_grads has divided the gradients, so that each of them "
                "has the same effect"
            )
        return 1.0

    @property
    def _or_a_part(self) -> str:
        sizes = sorted(set(self.parts) - {self.local})
        return f", or those of a part ({', '.join(map(str, sizes))})" if sizes else ""


def unplanned_sizes(batch_size: int | None) -> StepSizes:
    """Returns the sizes of a step of a single worker without a sampler.

    The batch size is None if only `update` will know it.
    """
    size = 1 if batch_size is None else batch_size
    return StepSizes(size, (), size, 0, is_planned=False)


def clear_idle_devices(params: Iterable[gluon.Parameter], sizes: StepSizes) -> None:
    """Zeroes the gradients of devices without samples: a batch may be smaller than their number."""
    largest = max(sizes.parts or (sizes.local,))
    clear_stale(param for param in params if largest < len(param._data))


def clear_stale(params: Iterable[gluon.Parameter]) -> list[bool]:
    """Zeroes stale gradients, which count as new if another device has one; returns who has any."""
    return [any(_without_stale(param)) for param in params]


def _without_stale(param: gluon.Parameter) -> list[bool]:
    fresh = [data._fresh_grad for data in param._data]
    if not all(fresh):
        for data, gradient, is_new in zip(param._data, param.list_grad(), fresh, strict=True):
            if not is_new:
                clear(gradient)
                data._fresh_grad = any(fresh)
    return fresh


def clear(array: mx.nd.NDArray) -> None:
    """Zeroes an array; a row-sparse one has no rows afterwards."""
    if array.stype == "default":
        array[:] = 0
    else:  # which an assignment would give all rows
        zeros = mx.nd.sparse.zeros(array.stype, array.shape, array.context, array.dtype)
        zeros.copyto(array)


def is_fresh(param: gluon.Parameter) -> bool:
    """Returns whether a gradient has been computed since the last step, on any device."""
    return any(data._fresh_grad for data in param._data)


def mark_gradients(params: Iterable[gluon.Parameter], *, is_fresh: bool) -> None:
    """Marks gradients as computed since the last step, or not, on all devices."""
    for param in params:
        for data in param._data:
            data._fresh_grad = is_fresh


class Freshness:
    """What workers tell each other in each step: which parameters learn and have new gradients.

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
        self.summed = self._learning()
        """Numbers of the parameters whose gradients all workers sum."""
        store.broadcast(_FRESHNESS, self._counts, self._counts)

    @property
    def is_partial(self) -> bool:
        """Whether this worker has no new gradient of a parameter that learns."""
        return not all(is_fresh(self._params[number]) for number in self._learning())

    def tell(self) -> None:
        """Zeroes stale gradients, and tells the other workers; call it before the sums."""
        learning = self._learning()
        row = np.zeros((2, len(self._params)), np.float32)
        row[0, learning] = 1
        row[1, learning] = clear_stale(self._params[number] for number in learning)
        mx.nd.from_numpy(row).copyto(self._counts)
        self._store.pushpull(_FRESHNESS, self._counts, priority=1)
        if learning != self.summed:
            self._session.exclude_step()  # because it waits for the others here
            # If they have not changed the same, all sum as before, until settings are compared.
            if np.isin(self._counts[0].asnumpy(), (0, self._store.workers)).all():
                self.summed = learning

    def share(self) -> None:
        """Marks gradients as new that any worker has computed; call it after the sums."""
        if self.is_partial:
            told = self._counts[1].asnumpy()
            mark_gradients((self._params[i] for i in self._learning() if told[i]), is_fresh=True)

    def _learning(self) -> list[int]:
        return [i for i, param in enumerate(self._params) if param.grad_req != "null"]


def checked_weight(weight: Weight) -> float | None:
    """Returns the weight of this worker's batch as a number."""
    if weight is None:
        return None
    number = float(weight.asnumpy().item() if isinstance(weight, mx.nd.NDArray) else weight)
    if not 0 <= number < math.inf:
        raise ValueError(
            f"weight must be a finite number >= 0, got {weight!r}: pass the number of valid "
            "tokens, or the sum of the sample weights, in this worker's batch"
        )
    return number


def total_weight(weights: Sequence[float] | None) -> float:
    """Returns the sum of the weights of all workers, by rank."""
    total = math.fsum(weights or ())
    if total <= 0:
        raise ValueError(
            "the sum of `weight` over all workers must be > 0, got 0: a global batch needs at "
            "least one valid token or sample with a positive weight"
        )
    return total


class SampleWeights:
    """Notes that a gluon loss has got a `sample_weight` while gradients were recorded."""

    def __init__(self) -> None:
        self._seen = self._has_warned = False
        compat.watch_sample_weights(self._notice)

    def warn_of_means(self, weight: float | None) -> None:
        """Warns once if such a loss is followed by a step without `weight`."""
        if self._seen and weight is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a loss has a sample_weight, and the update divides by the number of samples, not "
                "by the sum of their weights or the number of valid tokens: to divide by that "
                "sum, let the loss be a sum, not a mean, over the tokens of a sample, and call "
                "trainer.step(batch_size, weight=...) with the sum of this worker's weights"
            )

    def _notice(self) -> None:
        self._seen = self._seen or mx.autograd.is_recording()


@functools.lru_cache
def sample_weights() -> SampleWeights:
    """Returns the only observer of this process; gluon's losses are patched once."""
    return SampleWeights()
