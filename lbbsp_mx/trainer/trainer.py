"""Gluon trainer for LB-BSP: `Trainer`."""

from __future__ import annotations

import mxnet as mx

from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.validate import require_integer
from lbbsp_mx.data.sampler import Draws
from lbbsp_mx.parameters import Parameters, as_created, facts_of, keep_whole
from lbbsp_mx.reliability.parts import TrainerParts
from lbbsp_mx.store.collectives import TrainerStore
from lbbsp_mx.trainer.checks import (
    Store,
    check_options,
    gluon_store,
    refuse_inexact,
    store_of,
    trains_alone,
)
from lbbsp_mx.trainer.control import TrainingControl
from lbbsp_mx.trainer.session import start_session
from lbbsp_mx.trainer.stages import Gradients, IdleDevices, learning, stages_of
from lbbsp_mx.trainer.steps import (
    Steps,
    Training,
    Weight,
    checked_weight,
    sample_weights,
    total_weight,
)
from lbbsp_mx.trainer.store_trainer import StoreTrainer


class Trainer(TrainingControl, StoreTrainer):
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
        leader, steps = beside and beside.training, None
        needing = [*options, *(["accumulate"] if accumulate > 1 else [])]
        if leader is not None:
            steps = leader.beside(global_batch_size, accumulate, options)
            global_batch_size, needing = leader.total, []
        alone = trains_alone(kvstore) if beside is None else beside._store.workers == 1
        check_options(alone, compression_params, update_on_kvstore, global_batch_size, needing)
        stores = (gluon_store(kvstore), compression_params, update_on_kvstore)
        super().__init__(as_created(params), optimizer, optimizer_params, *stores)
        self.kvstore = store_of(kvstore, alone) if beside is None else beside.kvstore
        self._store = TrainerStore(self.kvstore)
        if global_batch_size is not None:
            refuse_inexact(self._params, mean_loss, accumulate)
        self.mean_loss = mean_loss
        self._weight: float | None = None
        self._total = 0.0  # by which gradients are divided; 0 if none are summed
        self._is_mean = False  # whether the gradients are divided already
        parts = TrainerParts(self, self._store, mean_loss=mean_loss)
        if steps is None:
            session = start_session(
                parts,
                global_batch_size,
                chosen,
                parts=accumulate,
                has_grain="granularity" in options,
            )
            steps = Steps(session, Draws(accumulate, len(self._contexts)))
        self.training = Training(parts, steps, global_batch_size, leader)
        if leader is None and global_batch_size is not None:
            self.training.end_with_process()
        if not alone:
            self._join_workers()
        else:  # gluon creates its store in the first step
            if global_batch_size is not None and len(self._contexts) > 1:
                self._stages = [IdleDevices(self._params, lambda: self._update_on_kvstore)]
            self._connect(self._params)
        self.training.join()

    def _join_workers(self) -> None:
        """Compares this trainer with those of the other workers, and sends the parameters."""
        sample_weights()
        keep_whole(self._params)
        self._init_kvstore()
        # before the first sum of arrays of these shapes
        number = self.training.agreement.number
        facts = {"mean_loss": int(self.mean_loss), "number of the trainer": number}
        handshake.compare(self._store, {**facts_of(self._params, self._optimizer), **facts})
        self._stages = stages_of(
            self._store, self.training.session, self._params, mean_loss=self.mean_loss
        )
        self._synchronise()

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
        step = self.training.session.step
        if self._needs_sums(ignore_stale_grad):
            self._allreduce_grads()
            self._finish_sums()
            super().update(self._total, ignore_stale_grad)
        else:
            super().step(self._total, ignore_stale_grad)  # the update is queued after the sums
            self.training.steps.end(*self._waits, self._weight)
        self._total = 0.0
        self.training.end_step(step)

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
        if self._contains_sparse_weight and self._store.workers == 1:
            raise ValueError(
                "allreduce_grads needs dense parameters, because gluon updates sparse ones in its "
                "store: call step, or leave stype='row_sparse' out"
            )
        super().allreduce_grads()
        self._finish_sums()
        if self._now.is_planned or self.mean_loss or self._weight is not None:
            for number in learning(self._params):
                for gradient in self._params[number].list_grad():
                    gradient /= self._total
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
        if not self._total:
            if self._store.workers == 1 and self.training.session.order is None:
                super().update(batch_size, ignore_stale_grad)  # sums nothing over one device
                return
            raise ValueError(
                "update must follow allreduce_grads: call allreduce_grads first, or call step"
            )
        one = self._now.divisor_of_means(batch_size)
        total = one if self._is_mean else batch_size
        self._total, self._is_mean = 0.0, False
        super().update(total, ignore_stale_grad)
        self.training.end_step(self.training.session.step - 1)

    def __deepcopy__(self, memo: dict[int, object]) -> Trainer:
        """Returns itself: the parameters of a copied network refer to the trainer."""
        return self

    def _begin(self, batch_size: int | None, weight: Weight) -> None:
        """Begins a step or a sum, if it fits the plan and the batches that were drawn."""
        self._weight = checked_weight(weight)
        self._now = self.training.steps.begin(batch_size, self._params)
        self._total, self._is_mean = float(self._now.total), False
        if self._store.workers > 1:
            sample_weights().warn_of_means(self._weight)
        else:  # whose weight is the total, and whose mean is that of the whole batch
            if self._weight is not None:
                self._total = total_weight([self._weight])
            if self.mean_loss:
                self._total = 1.0
        self.training.begin_step()

    def _needs_sums(self, ignores_stale: bool) -> bool:
        """Returns whether the sums must be complete before the update is queued."""
        if self._store.workers == 1:
            return False
        is_mixed = getattr(self, "_amp_loss_scaler", None) is not None
        knows_total = self._weight is None and not self.training.steps.is_beside
        reads = any(stage.reads_sums(ignores_stale=ignores_stale) for stage in self._stages)
        return is_mixed or not knows_total or reads

    def _finish_sums(self) -> None:
        """Passes the barrier, and waits for the sums; several workers know their total then."""
        steps = self.training.steps
        steps.end(*self._waits, self._weight, at_once=True)
        self._now = steps.now
        if self._store.workers > 1:
            weights = self.training.session.weights
            self._total = float(self._now.total) if self._weight is None else total_weight(weights)
        for stage in reversed(self._stages):
            stage.after_sums(self._gradients)

    # What gluon calls in a step

    def _allreduce_grads(self) -> None:
        """Queues the sums; each gradient is sent as soon as it has been computed."""
        gradients = self._gradients = Gradients(self._params, self._now, self._weight)
        for stage in self._stages:
            stage.before_sums(gradients)
        measured = gradients.dense() if self.training.total else []
        computed = self._computed.record(measured)
        if self._store.workers == 1:
            super()._allreduce_grads()
        else:
            gradients.sum_over(self._store)
        self._waits = computed, self._summed.record(measured)

    def _update(self, ignore_stale_grad: bool = False) -> None:
        for stage in self._stages:
            stage.before_update(ignores_stale=ignore_stale_grad)
        super()._update(ignore_stale_grad)
        for stage in self._stages:
            stage.after_update()
