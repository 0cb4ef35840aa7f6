"""Gluon trainer for LB-BSP: `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

from lbbsp_core.runtime.checkpoint.writer import Every
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.validate import require_integer
from lbbsp_mx.data.draws import Draws, with_granularity
from lbbsp_mx.data.sampler import BatchSampler, Data, fixed_rows, make_sampler
from lbbsp_mx.devices import devices_of
from lbbsp_mx.fence import Fence
from lbbsp_mx.parameters import Parameters, as_created, facts_of
from lbbsp_mx.reliability.agreement import Agreement
from lbbsp_mx.reliability.checkpoint import Checkpoints
from lbbsp_mx.reliability.gluon_states import gluon_order
from lbbsp_mx.store.collectives import TrainerStore
from lbbsp_mx.store.native import runtime
from lbbsp_mx.trainer.alone import LocalTrainer, Unplanned, release_layers
from lbbsp_mx.trainer.checks import (
    Store,
    check_options,
    gluon_store,
    refuse_inexact,
    store_of,
    trains_alone,
)
from lbbsp_mx.trainer.means import (
    Freshness,
    StepSizes,
    Weight,
    checked_weight,
    sample_weights,
    total_weight,
)
from lbbsp_mx.trainer.sparse import RowSums, copy_rows, exchange_whole, is_sparse, keep_whole
from lbbsp_mx.trainer.steps import SEVERAL_CHECKPOINTS, Steps, StepsBeside, Wait


class Trainer(LocalTrainer):
    """Trains a gluon network on unequal workers by LB-BSP, without changing what is learned.

    In every step, each worker's share of the constant global batch follows its predicted speed,
    so that all workers reach the gradient all-reduce together. Gluon's losses are per sample, so
    the gradients of uneven batches can be added; ``step`` divides their sum by the *global* batch
    size. The update is then that of plain BSP on the same samples (Chen et al., arXiv
    1806.02508).

    In one process, without ``DMLC_*`` variables, gluon's own code trains: all options, attributes
    and methods of `mxnet.gluon.Trainer` are as there, with its default store "device".

    Args:
        params: Parameters of the network, as for `mxnet.gluon.Trainer`.
        optimizer: Name or object of the optimizer; it runs in the workers.
        optimizer_params: Options of the optimizer.
        kvstore: "dist_sync" (or "dist") or "dist_device_sync" (in one process: "local", "device"),
            or an `lbbsp_mx.KVStore`. In one process all that gluon's trainer takes.
        compression_params: None, because compressed gradients are not exact; as gluon's in one
            process.
        update_on_kvstore: None or False; as gluon's in one process.
        global_batch_size: X, samples per step over all workers; constant. With `beside`, it is that
            of the other trainer, and can be left out. So it can in one process, where the batch
            size that `step` is given counts; `batch_sampler`, `sizes`, `rows` and checkpoints need
            it.
        mean_loss: Whether the loss is already averaged over the worker's batch, as by
            ``loss.mean()``; its gradients are then weighted by the batch size, or by the ``weight``
            that `step` is given.
        accumulate: Loader batches of this worker per step, k >= 1, for scripts that accumulate
            gradients: X then counts the samples of one *update*, and the sampler cuts the share of
            each worker into k batches. Let all parameters have ``grad_req='add'``, call `step` (or
            `allreduce_grads` and `update`) after every k batches, and then ``zero_grad()``. Limits
            hold for all k batches together.
        beside: Trainer that steps on the same batches, as those of a GAN do. This one then follows
            its plan and uses its `kvstore`, and the work of both counts as busy time; only the
            other trainer has a `batch_sampler` and options, and steps once for every batch.
        **options: Options of `lbbsp_core.SessionOptions`, such as ``policy``, ``predictor``,
            ``cost``, ``limits`` and ``seed``. ``granularity`` defaults to the number of devices
            times `accumulate`, so that `gluon.utils.split_and_load` can split batches evenly.

    Raises:
        ValueError: No plan can satisfy the options, the update would not be exact, or
            `global_batch_size` is missing.

    Example::

        trainer = lbbsp_mx.Trainer(net.collect_params(), "sgd", global_batch_size=256)
        sampler = trainer.batch_sampler(len(dataset), seed=0)
        for x, y in gluon.data.DataLoader(dataset, batch_sampler=sampler):
            with autograd.record():
                loss = loss_fn(net(x), y)
            loss.backward()
            trainer.step(x.shape[0])
    """

    def __init__(
        self,
        params: Parameters,
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: dict[str, object] | None = None,
        kvstore: Store = "dist_sync",
        compression_params: dict[str, object] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        global_batch_size: int | None = None,
        mean_loss: bool = False,
        accumulate: int = 1,
        beside: Trainer | None = None,
        **options: object,
    ) -> None:
        chosen = SessionOptions.of(options, Trainer.__init__)
        require_integer("accumulate", accumulate, 1)
        if not (beside is None or isinstance(beside, Trainer)):
            raise TypeError(f"beside must be an lbbsp_mx.Trainer, got {beside!r}: pass the trainer")
        alone = trains_alone(kvstore) if beside is None else beside._alone
        needing = [*options, *(["accumulate"] if accumulate > 1 else [])]
        if beside is not None:
            beside._check_beside(global_batch_size, accumulate, options)
            global_batch_size, needing = beside._global_batch_size, []
        check_options(alone, compression_params, update_on_kvstore, global_batch_size, needing)
        stores = (gluon_store(kvstore), compression_params, update_on_kvstore)
        super().__init__(alone, as_created(params), optimizer, optimizer_params, *stores)
        self._gluon_order = gluon_order(params)
        self.kvstore = store_of(kvstore, alone) if beside is None else beside.kvstore
        self._store = TrainerStore(self.kvstore)
        self._global_batch_size = global_batch_size
        if global_batch_size is not None:
            refuse_inexact(self._params, mean_loss, accumulate)
        self.mean_loss = mean_loss
        self._rows = RowSums(self._store, self._params, len(self._contexts))
        self._sample_weights = sample_weights()
        self._now: StepSizes  # sizes of the running step
        self._weight: float | None = None  # of this worker's batch
        self._reduced_total = 0.0
        self._is_mean = False  # whether the gradients are divided already
        self._computed, self._summed = Fence(), Fence()  # two: each has room for one result
        if beside is None:
            self._begin_training(global_batch_size, accumulate, chosen, "granularity" in options)
        else:
            self._steps: Steps = StepsBeside(beside._steps)
            self._agreement = Agreement(self, self._session, beside._agreement)
        self._checkpoints = Checkpoints(self, self._session)
        if beside is None and global_batch_size is not None:
            # Peers wait for the message of the last barrier, which comes first; a slow file system
            # comes last.
            runtime().endings.add(
                self._session.flush,
                self._checkpoints.close,
                self._agreement.close,
                self._session.finish_barrier,
            )
        if alone:
            release_layers(self._params, len(self._contexts), mean_loss, accumulate)
        else:  # alone, gluon creates its store in the first step
            keep_whole(self._params)
            self._init_kvstore()
            # before the first sum of arrays of these shapes
            facts = {"mean_loss": int(mean_loss), "number of the trainer": self._agreement.number}
            handshake.compare(self._store, {**facts_of(self._params, self._optimizer), **facts})
            self._freshness = Freshness(self._store, self._session, self._params)
            self._synchronise()
        self._steps.join()
        self._agreement.join()

    def _begin_training(
        self, total: int | None, accumulate: int, options: SessionOptions, has_grain: bool
    ) -> None:
        """Creates the session in which this trainer's steps decide the plans, if there are any.

        Args:
            total: Global batch size, or None.
            accumulate: Loader batches per step.
            options: Options of the session.
            has_grain: Whether the user has given the granularity.
        """
        devices = len(self._contexts)
        if total is None:
            session = cast(PipelinedSession, Unplanned(self._store))
        else:
            options = options.for_workers(self._store.workers, total)
            if not has_grain:
                options = with_granularity(options, self._store, total, devices, accumulate)
            session = PipelinedSession(
                self._store,
                total,
                options,
                framework="mxnet",
                versions={"mxnet": mx.__version__},
                activity=runtime().activity,
                facts={"parameters": len(self._params), "accumulate": accumulate},
                parts=accumulate,
                devices=devices_of(self._contexts),
            )
            runtime().use_options(options)
        self._steps = Steps(session, Draws(accumulate, devices))
        self._agreement = Agreement(self, session)

    def _check_beside(
        self, global_batch_size: int | None, accumulate: int, options: dict[str, object]
    ) -> None:
        """Checks the options of a trainer that is to step beside this one.

        Raises:
            ValueError: They differ from those of this one; names the remedy.
        """
        self._steps.check_leads()
        if self._checkpoints.regular:
            raise ValueError(SEVERAL_CHECKPOINTS)
        for name, theirs, ours in (
            ("global_batch_size", global_batch_size, self._global_batch_size),
            ("accumulate", accumulate, self._draws.parts),
        ):
            if theirs not in (None, ours):
                raise ValueError(
                    f"{name} must be that of the trainer beside which this one steps, {ours}, got "
                    f"{theirs}: pass it to that trainer, since both step on the same batches"
                )
        if options:
            raise ValueError(
                f"a trainer beside another one takes no options of the plan, got "
                f"{', '.join(options)}: pass them to the other trainer, whose plan both follow"
            )

    @property
    def _session(self) -> PipelinedSession:
        return self._steps.session

    @property
    def _draws(self) -> Draws:
        return self._steps.draws

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

    def exclude_step(self) -> None:
        """Excludes the running step from learning, because it contains other work."""
        self._session.exclude_step()

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
        made = make_sampler(
            self._session, self._draws, data, seed, shuffle, sampler, beside, work=work
        )
        self._checkpoints.check_order()
        made.before_draw = self._before_draw
        return made

    def _before_draw(self) -> None:
        self._steps.begin_epoch()
        self._agreement.before_draw()

    @property
    def rows(self) -> slice:
        """Rows of the global batch that this worker has in every step, of a fixed plan.

        For training whose step continues the rows of the step before (truncated backpropagation
        through time): each worker slices its rows of every global batch, and needs no sampler.

        Raises:
            ValueError: The plan changes.
        """
        rows = fixed_rows(self._session)
        self._steps.has_rows = True
        return rows

    # Methods for training loops

    def step(
        self,
        batch_size: int,
        ignore_stale_grad: bool = False,
        weight: Weight = None,
    ) -> None:
        """Sums gradients over workers, updates by their mean, and decides the next plan.

        Args:
            batch_size: Samples in *this worker's* batch, on all of its devices together. With
                `accumulate`, those of one of its loader batches, or of all.
            ignore_stale_grad: Whether gradients that were not computed since the last step count as
                zero; a parameter is skipped if no worker has one. If false, they are refused.
            weight: Number of valid tokens, or sum of the sample weights, in this worker's batch.
                The update is then the sum of all workers' gradients divided by the sum of their
                weights, instead of the number of samples: let the loss be a sum over tokens. All
                workers must pass it in the same steps.

        Raises:
            ValueError: The batch size differs from that of the plan, the gradients of another
                number of loader batches were accumulated, or no worker has a positive weight.
            DisagreementError: Only some of the workers pass a weight.
        """
        if self._is_mean:
            raise ValueError(
                "step must not follow allreduce_grads, because it would sum and divide the "
                "gradients again: call update(batch_size) in its place, or step alone"
            )
        self._begin(batch_size, weight)
        step = self._session.step
        self._step(ignore_stale_grad)
        self._end_step(step)

    def _end_step(self, step: int) -> None:
        if not self._steps.is_beside:
            self._agreement.end_step(step)
            self._checkpoints.end_step(step)

    def _step(self, ignore_stale_grad: bool) -> None:
        if self._alone:
            self._step_alone(ignore_stale_grad)
            return
        if self._reads_sums or (ignore_stale_grad and self._freshness.is_partial):
            self._allreduce_grads()
            self._update_by_mean(ignore_stale_grad)
            return
        self._agreement.begin_step()
        waits = self._begin_sums()
        self._update_by_mean(ignore_stale_grad)  # queued by MXNet, after the sums
        self._steps.end(*waits)

    def allreduce_grads(self, weight: Weight = None, batch_size: int | None = None) -> None:
        """Leaves the *mean* gradient in all workers' parameters, and decides the next plan.

        It is the mean over the global batch, also with ``mean_loss=True``, so that clipping it, for
        example by `gluon.utils.clip_global_norm`, does what it does in one process with mean
        gradients. Call `update` afterwards.

        Only a single worker without `batch_sampler` or `rows`, whose batches are unknown, does as
        gluon does: the gradients of losses per sample stay sums, which `update` divides. With
        several devices it needs update_on_kvstore=False, as gluon's trainer.

        Args:
            weight: As for `step`; the gradient is then the weighted mean.
            batch_size: Samples in this worker's batch. Only a trainer `beside` another one needs
                it, because the plan does not tell on which batch it steps.

        Raises:
            ValueError: As for `step`.
        """
        self._begin(batch_size, weight)
        if self._alone:
            self._sum_alone()
        else:
            self._allreduce_grads()
        if self._now.is_planned or self.mean_loss or self._weight is not None:
            for gradient in self._gradients():
                gradient /= self._reduced_total
            self._is_mean = True

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Updates by the mean gradients that `allreduce_grads` has left, and the script changed.

        Args:
            batch_size: 1, the samples of this worker's batch, or those of the global batch. The
                effect is the same, because `allreduce_grads` has already divided the gradients.
            ignore_stale_grad: As for `mxnet.gluon.Trainer`.

        Raises:
            ValueError: `allreduce_grads` was not called before, or the batch size is another one.
        """
        if self._alone and not self._reduced_total and self._session.order is None:
            super().update(batch_size, ignore_stale_grad)  # sums nothing over one device
            return
        if not self._reduced_total:
            raise ValueError(
                "update must follow allreduce_grads: call allreduce_grads first, or call step"
            )
        one = self._now.divisor_of_means(batch_size)
        self._reduced_total, self._is_mean = one if self._is_mean else batch_size, False
        self._update_by_mean(ignore_stale_grad)
        self._end_step(self._session.step - 1)

    def __deepcopy__(self, memo: dict[int, object]) -> Trainer:
        """Returns itself: the parameters of a copied network refer to the trainer."""
        return self

    # Models that are equal on all workers

    def broadcast_parameters(self) -> None:
        """Sends the parameters of worker 0 to all workers, as after loading them on one worker.

        All workers must call it, between two steps. It is not needed before the first batch of
        `batch_sampler` is drawn: parameters that differ are then replaced by those of worker 0.
        The state of the optimizer does not change.
        """
        self._agreement.broadcast()

    def mean_over_workers(
        self, value: float | npt.ArrayLike | mx.nd.NDArray, weight: float = 1.0
    ) -> float | npt.NDArray[np.float64]:
        """Returns the weighted mean of a metric over workers, the same bits on all of them.

        All workers must call it, between two steps. Let a learning rate or an early stop follow
        this mean, not a worker's own metric, so that all workers decide alike.

        Args:
            value: A number of this worker, or an array with as many numbers on each worker.
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

        Files that gluon's own trainer has saved hold the optimizer only. Gluon numbers its states
        by the names of the parameters: create the network as in the process that has saved them.

        Raises:
            ValueError: The file is damaged, or of other data, another order, network or optimizer.
        """
        self._checkpoints.load_file(fname)

    # Methods that gluon's Trainer calls

    def _init_kvstore(self) -> None:
        if self._alone:
            super()._init_kvstore()
            return
        self._kvstore = self._store
        self._distributed = True
        self._update_on_kvstore = False
        self._kv_initialized = True

    def _row_sparse_pull(
        self, parameter: gluon.Parameter, out: Any, row_id: Any, full_idx: bool = False
    ) -> None:
        if self._alone:
            super()._row_sparse_pull(parameter, out, row_id, full_idx)
        else:
            copy_rows(parameter, out)

    def _allreduce_grads(self) -> None:
        if self._alone:
            super()._allreduce_grads()
            return
        self._agreement.begin_step()
        self._steps.end(*self._begin_sums(), self._weight, at_once=True)
        if self._weight is not None:
            self._reduced_total = total_weight(self._session.weights)
        elif self._steps.now is not None:
            self._now = self._steps.now
            self._reduced_total = float(self._now.total)
        self._rows.put_back()

    # Helpers

    @property
    def _reads_sums(self) -> bool:
        """True if the sums must be complete before the update is queued."""
        mixed = getattr(self, "_amp_loss_scaler", None) is not None
        needed = self._rows.is_needed or self._steps.is_beside  # whose total is known then
        return mixed or self._weight is not None or needed

    def _begin_sums(self) -> tuple[Wait, Wait]:
        """Queues the sums over workers; each gradient is sent as soon as it has been computed.

        Returns:
            A function that waits for the gradients, and one that waits for the sums.
        """
        self._freshness.tell()
        sums = {number: self._rows.arrays_of(number) for number in self._freshness.summed}
        dense = [each for arrays in sums.values() for each in arrays if each.stype == "default"]
        computed = self._computed.record(dense)
        self._reduce(sums)
        return computed, self._summed.record(dense)

    def _reduce(self, sums: dict[int, list[mx.nd.NDArray]]) -> None:
        """Queues the sums over devices and workers, in place, of arrays by parameter."""
        if self.mean_loss:
            local = self._now.local if self._weight is None else self._weight
            for number, arrays in sums.items():
                self._rows.weight(number, arrays, float(local))
        for number, arrays in sums.items():
            self._store.pushpull(self._rows.key(number), arrays, priority=-number)

    def _begin(self, batch_size: int | None, weight: Weight) -> None:
        """Begins a step or a sum, if it fits the plan and the batches that were drawn."""
        self._weight = checked_weight(weight)
        self._now = self._steps.begin(batch_size, self._params)
        if self.kvstore.num_workers > 1:
            self._sample_weights.warn_of_means(self._weight)
        self._reduced_total, self._is_mean = float(self._now.total), False
        self._checkpoints.begin_step()

    def _update_by_mean(self, ignore_stale_grad: bool) -> None:
        total, self._reduced_total = self._reduced_total, 0.0
        if self._alone:
            super().update(total, ignore_stale_grad)
            return
        self._check_and_rescale_grad(self._scale / total)
        if ignore_stale_grad:
            self._freshness.share()
        self._update(ignore_stale_grad)

    def _init_params(self) -> None:
        """Initialises parameters, and connects layers that normalise over all workers."""
        if self._alone:
            super()._init_params()
            return
        waiting = list(self._params_to_init)
        sparse = [param for param in waiting if is_sparse(param) and not param._deferred_init]
        self._params_to_init = [param for param in waiting if param not in sparse]
        super()._init_params()
        for param in sparse:
            exchange_whole(param, partial(self._broadcast, self._param2idx[param.name]))
        for param in waiting:
            if hasattr(param, "lbbsp_synchronised") and param not in self._params_to_init:
                options = (len(self._contexts), self.mean_loss, self._draws.parts)
                param.lbbsp_synchronised.connect(self._store, self._session, *options)
                self._steps.pauses = True

    def _broadcast(self, number: int, values: mx.nd.NDArray) -> None:
        self._store.broadcast(number, values, [values])

    def _synchronise(self) -> None:
        """Sends the parameters of worker 0 to all workers, now or once their shapes are known."""
        self._init_params()
        for param in self._params_to_init:
            param._finish_deferred_init = partial(self._finish, param, param._finish_deferred_init)

    def _finish(self, param: gluon.Parameter, finish: Callable[[], None]) -> None:
        deferred = bool(param._deferred_init)
        finish()
        if deferred:
            vars(param).pop("_finish_deferred_init", None)
            self._init_params()
