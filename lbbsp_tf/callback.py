"""Keras callback for LB-BSP: `LoadBalancer`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import keras
import tensorflow as tf

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.collectives import SingleWorker
from lbbsp_core.runtime.exit import fail_fast
from lbbsp_core.runtime.options import SessionOptions
from lbbsp_core.runtime.protocol import fingerprint
from lbbsp_core.runtime.session import WorkerSession
from lbbsp_core.validate import require_known
from lbbsp_tf import checks, compat
from lbbsp_tf.cluster import check_tf_config, rank_and_workers
from lbbsp_tf.collectives import MirroredCollectives
from lbbsp_tf.compat import Nest
from lbbsp_tf.dataset import PlannedPipeline, pack_arrays
from lbbsp_tf.proof import SAMPLES, Refusal, prove
from lbbsp_tf.step import BalancedStep
from lbbsp_tf.weighting import WAYS, Weighting

logger = logging.getLogger("lbbsp.tf")

Logs = dict[str, float] | None


class LoadBalancer(keras.callbacks.Callback):
    """Balances `model.fit` over unequal workers by LB-BSP, without changing what is learned.

    In every step, each worker's share of the constant global batch follows its predicted speed,
    so that all workers reach the gradient all-reduce together. Gradients are weighted by batch
    size, so that the update is that of plain BSP on the same samples (Chen et al., arXiv
    1806.02508).

    With a single worker (or without ``TF_CONFIG``) it is passive, so that the same script runs
    without a cluster.

    Args:
        strategy: The `tf.distribute.MultiWorkerMirroredStrategy` under which the model is built,
            with one replica per worker.
        global_batch_size: X, samples per step over all workers; constant.
        weight_by: What a worker's gradients are weighted by. ``"auto"`` proves, before a fit, that
            the loss is a mean (or a sum) over samples, and refuses other losses. ``"mask"`` weights
            losses under a mask, or divided by the sample weights, by their valid tokens.
            ``"samples"`` and ``"sum"`` treat the loss as a mean or a sum without a proof.
        **options: Options of `lbbsp_core.SessionOptions`, such as ``policy``, ``predictor``,
            ``cost``, ``limits`` and ``seed``.

    Raises:
        ValueError: No plan can satisfy the options, the strategy is unsuitable, or TF_CONFIG is
            wrong.

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
        self,
        strategy: tf.distribute.Strategy,
        global_batch_size: int,
        *,
        weight_by: str = "auto",
        **options: object,
    ) -> None:
        super().__init__()
        require_known("weight_by", weight_by, WAYS)
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
        self._weight_by = weight_by
        self._samples_in_step = 0
        self._in_fit = False
        if not self.active:
            logger.warning("LoadBalancer is passive, because there is only one worker")
            return
        compat.patch_keras()
        compat.checkpoint_on_chief_only(self.rank)
        fail_fast()
        with tf.device("/CPU:0"):
            self._share_of_sample = tf.Variable(0.0, trainable=False, dtype=tf.float32)

    @property
    def active(self) -> bool:
        """True if there is more than one worker."""
        return self.workers > 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Plan of the running step: samples by rank."""
        return self._session.sizes

    @property
    def steps_per_epoch(self) -> int:
        """Number of global steps per epoch of the latest data set; pass it to `fit`.

        Raises:
            RuntimeError: `dataset` was not called before.
        """
        if self._order is None:
            raise RuntimeError(
                "steps_per_epoch depends on the data set: call balancer.dataset(...) first"
            )
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
        """Creates the training data of `fit`: this worker's samples of each global step.

        Every worker must pass the *whole* data set, in the same order. Each step draws this
        worker's batch of the plan from a seeded order that is the same on all workers; each sample
        occurs exactly once per epoch, for any plans.

        Args:
            x: Array, or a nest (tuple, list, dict) of arrays, whose first axis is that of samples.
            y: Targets in the same form, or None.
            sample_weight: Array of shape ``(samples,)``, or None.
            seed: Seed of the order. Defaults to the balancer's.
            map: Function that augments or decodes one sample, called as ``map(x, y,
                sample_weight)`` without the arguments that are None.

        Returns:
            Data to pass to `fit` as `x`, with ``steps_per_epoch=balancer.steps_per_epoch``. Only
            `fit` can use it: evaluate on arrays or on a `tf.data.Dataset`.

        Raises:
            ValueError: Lengths differ, or the data set is smaller than one global batch.
        """
        self._in_fit = False  # a failed fit does not call on_train_end
        arrays = pack_arrays(x, y, sample_weight)
        order = self._session.make_order(len(keras.tree.flatten(arrays)[0]), seed)
        pipeline = PlannedPipeline(self._session, order, arrays, map)
        self._order = order
        if self.active:
            return pipeline.placeholders(self.strategy, on_iterate=self._use_pipeline)
        self._session.use_order(order)
        return pipeline.batches()

    # Hooks of Keras, in the order in which it calls them

    def on_train_begin(self, logs: Logs = None) -> None:
        """Checks the arguments of the fit, and starts the session with the handshake."""
        self._in_fit = False
        if not self.active and self._order is None:
            return  # a single worker with the user's own data
        if self.active:
            checks.check_model(self.model, self.strategy)
        # Under this strategy `fit` has already drawn a batch to build the model.
        if self._order is None or (self.active and self._pipeline is None):
            raise checks.not_fed_by_balancer()
        checks.check_steps(self.params.get("steps"), self.steps_per_epoch)
        if self.active:
            compat.create_global_seed(self.strategy)
            self._session.close()  # a failed fit does not close its session
            self._session.use_order(self._order)
            self._session.start({"epochs": self.params["epochs"]})
            self._run_after_history()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Excludes the first step of the epoch; in a new fit, moves to its first epoch."""
        if self._in_fit:
            self._session.exclude_step()
            return
        self._in_fit = True
        self._session.begin_epoch(epoch)
        if self.active:
            self._session.check_same("first epoch", epoch)
            self._replace_train_function()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the weight of a sample; restarts the timer if the step is excluded."""
        if self.active:
            samples = sum(self.sizes)
            if samples != self._samples_in_step:
                self._share_of_sample.assign(1.0 / samples)
                self._samples_in_step = samples
            self._session.begin_step()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Advances the session of a single worker, which has no exchange."""
        if not self.active and self._order is not None:
            self._session.skip_step()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Excludes the step after an evaluation inside `fit`."""
        self._session.exclude_step()

    def on_train_end(self, logs: Logs = None) -> None:
        """Ends the session, and restores the model and its history."""
        self._pipeline = None
        self._in_fit = False
        if self.active:
            self._session.close()
            self.model.train_function = None
            for hook in ("on_train_batch_end", "on_epoch_end"):
                vars(self.model.history).pop(hook, None)

    # Helpers

    def _use_pipeline(self, pipeline: PlannedPipeline) -> None:
        """Draws from `pipeline` from now on; called when `fit` iterates over its placeholders."""
        if self._in_fit and pipeline is not self._pipeline:
            raise ValueError(
                "validation_data must be arrays or a tf.data.Dataset: only the training step can "
                "draw from balancer.dataset(...)"
            )
        self._pipeline = pipeline
        self._order = pipeline.order

    def _replace_train_function(self) -> None:
        """Wraps the model's step for this fit; traces it again only if the model has changed."""
        self._samples_in_step = 0
        model = self.model
        config = getattr(model, "_compile_config", None)
        traced_for = (model, model.optimizer, config, self._pipeline)
        if self._traced_for is None or any(
            old is not new for old, new in zip(self._traced_for, traced_for, strict=True)
        ):
            step = BalancedStep(
                model,
                self._pipeline.next_batch,
                self._session,
                weighting=self._choose_weighting(),
                share_of_sample=self._share_of_sample,
            )
            with compat.replaced(model, "train_step", step):
                model.make_train_function(force=True)
            self._train_function, self._traced_for = model.train_function, traced_for
        model.train_function = self._train_function

    def _choose_weighting(self) -> Weighting:
        """Returns the weighting that the user has asked for, or else the one that is proven.

        Raises:
            ValueError: The loss cannot be weighted exactly; names it and the remedy.
        """
        chosen = Weighting.chosen(self._weight_by)
        if chosen is not None:
            return chosen
        found = prove(
            self.model,
            self.strategy,
            self._pipeline.first_samples(SAMPLES),
            by_tokens=self._weight_by == "mask",
        )
        refused = isinstance(found, Refusal)
        self._session.check_same("weighting of the loss", fingerprint(repr(found)))
        if refused:
            raise ValueError(
                f"{found.problem}, so unequal batches would not learn what one process learns: "
                f'{found.remedy}; or accept this with LoadBalancer(..., weight_by="samples")'
            )
        logger.debug("weighting of the loss: %s", found)
        return found

    def _run_after_history(self) -> None:
        """Handles requests to stop after all other callbacks, on all workers together (rule 11).

        Keras appends its History callback to the user's callbacks. Code that runs after History's
        hooks therefore sees every request to stop, and can delay it until it has been exchanged.
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
