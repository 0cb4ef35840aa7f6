"""Data iterator of a balanced store: `BalancedIter`."""

from __future__ import annotations

from typing import Any

from mxnet.io import DataBatch, DataDesc

from lbbsp_mx.data.data_iter import PlannedIter
from lbbsp_mx.data.sampler import BatchSampler
from lbbsp_mx.module.module_data import Source
from lbbsp_mx.module.pushes import ModuleSteps


class BalancedIter(PlannedIter):
    """Data iterator of a balanced store; `lbbsp_mx.KVStore.balance` creates it.

    Its own shapes are those of an even batch, from which Module computes ``rescale_grad``; those
    of each batch are in the batch.

    Args:
        steps: Steps of the training.
        batch_size: Samples of an even batch.
        sampler: Yields the indices of each batch.
        source: The data.
        **params: Further arguments of `PlannedIter`.
    """

    def __init__(
        self,
        steps: ModuleSteps,
        batch_size: int,
        sampler: BatchSampler,
        source: Source,
        **params: Any,
    ) -> None:
        super().__init__(sampler, source, **params)
        self._steps = steps
        self._axis = self._layout.find("N")
        self._even = (
            batch_size,
            *(
                [_resized(desc, self._axis, batch_size) for desc in part]
                for part in (self.provide_data, self.provide_label)
            ),
        )
        self._show_even()

    def next(self) -> DataBatch:
        """Ends the step before, and returns this worker's batch of the next one.

        Raises:
            StopIteration: The epoch has ended; `reset` lets the next one begin.
            ValueError: No gradients were pushed for the batch before.
        """
        if not self._steps.in_own_thread:
            return _Unplanned()
        self._steps.begin_draw()
        try:
            batch = super().next()
        finally:
            self._show_even()
        self._steps.drawn(batch.data[0].shape[self._axis])
        return batch

    def reset(self) -> None:
        """Ends the step before, and lets the next batch be the first of the next epoch."""
        self._steps.end()
        super().reset()

    def _show_even(self) -> None:
        self.batch_size, self.provide_data, self.provide_label = self._even


class _Unplanned:
    """What another thread gets for a batch: an error in it could leave the training waiting."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            "a balanced iterator must be read by the thread that has called balance, because the "
            "plan of a batch is known when the update before it is made: leave PrefetchingIter and "
            "other threads out"
        )


def _resized(desc: DataDesc, axis: int, size: int) -> DataDesc:
    """Returns the description of a batch of another size."""
    shape = (*desc.shape[:axis], size, *desc.shape[axis + 1 :])
    return DataDesc(desc.name, shape, desc.dtype, layout=desc.layout)
