"""What scripts ask of a training as a whole: `TrainingControl`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

import mxnet as mx
import numpy as np
import numpy.typing as npt

from lbbsp_core.runtime.loop.checkpoint_schedule import Every
from lbbsp_mx.data.sampler import BatchSampler, Data, make_sampler
from lbbsp_mx.reliability.agreement import Agreement
from lbbsp_mx.reliability.checkpoint import Checkpoints
from lbbsp_mx.store.native import runtime
from lbbsp_mx.trainer.base import StoreTrainer
from lbbsp_mx.trainer.steps import SEVERAL_CHECKPOINTS


class TrainingControl(StoreTrainer):
    """Methods of a trainer beside those of its steps: plan, data, metrics and checkpoints."""

    _agreement: Agreement
    _checkpoints: Checkpoints
    _global_batch_size: int | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Plan of the running step: samples by rank."""
        self._steps.shows_sizes = True
        return self._session.sizes

    @property
    def stopping(self) -> bool:
        """Request of any worker to stop, true on all workers after the same step."""
        return self._session.stopping

    def request_stop(self) -> None:
        """Asks all workers to stop: `stopping` is true on all of them after the next step."""
        self._session.request_stop()

    def batch_sampler(
        self,
        data: Data,
        seed: int | None = None,
        *,
        shuffle: bool = True,
        sampler: Iterable[object] | None = None,
        beside: BatchSampler | None = None,
        work: npt.ArrayLike | None = None,
    ) -> BatchSampler:
        """Creates the ``batch_sampler`` of the DataLoader, with the same arguments on all workers.

        Args:
            data: The whole data set, or its number of samples. Of a data set, workers compare
                some samples, so that none of them has only a part of it.
            seed: Seed of the order. Defaults to the trainer's.
            shuffle: False keeps the order of the data set in all epochs.
            sampler: Sampler of the whole data set that gives the order of each epoch, in place of
                `seed` and `shuffle`: an object with a length whose iteration yields indices, or
                lists of indices, each a global batch. The one of worker 0 counts for all.
            beside: Sampler that another loader of the same step uses. The new one then draws as
                many samples in each step, of a data set of any length; iterate over the other one
                first: ``zip(loader, other_loader)``.
            work: Work of each sample of the data set, such as its tokens, shape
                ``(num_samples,)``. Each worker's share of a step is then a part of its work, see
                docs/work.md.

        Raises:
            ValueError: The data set is smaller than one global batch, a batch of `sampler` does
                not fit, or `work` is wrong.
            TypeError: `sampler` has no length, or yields no indices.
            DisagreementError: The workers have different data sets.
        """
        self._steps.check_leads()
        draws = self._steps.draws
        made = make_sampler(self._session, draws, data, seed, shuffle, sampler, beside, work)
        self._checkpoints.check_order()
        made.before_draw = self._begin_epoch
        return made

    @property
    def rows(self) -> slice:
        """Rows of the global batch that this worker has in every step, of a fixed plan.

        For training whose step continues the rows of the step before (truncated backpropagation
        through time): each worker slices its rows of every global batch, and needs no sampler.

        Raises:
            ValueError: The plan changes.
        """
        session, sizes = self._session, self._session.sizes
        policy = session.balancer.policy
        if session.workers > 1 and not policy.is_static:
            raise ValueError(
                f"rows must stay with their worker, but {type(policy).__name__} changes the plan: "
                "use policy=lbbsp_core.Even() or lbbsp_core.FixedShares(...)"
            )
        self._steps.has_rows = True
        begin = sum(sizes[: session.rank])
        return slice(begin, begin + sizes[session.rank])

    # Models that are equal on all workers

    def broadcast_parameters(self) -> None:
        """Sends the parameters of worker 0 to all workers, as after loading them on one worker.

        All workers must call it, between two steps. It is not needed before the first batch of
        `batch_sampler` is drawn: parameters that differ are then replaced by those of worker 0.
        The state of the optimizer does not change.
        """
        self._agreement.broadcast()

    def mean_over_workers(
        self,
        value: float | npt.ArrayLike | mx.nd.NDArray | mx.metric.EvalMetric,
        weight: float = 1.0,
    ) -> float | npt.NDArray[np.float64]:
        """Returns the weighted mean of a metric over workers, the same bits on all of them.

        All workers must call it, between two steps. Let a learning rate or an early stop follow
        this mean, not a worker's own metric, so that all workers decide alike.

        Args:
            value: A number of this worker, or an array with as many numbers on each worker; or a
                metric of MXNet, but no composite one, whose weight is its number of samples.
            weight: Weight of this worker, for example the number of samples behind the metric.

        Raises:
            DisagreementError: The workers give different numbers of values.
            ValueError: A weight is negative or not finite, or all are 0.

        Example::

            loss = trainer.mean_over_workers(local_loss, weight=len(local_validation_data))
            if loss > best:
                trainer.set_learning_rate(trainer.learning_rate / 2)
        """
        return self._agreement.mean(value, weight)

    # Checkpoints

    @property
    def epoch(self) -> int:
        """Number of the epoch of the batch sampler that is running or comes next, from 0."""
        order = self._session.order
        if order is None:
            return 0
        return self._session.step_of_order(self._session.step) // order.steps_per_epoch

    def resume(self, folder: str | Path, every: Every = "epoch") -> bool:
        """Continues from the newest checkpoint in a folder, and writes one regularly from now on.

        All workers must call it, after `batch_sampler` and before the first step. After a SIGTERM
        to any worker, all write a checkpoint after the same step and leave, with exit status 143.
        Between epochs they leave if no step follows within 15 s. Checkpoints are written in the
        background, as if by `save`.

        Args:
            folder: Folder that all workers share. Worker 0 writes to it; it need not exist.
            every: Steps between two checkpoints, or "epoch".

        Returns:
            Whether there was a checkpoint. The loader's next iteration then yields the rest of the
            epoch `epoch`.

        Raises:
            ValueError: The newest checkpoint is of other data, another order or network.

        Example::

            trainer.resume("checkpoints", every=100)
            for epoch in range(trainer.epoch, epochs):
                for x, y in loader:
                    ...
                    trainer.step(x.shape[0])
        """
        return self._checkpoints.resume(folder, every)

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint: weights, optimizer, balancer, and the position in the data.

        All workers must call it after the same step, and worker 0 writes. The two newest
        checkpoints in the folder are kept; an interrupted write leaves them complete. If the disk
        is full, a warning is logged and the training continues.

        Args:
            folder: Folder that all workers share; it is created.
        """
        self._checkpoints.save(folder)

    def load(self, folder: str | Path) -> bool:
        """Continues from the newest complete checkpoint of `save`, exactly after its step.

        All workers must call it at the same time, and may be more or fewer than those that have
        saved. Parameters, optimizer (with its learning rate) and order then have the saved state.

        Args:
            folder: Folder that all workers share.

        Returns:
            Whether there was a checkpoint.

        Raises:
            ValueError: The checkpoint is of other data, another order or network; nothing changes.
        """
        return self._checkpoints.load(folder)

    def save_states(self, fname: str) -> None:
        """Saves the states of the optimizer and of this worker's balancer, without pickle.

        Workers may write to different files or all to the same one, of which any is right, since
        they have the same optimizer; a worker that loads the file of another one learns its speed
        again. The file is complete or stays as it was.

        Raises:
            ValueError: The optimizer has state that cannot be saved.
        """
        self._checkpoints.save_file(fname)

    def load_states(self, fname: str) -> None:
        """Loads a file of `save_states`; all workers must, at the same time.

        The epoch continues where the state was saved: create the loader, or start to iterate over
        it, afterwards. Nothing in the file is executed.

        Raises:
            ValueError: The file is damaged, of other data, another order, network or optimizer, or
                a pickle of gluon's own trainer, which is not read.
        """
        self._checkpoints.load_file(fname)

    # What the trainer asks for

    def _begin_epoch(self) -> None:
        """Notes whose batches are drawn from now on, and compares the parameters before."""
        runtime().drawn_for = weakref.ref(self._steps)
        self._agreement.before_draw()

    def _end_step(self, step: int) -> None:
        """Compares, and writes a checkpoint, where they are due after a step."""
        if not self._steps.is_beside:
            self._agreement.end_step(step)
            self._checkpoints.end_step(step)

    def _check_beside(self, total: int | None, parts: int, options: Mapping[str, object]) -> None:
        """Raises an error if these are not the arguments of a trainer beside this one."""
        self._steps.check_leads()
        if self._checkpoints.schedule.regular:
            raise ValueError(SEVERAL_CHECKPOINTS)
        for name, own_argument, argument in (
            ("global_batch_size", self._global_batch_size, total),
            ("accumulate", self._steps.draws.parts, parts),
        ):
            if argument not in (None, own_argument):
                raise ValueError(
                    f"{name} must be that of the trainer beside which this one steps, "
                    f"{own_argument}, got {argument}: pass it to that trainer, since both "
                    "step on the same batches"
                )
        if options:
            raise ValueError(
                f"a trainer beside another one takes no options of the plan, got "
                f"{', '.join(options)}: pass them to the other trainer, whose plan both follow"
            )
