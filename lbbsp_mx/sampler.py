"""Draw: takes the samples that the plan of each step gives to this worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mxnet.gluon.data import Sampler

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.pipelined import PipelinedSession


class BatchSampler(Sampler):
    """Batches of this worker, for ``DataLoader(dataset, batch_sampler=...)``.

    Each iteration is an epoch of a seeded order that is the same on all workers; each sample
    occurs exactly once in it, for any plans. Batches are drawn by the number of their *step*: a
    loader that prefetches uses older plans, the same ones on all workers, and neither repeats nor
    drops a sample. `lbbsp_mx.Trainer.batch_sampler` creates it.

    Args:
        session: Session of the training.
        order: Samples of each step.
        before_draw: Called before the first batch of an iteration is drawn.
    """

    def __init__(
        self,
        session: PipelinedSession,
        order: GlobalOrder,
        before_draw: Callable[[], None] | None = None,
    ) -> None:
        self._session, self._before_draw = session, before_draw
        self.order = order

    def __len__(self) -> int:
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches of the next epoch, or of the rest of an epoch after `load_states`.

        Raises:
            RuntimeError: Another epoch was started, or a state loaded, so that the batch belongs
                to no step.
        """
        if self._before_draw is not None:
            self._before_draw()
        for step in self._session.epoch_steps(self.order):
            yield self._session.local_indices(step).tolist()
