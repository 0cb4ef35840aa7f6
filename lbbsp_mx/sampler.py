"""Draws: each step takes the samples that its plan gives to this worker."""

from __future__ import annotations

from collections.abc import Iterator

from mxnet.gluon.data import Sampler

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.pipelined import PipelinedSession


class BatchSampler(Sampler):
    """Batches of this worker, for ``DataLoader(dataset, batch_sampler=...)``.

    Each iteration is an epoch of a seeded order that is the same on every worker: over it, each
    sample comes exactly once, whatever the plans. Batches are drawn by the number of their
    *step*: a loader that fetches ahead sees older plans, the same ones on every worker, and
    neither repeats nor drops a sample. Make one by `lbbsp_mx.Trainer.batch_sampler`.

    Args:
        session: Of the training.
        order: Samples of each step.
    """

    def __init__(self, session: PipelinedSession, order: GlobalOrder) -> None:
        self._session = session
        self.order = order

    def __len__(self) -> int:
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yields an epoch: the rest of the running one after `load_states`, else the next one.

        Raises:
            RuntimeError: The training has moved on: the batch belongs to no step.
        """
        for step in self._session.epoch_steps(self.order):
            yield self._session.local_indices(step).tolist()
