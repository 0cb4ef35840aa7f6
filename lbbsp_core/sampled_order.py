"""Order that a sampler of the user gives, epoch by epoch: `SampledOrder`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from lbbsp_core.order import GlobalOrder, Indices, Order, Snapshot, read_only

_NAME: Final = "sampler"
_KEPT: Final = 2  # epochs: a reader that prefetches enters the next one before the other readers


class SampledOrder(Order):
    """Order whose epochs are drawn one by one, from a sampler, and set by `draw`.

    A sampler of indices is cut into global batches, of which the last may be short. Batches of a
    sampler of batches are the global batches, in its order; a batch with fewer samples than
    `global_batch_size` is a short step.

    Args:
        num_samples: Samples of every epoch, >= 1.
        global_batch_size: Samples per step, X, >= 1.
        steps_per_epoch: Steps of every epoch, >= 1.
        by_batch: Whether the sampler gives batches.
        drop_last: True if a short last step was dropped.

    Example:
        >>> order = SampledOrder(5, 2, 3)
        >>> order.draw(0, [4, 4, 1, 0, 2], [2, 4, 5])
        >>> order.indices(0).tolist(), order.indices(2).tolist(), order.size(2)
        ([4, 4], [2], 1)
    """

    seed = 0
    shuffle = "by a sampler"

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        steps_per_epoch: int,
        by_batch: bool = False,
        drop_last: bool = False,
    ) -> None:
        self.num_samples, self.global_batch_size = num_samples, global_batch_size
        self.steps_per_epoch, self.by_batch, self.drop_last = steps_per_epoch, by_batch, drop_last
        # The samples of each step are not part of the key.
        self.key = (_NAME, num_samples, global_batch_size, steps_per_epoch, by_batch, drop_last)
        self._epochs: dict[int, tuple[Indices, Indices]] = {}

    def draw(
        self, epoch: int, indices: Sequence[int] | Indices, ends: Sequence[int] | Indices
    ) -> None:
        """Sets the samples of an epoch."""
        shape = (len(indices), len(ends))
        if shape != (self.num_samples, self.steps_per_epoch):
            raise ValueError(
                f"a sampler must give {self.num_samples} samples in {self.steps_per_epoch} steps "
                f"in every epoch, as in the first, got {shape[0]} in {shape[1]} in epoch {epoch}: "
                "let its epochs have the same length"
            )
        drawn = (read_only(np.array(indices, np.int64)), read_only(np.array(ends, np.int64)))
        kept = sorted(set(self._epochs) - {epoch})[-_KEPT + 1 :]
        self._epochs = {**{number: self._epochs[number] for number in kept}, epoch: drawn}

    def drawn(self, epoch: int) -> tuple[Indices, Indices] | None:
        """Returns the samples of an epoch and the ends of its steps; None if it is not drawn."""
        return self._epochs.get(epoch)

    def size(self, step: int) -> int:
        """Returns X_k, the number of samples in global step `step`.

        The steps of batches in an epoch that is not drawn count as full.
        """
        begin, end = self._span(step)
        return end - begin

    def position(self, step: int) -> int:
        """Returns the number of samples before global step `step`."""
        return step // self.steps_per_epoch * self.num_samples + self._span(step)[0]

    def indices(self, step: int) -> Indices:
        """Returns the samples of global step `step`: int64, shape ``(size(step),)``, read-only."""
        if (epoch := step // self.steps_per_epoch) not in self._epochs:
            raise LookupError(f"epoch {epoch} of the sampler is not drawn: call draw() first")
        return self._epochs[epoch][0][slice(*self._span(step))]

    def is_drawn(self, step: int) -> bool:
        """Returns whether the epoch of global step `step` is drawn."""
        return step // self.steps_per_epoch in self._epochs

    def snapshot(self, step: int) -> Snapshot:
        """Returns what another process needs to continue this order at global step `step`.

        It contains the samples of an epoch that has begun, which cannot be drawn again.
        """
        epoch, number = divmod(step, self.steps_per_epoch)
        if number == 0 or epoch not in self._epochs:
            return self.key
        return (*self.key, epoch, *self._epochs[epoch])

    def adopt(self, other: Order) -> None:
        """Takes over the epochs that an equal order has drawn."""
        if isinstance(other, SampledOrder) and other._epochs:
            self._epochs = dict(other._epochs)

    def _span(self, step: int) -> tuple[int, int]:
        """Returns where a step begins and ends in its epoch."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if epoch in self._epochs:
            ends = self._epochs[epoch][1]
            return int(ends[number - 1]) if number else 0, int(ends[number])
        begin = number * self.global_batch_size
        end = begin + self.global_batch_size
        return begin, end if self.by_batch else min(end, self.num_samples)


def order_of(snapshot: Snapshot) -> Order:
    """Returns the order of which `Order.snapshot` was made."""
    if snapshot[0] != _NAME:
        return GlobalOrder(*snapshot)
    order = SampledOrder(*snapshot[1:6])
    if len(snapshot) > 6:
        order.draw(*snapshot[6:])
    return order


def cut(
    items: Iterable[Any], global_batch_size: int, workers: int
) -> tuple[Indices, Indices, bool, int]:
    """Cuts what a sampler gives in an epoch into steps in which every worker has a sample.

    Returns samples; ends of the steps; whether these are batches of the sampler; dropped samples.
    """
    draws = list(items)
    by_batch = bool(draws) and np.ndim(draws[0]) > 0
    if by_batch:
        batches = [_indices(draw) for draw in draws]
    else:
        batches = np.split(_indices(draws), range(global_batch_size, len(draws), global_batch_size))
    largest = max(map(len, batches), default=0)
    if largest > global_batch_size:
        raise ValueError(
            f"a batch of the sampler has {largest} samples, more than global_batch_size = "
            f"{global_batch_size}: its batches are global batches; let them be of one size "
            "(FixedBucketSampler with ratio=0), or raise global_batch_size"
        )
    kept = [batch for batch in batches if len(batch) >= workers]
    if not kept or (not by_batch and largest < global_batch_size):
        raise ValueError(
            f"the sampler must give at least one global batch, got {sum(map(len, batches))} "
            f"samples with global_batch_size = {global_batch_size} and {workers} workers: lower "
            "global_batch_size or add data"
        )
    dropped = sum(map(len, batches)) - sum(map(len, kept))
    return np.concatenate(kept), np.cumsum([len(batch) for batch in kept]), by_batch, dropped


def _indices(items: Any) -> Indices:
    """Returns items as indices."""
    with suppress(TypeError, ValueError):  # they may be lists of several lengths
        array = np.asarray(items)
        if array.ndim == 1 and (not len(array) or (array.dtype.kind in "iu" and array.min() >= 0)):
            return array.astype(np.int64)
    raise TypeError(
        f"a sampler must give indices >= 0, or lists of them, got {items!r:.80}: pass a sampler "
        "of the whole data set"
    )
