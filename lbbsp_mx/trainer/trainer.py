"""Gluon trainer for LB-BSP: `Trainer`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import mxnet as mx

from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.options.options import Options, SessionOptions
from lbbsp_core.validate import require_flag, require_integer
from lbbsp_mx.data.sampler import Draws
from lbbsp_mx.fence import PartFences
from lbbsp_mx.parameters import (
    Arrays,
    Parameters,
    allow_dense_reads,
    as_created,
    facts_of,
    learning,
)
from lbbsp_mx.reliability.agreement import Agreement
from lbbsp_mx.reliability.checkpoint import Checkpoints
from lbbsp_mx.store.native import runtime
from lbbsp_mx.store.trainer_store import TrainerStore
from lbbsp_mx.trainer.by_hand import ChangedByHand
from lbbsp_mx.trainer.control import TrainingControl
from lbbsp_mx.trainer.peers import with_peers
from lbbsp_mx.trainer.session import (
    Store,
    check_options,
    gluon_store,
    refuse_inexact,
    start_session,
    store_of,
    trains_alone,
)
from lbbsp_mx.trainer.stages import Gradients, GradientStage, IdleDevices, stages_of
from lbbsp_mx.trainer.steps import SampleWeights, Steps, StepsBeside, Weight, total_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Trainer(TrainingControl):
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
        **options: Unpack[Options],
    ) -> None:
        chosen = SessionOptions.of(options, Trainer.__init__)
        require_integer("accumulate", accumulate, 1)
        require_flag("mean_loss", mean_loss)
        if not (beside is None or isinstance(beside, Trainer)):
            raise TypeError(f"beside must be an lbbsp_mx.Trainer, got {beside!r}: pass the trainer")
        needing = [*options, *(["accumulate"] if accumulate > 1 else [])]
        if beside is not None:
            beside._check_beside(global_batch_size, accumulate, options)
            global_batch_size, needing = beside._global_batch_size, []
        alone = trains_alone(kvstore) if beside is None else beside._store.workers == 1
        own_store = (compression_params, update_on_kvstore)
        check_options(alone, *own_store, global_batch_size, needing)
        self._stages: list[GradientStage] = []
        self._fences = PartFences()
        stores = (gluon_store(kvstore), *own_store)
        super().__init__(as_created(params), optimizer, optimizer_params, *stores)
        self.kvstore = store_of(kvstore, alone) if beside is None else beside.kvstore
        self._store = TrainerStore(self.kvstore)
        if global_batch_size is not None:
            refuse_inexact(self._params, mean_loss, accumulate)
        self.mean_loss, self._global_batch_size = mean_loss, global_batch_size
        self._total = 0.0  # by which gradients are divided; 0 if none are summed
        self._is_mean = False  # whether the gradients are divided already
        self._clipped: Arrays = []  # parameters whose gradients were summed early, for clipping
        if beside is None:
            session = start_session(self, global_batch_size, chosen, accumulate)
            self._steps = Steps(session, Draws(accumulate, len(self._contexts)))
        else:
            self._steps = StepsBeside(beside._steps)
        self._session = session = self._steps.session
        self._agreement = Agreement(self, beside and beside._agreement)
        self._checkpoints = Checkpoints(self)
        if beside is None and global_batch_size is not None:
            # Peers wait for the message of the last barrier, which comes first; a slow file system
            # comes last.
            closing = (self._checkpoints.schedule.close, self._agreement.close)
            runtime().endings.add(session.close, *closing, session.finish_barrier)
        if not alone:
            self._join_workers()
        else:  # gluon creates its store in the first step
            if global_batch_size is not None and len(self._contexts) > 1:
                self._stages = [IdleDevices(lambda: self._update_on_kvstore)]
            self._connect(self._params)
        if beside is not None:  # for good, now that this trainer is complete
            beside._steps.pauses, beside._steps.others = True, beside._steps.others + 1
        self._agreement.join()

    def _join_workers(self) -> None:
        """Compares this trainer with those of the other workers, and sends the parameters."""
        SampleWeights.of_process()
        with_peers()[id(self)] = self
        if not self._steps.is_beside:
            self._fences.timer = self._session.meter.overlap
        allow_dense_reads(self._params)
        self._init_kvstore()
        # before the first sum of arrays of these shapes
        facts = {"mean_loss": int(self.mean_loss), "number of the trainer": self._agreement.number}
        handshake.compare(self._store, {**facts_of(self._params, self._optimizer), **facts})
        by_hand = ChangedByHand(self._params)
        stages = stages_of(self._store, self._session, self._params, self.mean_loss)
        self._stages = [by_hand, *stages]
        self._init_params()
        for param in self._params_to_init:  # once their shapes are known
            param._finish_deferred_init = partial(self._finish, param, param._finish_deferred_init)

    def step(self, batch_size: int, ignore_stale_grad: bool = False, weight: Weight = None) -> None:
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
        if not self._take_clipped(batch_size, weight):
            self._begin(batch_size, weight)
            step = self._session.step
            if not self._needs_sums(ignore_stale_grad):
                super().step(self._total, ignore_stale_grad)  # the update is queued after the sums
                self._steps.end(*self._waits)
                self._total = 0.0
                self._end_step(step)
                return
            self._sum()
        self._update_by(self._total, ignore_stale_grad)

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
        if not self._take_clipped(batch_size, weight):
            self._begin(batch_size, weight)
            self._sum()
        if self._steps.now.is_planned or self.mean_loss or self._steps.weight is not None:
            self._divide()
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
        if self._clipped or not self._total:
            if self._store.workers == 1 and self._session.order is None:
                super().update(batch_size, ignore_stale_grad)  # sums nothing over one device
                return
            raise ValueError(
                "update must follow allreduce_grads: call allreduce_grads first, or call step"
            )
        self._steps.now.check_of_means(batch_size)
        self._update_by(1 if self._is_mean else batch_size, ignore_stale_grad)

    def _update_by(self, total: float, ignore_stale_grad: bool) -> None:
        """Ends a step whose sums are complete, which are divided by `total`."""
        self._total, self._is_mean = 0.0, False
        super().update(total, ignore_stale_grad)
        self._end_step(self._session.step - 1)

    def sum_for_clipping(self, arrays: Iterable[mx.nd.NDArray]) -> None:
        """Sums the gradients over workers, if any of `arrays` is one that a batch has computed.

        Clipping by their global norm then does what it does in one process.
        """
        params = [self._params[number] for number in learning(self._params)]
        fresh = [array for param in params for array in param._data or () if array._fresh_grad]
        own_ids = {id(gradient) for param in params for gradient in param._grad or ()}
        if not fresh or self._is_mean or own_ids.isdisjoint(map(id, arrays)):
            return
        if self._steps.is_beside:
            raise ValueError(
                "clip_global_norm would clip by the gradients of this worker alone: call "
                "allreduce_grads(batch_size=...) before, and update(batch_size) afterwards"
            )
        self._begin(None, None)
        self._sum()
        if self.mean_loss:
            self._divide()
            self._total = 1.0
        self._clipped = fresh
        for array in fresh:  # so that those of another batch can be told from them
            array._fresh_grad = False

    def _take_clipped(self, batch_size: int | None, weight: Weight) -> bool:
        """Returns whether the gradients of this batch were summed by `sum_for_clipping`.

        The sums are forgotten only when a step takes them, so that a step that is refused can be
        called again.
        """
        params = (self._params[number] for number in learning(self._params))
        if any(array._fresh_grad for param in params for array in param._data or ()):
            self._clipped = []
        if not self._clipped:
            return False
        if weight is not None:
            raise ValueError(
                "clip_global_norm must not precede a sum with a weight: call "
                "allreduce_grads(weight=...), clip the mean gradients, and call update(batch_size)"
            )
        if batch_size is not None:
            self._steps.now.check(batch_size)
        for array in self._clipped:
            array._fresh_grad = True
        self._clipped = []
        return True

    def _sum(self) -> None:
        """Passes the barrier of a step that has begun, and waits for the sums of its gradients."""
        if self._contains_sparse_weight and self._store.workers == 1:
            raise ValueError(
                "allreduce_grads needs dense parameters, because gluon updates sparse ones in its "
                "store: call step, or leave stype='row_sparse' out"
            )
        super().allreduce_grads()
        self._steps.end(*self._waits, at_once=True)
        if self._store.workers > 1:  # which know their total now
            weights, now = self._session.weights, self._steps.now
            self._total = float(now.total) if weights is None else total_weight(weights)
        for stage in reversed(self._stages):
            stage.after_sums(self._gradients)

    def _divide(self) -> None:
        for number in learning(self._params):
            for gradient in self._params[number].list_grad():
                gradient /= self._total

    def _begin(self, batch_size: int | None, weight: Weight) -> None:
        """Begins a step or a sum, if it fits the plan and the batches that were drawn."""
        self._steps.take_weight(weight)
        self._steps.begin(batch_size, self._params)
        self._total, self._is_mean = float(self._steps.now.total), False
        if self._store.workers == 1:  # its weight is the total, its mean that of the whole batch
            if self._steps.weight is not None:
                self._total = total_weight([self._steps.weight])
            if self.mean_loss:
                self._total = 1.0
        self._checkpoints.schedule.begin_step()
        self._agreement.begin_step()

    def _needs_sums(self, ignores_stale: bool) -> bool:
        """Returns whether the sums must be complete before the update is queued."""
        learns_total = self._steps.weight is not None or self._steps.is_beside
        reads = any(stage.reads_sums(ignores_stale=ignores_stale) for stage in self._stages)
        return self._store.workers > 1 and (self._loss_scaler is not None or learns_total or reads)

    # What gluon calls in a step

    def _allreduce_grads(self) -> None:
        """Queues the sums; each gradient is sent as soon as it has been computed."""
        gradients = self._gradients = Gradients(self._params, self._steps.now, self._steps.weight)
        for stage in self._stages:
            stage.before_sums(gradients)
        alone = self._store.workers == 1
        send = super()._allreduce_grads if alone else partial(gradients.sum_over, self._store)
        self._waits = self._fences.record(gradients.arrays if self._global_batch_size else {}, send)

    def _update(self, ignore_stale_grad: bool = False) -> None:
        for stage in self._stages:
            stage.before_update(ignores_stale=ignore_stale_grad)
        super()._update(ignore_stale_grad)
        for stage in self._stages:
            stage.after_update()
