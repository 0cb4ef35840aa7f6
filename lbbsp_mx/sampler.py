"""Apply: each step draws the samples that its plan gives to this worker."""

from __future__ import annotations

from collections.abc import Iterator

from mxnet.gluon.data import Sampler

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.pipelined import Loop


class BatchSampler(Sampler):
    """This worker's batches of an epoch, for ``DataLoader(dataset, batch_sampler=...)``.

    Each iteration is an epoch of a seeded order that is the same on every worker: over it, each
    sample comes exactly once, whatever the plans. Batches are drawn by the number of their
    *step*: a loader that fetches ahead sees older plans, the same ones on every worker, and
    neither repeats nor drops a sample. Make one by `lbbsp_mx.Trainer.batch_sampler`.

    Args:
        loop: Of the trainer.
        order: Which samples each step holds.
    """

    def __init__(self, loop: Loop, order: GlobalOrder) -> None:
        self._loop = loop
        self.order = order

    def __len__(self) -> int:
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """An epoch: the rest of the running one after `load_states`, else a fresh one.

        Raises:
            RuntimeError: The training has gone elsewhere since: the batch belongs to no step.
        """
        for step in self._loop.begin_epoch(self.order):
            yield self._loop.local_indices(step).tolist()
