"""The Keras callback: `LoadBalancer`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import keras
import tensorflow as tf

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.collectives import SingleWorker
from lbbsp_core.runtime.exit import fail_fast
from lbbsp_core.runtime.options import SessionOptions
from lbbsp_core.runtime.session import WorkerSession
from lbbsp_tf import checks, compat
from lbbsp_tf.cluster import check_tf_config, rank_and_workers
from lbbsp_tf.collectives import MirroredCollectives
from lbbsp_tf.dataset import Nest, PlannedPipeline, pack_arrays
from lbbsp_tf.step import BalancedStep

logger = logging.getLogger("lbbsp.tf")

Logs = dict[str, float] | None


class LoadBalancer(keras.callbacks.Callback):
    """Balances `model.fit` over unequal workers by LB-BSP, without changing what is learned.

    Each worker's part of the constant global batch follows its predicted speed, every step, so
    that all reach the gradient all-reduce together; gradients are weighted by batch size, which
    makes the update that of plain BSP on the same samples (Chen et al., arXiv 1806.02508).

    With one worker (or without ``TF_CONFIG``) it is passive: the same script runs anywhere.

    Args:
        strategy: The `tf.distribute.MultiWorkerMirroredStrategy` the model is built under, with
            one replica a worker.
        global_batch_size: X, samples a step over all workers; constant.
        **options: Those of `lbbsp_core.SessionOptions`, such as ``policy``, ``predictor``,
            ``cost``, ``limits`` and ``seed``.

    Raises:
        ValueError: Options that no plan can satisfy, an unsuitable strategy, a wrong TF_CONFIG.

    Example::

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        balancer = lbbsp_tf.LoadBalancer(strategy, global_batch_size=256)
        with strategy.scope():
            model = build()
            model.compile(...)
        model.fit(
            balancer.dataset(x, y, seed=0),
            steps_per_epoch=balancer.steps_per_epoch,
            epochs=5,
            callbacks=[balancer],
        )
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, global_batch_size: int, **options: object
    ) -> None:
        super().__init__()
        check_tf_config()
        self.strategy = strategy
        self.rank, self.workers = rank_and_workers(strategy.cluster_resolver)
        self._session = WorkerSession(
            MirroredCollectives(strategy, self.rank, self.workers)
            if self.active
            else SingleWorker(),
            global_batch_size,
            SessionOptions.of(options),
            framework="tensorflow",
            versions={"tensorflow": tf.__version__, "keras": keras.__version__},
        )
        checks.check_strategy(strategy, self.workers)
        self._order: GlobalOrder | None = None
        self._pipeline: PlannedPipeline | None = None
        self._train_function: Callable[..., object] | None = None
        self._traced_for: tuple[object, ...] | None = None
        self._weight_in_step = 0.0
        self._in_fit = False
        if not self.active:
            logger.warning("LoadBalancer is passive: there is one worker, nothing to balance")
            return
        compat.patch_keras()
        compat.checkpoint_on_chief_only(self.rank)
        fail_fast()
        with tf.device("/CPU:0"):
            self._loss_weight = tf.Variable(0.0, trainable=False, dtype=tf.float32)

    @property
    def active(self) -> bool:
        """True if there are peers to balance with."""
        return self.workers > 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Plan of the running step: samples by rank."""
        return self._session.sizes

    @property
    def steps_per_epoch(self) -> int:
        """Global steps that see every sample of the latest data set once; pass it to `fit`.

        Raises:
            RuntimeError: Before `dataset` was called.
        """
        if self._order is None:
            raise RuntimeError("steps_per_epoch is known once balancer.dataset(...) was called")
        return self._order.steps_per_epoch

    def dataset(
        self,
        x: Nest,
        y: Nest = None,
        sample_weight: Nest = None,
        *,
        seed: int | None = None,
        map: Callable[..., Nest] | None = None,
    ) -> tf.data.Dataset | tf.distribute.DistributedDataset:
        """Makes the training data of `fit`: this worker's samples of each global step.

        Every worker passes the *whole* data set, in the same order. Each step draws as many
        samples as the plan says, from a seeded order that is the same on every worker: over an
        epoch each sample comes exactly once, whatever the plans.

        Args:
            x: Array, or a nest (tuple, list, dict) of arrays, first axis samples.
            y: The same, or None.
            sample_weight: Array of shape ``(samples,)``, or None.
            seed: Seed of the order. Defaults to the balancer's.
            map: Applied to each sample's tensors, as ``map(x, y, sample_weight)`` with what was
                given, to augment or decode it.

        Returns:
            What to pass to `fit` as `x`, with ``steps_per_epoch=balancer.steps_per_epoch``. It is
            for `fit` alone: evaluate on arrays or on a `tf.data.Dataset`.

        Raises:
            ValueError: Lengths that differ, or fewer samples than one global batch.
        """
        self._in_fit = False  # a fit that failed did not report its end
        arrays = pack_arrays(x, y, sample_weight)
        order = self._session.make_order(len(keras.tree.flatten(arrays)[0]), seed)
        pipeline = PlannedPipeline(self._session, order, arrays, map)
        self._order = order
        if self.active:
            return pipeline.placeholders(self.strategy, on_iterate=self._use_pipeline)
        self._session.use_order(order)
        return pipeline.batches()

    # The hooks of Keras, in the order in which it calls them.

    def on_train_begin(self, logs: Logs = None) -> None:
        """Checks the fit, and that all workers agree on what never changes."""
        self._in_fit = False
        if not self.active and self._order is None:
            return  # one worker, the user's own data: nothing of ours takes part
        if self.active:
            checks.check_model(self.model, self.strategy)
        # Under this strategy `fit` draws one batch to build the model before it begins.
        if self._order is None or (self.active and self._pipeline is None):
            raise checks.not_fed_by_balancer()
        checks.check_steps(self.params.get("steps"), self.steps_per_epoch)
        if self.active:
            self._session.close()  # a fit that failed did not end its session
            self._session.use_order(self._order)
            self._session.start({"epochs": self.params["epochs"]})
            self._run_after_history()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Excludes the first step of an epoch; moves to the fit's first epoch."""
        if self._in_fit:
            self._session.exclude_step()
            return
        self._in_fit = True
        self._session.begin_epoch(epoch)
        if self.active:
            self._session.check_same("first epoch", epoch)
            self._replace_train_function()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the weight of the step's losses; restarts the clock of an excluded step."""
        if self.active:
            weight = self.workers / sum(self.sizes)
            if weight != self._weight_in_step:
                self._loss_weight.assign(weight)
                self._weight_in_step = weight
            self._session.begin_step()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Advances one worker alone, which has no exchange to advance by."""
        if not self.active and self._order is not None:
            self._session.skip_step()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Excludes the step after an evaluation inside `fit`."""
        self._session.exclude_step()

    def on_train_end(self, logs: Logs = None) -> None:
        """Leaves the model and its history as they were."""
        self._pipeline = None
        self._in_fit = False
        if self.active:
            self._session.close()
            self.model.train_function = None
            for hook in ("on_train_batch_end", "on_epoch_end"):
                vars(self.model.history).pop(hook, None)

    # Parts of the hooks.

    def _use_pipeline(self, pipeline: PlannedPipeline) -> None:
        """Draws from `pipeline` from now on: `fit` iterates its placeholders."""
        if self._in_fit and pipeline is not self._pipeline:
            raise ValueError(
                "validation_data must be arrays or a tf.data.Dataset: balancer.dataset(...) is "
                "drawn by the training step alone"
            )
        self._pipeline = pipeline
        self._order = pipeline.order

    def _replace_train_function(self) -> None:
        """Wraps the model's step for this fit; it is traced again only if something changed."""
        self._weight_in_step = 0.0
        model = self.model
        config = getattr(model, "_compile_config", None)
        traced_for = (model, model.optimizer, config, self._pipeline)
        if self._traced_for is None or any(
            old is not new for old, new in zip(self._traced_for, traced_for, strict=True)
        ):
            step = BalancedStep(
                model, self._pipeline.next_batch, self._session, loss_weight=self._loss_weight
            )
            with compat.replaced(model, "train_step", step):
                model.make_train_function(force=True)
            self._train_function, self._traced_for = model.train_function, traced_for
        model.train_function = self._train_function

    def _run_after_history(self) -> None:
        """Lets this callback decide after all others whether to stop (rule 11).

        Keras appends its History behind the user's callbacks, so what runs after History's own
        hooks sees every request to stop, and can hold it back until all workers know of it.
        """
        model, history, session = self.model, self.model.history, self._session

        def last_at_batch_end(batch: int, logs: Logs = None) -> None:
            type(history).on_train_batch_end(history, batch, logs)
            if model.stop_training:
                session.request_stop()
            model.stop_training = session.stopping

        def last_at_epoch_end(epoch: int, logs: Logs = None) -> None:
            type(history).on_epoch_end(history, epoch, logs)
            model.stop_training = session.any_worker(model.stop_training or session.stop_requested)

        history.on_train_batch_end = last_at_batch_end
        history.on_epoch_end = last_at_epoch_end
