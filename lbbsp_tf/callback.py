"""The Keras callback: `LoadBalancer`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import lbbsp_core
from lbbsp_core import Balancer, BusyTimer, Limits, ResourceSampler, RunRecord
from lbbsp_core.cost import Cost
from lbbsp_core.policy import Policy
from lbbsp_core.predict import Predictor
from lbbsp_core.runtime import handshake
from lbbsp_core.runtime.env import run_dir
from lbbsp_core.runtime.exit import fail_fast
from lbbsp_core.runtime.protocol import Row, compare_facts, decode, encode
from lbbsp_tf import compat
from lbbsp_tf.cluster import check_tf_config, cluster_size, rank_and_workers
from lbbsp_tf.collectives import IntegerGather
from lbbsp_tf.dataset import PlannedPipeline, pack_arrays
from lbbsp_tf.step import BalancedStep, sums_over_samples

logger = logging.getLogger("lbbsp")


class LoadBalancer(keras.callbacks.Callback):
    """Balances `model.fit` over unequal workers by LB-BSP, without changing what is learned.

    Each worker's share of the constant global batch follows its predicted speed, every step, so
    that all reach the gradient all-reduce together; gradients are weighted by batch size, which
    makes the update that of plain BSP on the same samples (Chen et al., arXiv 1806.02508).

    With one worker (or without ``TF_CONFIG``) it is passive: the same script runs anywhere.

    Args:
        strategy: The `tf.distribute.MultiWorkerMirroredStrategy` the model is built under, with
            one replica a worker.
        global_batch_size: X, samples a step over all workers; constant.
        policy: Decides batch sizes. Defaults to `LoadBalanced(min_gain, interval)`.
        predictor: Forecasts this worker's speed. Defaults to `Mixture()`, which measured best.
        cost: Shape of this worker's batch-time curve. Defaults to `Proportional()`.
        limits: Bounds on a worker's batch, one for all or one each. Defaults to `Limits(1)`.
        granularity: Batch sizes are multiples of it (8 suits GPUs, and XLA).
        interval: Decide every so many steps. Defaults to 1.
        min_gain: Least predicted gain for a new plan. Defaults to 0.02; 0 is the paper's mode.
        record: File for the run record, written by rank 0. Defaults to none, or to
            ``RUN_DIR/run.jsonl`` under ``lbbsp launch --run-dir``.
        seed: Seed of the sample order where the data set is given none.
        drivers: Names of the driving factors that the predictor is told of, see
            `lbbsp_core.ResourceSampler`; none for ``()``. Defaults to those that measured best.

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
        self,
        strategy: tf.distribute.Strategy,
        global_batch_size: int,
        *,
        policy: Policy | None = None,
        predictor: Predictor | None = None,
        cost: Cost | None = None,
        limits: Limits | Sequence[Limits] | None = None,
        granularity: int = 1,
        interval: int | None = None,
        min_gain: float | None = None,
        record: str | Path | None = None,
        seed: int = 0,
        drivers: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_tf_config()
        self.strategy = strategy
        self.rank, self.workers = rank_and_workers(strategy.cluster_resolver)
        self.seed = seed
        self._record_path = Path(record) if record else run_dir()
        self._balancer = Balancer(
            rank=self.rank,
            workers=self.workers,
            global_batch_size=global_batch_size,
            policy=handshake.choose_policy(policy, interval, min_gain),
            predictor=predictor,
            cost=cost,
            limits=limits,
            granularity=granularity,
            lag=1,  # nothing is drawn ahead: the paper's own mode
        )
        self._driver_names = drivers if self._balancer.policy.uses_costs else ()
        self._sampler = ResourceSampler(())
        self._order: lbbsp_core.GlobalOrder | None = None
        self._feed: PlannedPipeline | None = None
        self._fitting = _Fitting()
        self._record: RunRecord | None = None
        self._timer = BusyTimer()
        self._train_function: Any = None
        self._built_for: tuple[Any, ...] = ()
        if self.active:
            self._check_strategy()
            compat.patch_keras()
            compat.checkpoint_on_chief_only(self.rank)
            fail_fast()
            self._gather = IntegerGather(strategy, self.rank, self.workers)
            with tf.device("/CPU:0"):
                self._share = tf.Variable(0.0, trainable=False, dtype=tf.float32)
        elif cluster_size() > 1:
            raise ValueError(
                f"TF_CONFIG names {cluster_size()} workers, but {type(strategy).__name__} trains "
                "on this one alone: pass the tf.distribute.MultiWorkerMirroredStrategy"
            )
        else:
            logger.warning("LoadBalancer is passive: there is one worker, nothing to balance")

    @property
    def active(self) -> bool:
        """Whether there are peers to balance with."""
        return self.workers > 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The plan of the running step: samples by rank."""
        return self._balancer.sizes(self._balancer.step)

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
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        seed: int | None = None,
        map: Callable[..., Any] | None = None,
    ) -> Any:
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
        self._fitting.begun = False  # a fit that failed never told of its end
        arrays = pack_arrays(x, y, sample_weight)
        samples = len(keras.tree.flatten(arrays)[0])
        order = self._balancer.order(samples, self.seed if seed is None else seed)
        feed = PlannedPipeline(self._balancer, order, arrays, map)
        self._order = order
        if self.active:
            return feed.tokens(self.strategy, on_iterate=self._fed_by)
        self._balancer.use_order(order)
        return feed.pipeline()

    # What Keras calls, in the order in which it does.

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the fit, and that all workers agree on what never changes."""
        self._check_fit()
        self._fitting = _Fitting()
        if not self.active:
            return
        self._balancer.use_order(self._order)
        more = {"epochs": self.params["epochs"]}
        handshake.agree(self._balancer, self._order, self._gather, more)
        self._sampler = ResourceSampler(self._driver_names)  # it watches the cores in use now
        if self.rank == 0 and self._record_path and self._record is None:
            self._record = handshake.open_record(self._record_path, self._header())
            self._balancer.record_to(self._record)
        self._speak_last()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The fit's first epoch: moves to it. The first step of any is not like the others."""
        if not self._fitting.begun:
            self._fitting.begun = True
            self._begin_at(epoch)
        self._fitting.hold = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the step's share, and the clock if what came before does not count."""
        if not self.active:
            return
        share = self.workers / sum(self.sizes)
        if share != self._fitting.share:
            self._share.assign(share)
            self._fitting.share = share
        if self._fitting.hold:
            self._sampler.sample()  # what drove the evaluation is not what drives a step
            self._timer.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One worker alone has no exchange to advance by."""
        if not self.active and self._order is not None:
            self._balancer.skip_to(self._balancer.step + 1)

    def on_test_begin(self, logs: Any = None) -> None:
        """Evaluation inside `fit`: the next step is not like the others."""
        self._fitting.hold = True

    def on_train_end(self, logs: Any = None) -> None:
        """Leaves the model and its history as they were."""
        self._feed = None
        self._fitting = _Fitting()
        if self.active:
            self._sampler.close()
            self.model.train_function = None
            for hook in ("on_train_batch_end", "on_epoch_end"):
                vars(self.model.history).pop(hook, None)

    # The barrier of a step: called from inside it, around the all-reduce.

    def reach(self) -> Row:
        """Measure and predict: this worker's message, shape ``(WIDTH,)`` float32."""
        busy_seconds = self._timer.reach()
        message = self._balancer.report(
            busy_seconds,
            excluded=self._fitting.hold,
            stop=self._fitting.wants_stop,
            drivers=self._sampler.sample(),
        )
        self._fitting.hold = False
        return encode(message)

    def leave(self, rows: Row) -> None:
        """Allocate: from all messages to the next plan."""
        wall_seconds = self._timer.leave()
        self._balancer.receive([decode(row) for row in rows], wall_seconds)

    def pause(self) -> None:
        """Another collective of the step begins."""
        self._timer.pause()

    def resume(self) -> None:
        """That collective has ended."""
        self._timer.resume()

    # Stopping together (rule 11).

    def _speak_last(self) -> None:
        """Lets this callback decide after all others whether to stop.

        Keras appends its History behind the user's callbacks, so what runs after History's own
        hooks sees every wish to stop, and can hold it back until all workers know of it.
        """
        history = self.model.history

        def last_at_batch_end(batch: int, logs: Any = None) -> None:
            type(history).on_train_batch_end(history, batch, logs)
            self._stop_with_the_others()

        def last_at_epoch_end(epoch: int, logs: Any = None) -> None:
            type(history).on_epoch_end(history, epoch, logs)
            wish = self.model.stop_training or self._fitting.wants_stop
            self.model.stop_training = self._anybody(wish)

        history.on_train_batch_end = last_at_batch_end
        history.on_epoch_end = last_at_epoch_end

    def _stop_with_the_others(self) -> None:
        """A wish to stop rides on the next exchange; all stop when all have heard of it."""
        self._fitting.wants_stop = bool(self.model.stop_training)
        self.model.stop_training = self._balancer.stopping

    def _anybody(self, flag: bool) -> bool:
        return any(row[0] for row in self._gather([int(flag)]))

    # Parts of the above.

    def _fed_by(self, feed: PlannedPipeline) -> None:
        if self._fitting.begun and feed is not self._feed:
            raise ValueError(
                "validation_data must be arrays or a tf.data.Dataset: balancer.dataset(...) is "
                "drawn by the training step alone"
            )
        self._feed = feed
        self._order = feed.order

    def _begin_at(self, epoch: int) -> None:
        """Moves to the fit's first epoch and takes its place in the step."""
        self._balancer.begin_epoch(epoch)
        if not self.active:
            return
        compare_facts(["first epoch"], self._gather([epoch]))
        model = self.model
        built_for = (model, model.optimizer, getattr(model, "_compile_config", None), self._feed)
        if not _same(built_for, self._built_for):
            self._train_function, self._built_for = self._make_train_function(), built_for
        model.train_function = self._train_function

    def _make_train_function(self) -> Any:
        model = self.model
        step = BalancedStep(
            model,
            self._feed.next_batch,
            rank=self.rank,
            workers=self.workers,
            share=self._share,
            barrier=self,
            on_trace=self._excluded,
        )
        with compat.replaced(model, "train_step", step):
            model.make_train_function(force=True)
        return model.train_function

    def _excluded(self) -> None:
        self._fitting.hold = True

    def _header(self) -> dict[str, Any]:
        versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
        drivers = self._sampler.names
        return handshake.header(self._balancer, self._order, "tensorflow", versions, drivers)

    def _check_strategy(self) -> None:
        replicas = self.strategy.num_replicas_in_sync
        if not isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise ValueError(
                "strategy must be a tf.distribute.MultiWorkerMirroredStrategy, got "
                f"{type(self.strategy).__name__}"
            )
        if replicas != self.workers:
            raise ValueError(
                f"LoadBalancer needs one replica a worker, got {replicas} replicas on "
                f"{self.workers} workers: start one worker for each GPU, with CUDA_VISIBLE_DEVICES"
            )

    def _check_fit(self) -> None:
        if self._order is None and not self.active:
            return  # one worker, the user's own data: nothing of ours takes part
        if self.active:
            self._check_model()
        # Under this strategy `fit` draws one batch to build the model before it begins.
        if self._order is None or (self.active and self._feed is None):
            raise ValueError(
                "fit must be fed by the balancer: fit(balancer.dataset(x, y), "
                "steps_per_epoch=balancer.steps_per_epoch, callbacks=[balancer]), without "
                "batch_size and validation_split (use validation_data)"
            )
        if self.params.get("steps") != self.steps_per_epoch:
            raise ValueError(
                f"steps_per_epoch must be balancer.steps_per_epoch = {self.steps_per_epoch}, got "
                f"{self.params.get('steps')}: pass fit(..., "
                "steps_per_epoch=balancer.steps_per_epoch)"
            )

    def _check_model(self) -> None:
        model = self.model
        if model.distribute_strategy is not self.strategy:
            raise ValueError("build and compile the model inside `with strategy.scope():`")
        if model.steps_per_execution != 1:
            raise ValueError(
                f"steps_per_execution must be 1, got {model.steps_per_execution}: Keras 3 does "
                "not run several steps at once under this strategy"
            )
        if model.jit_compile:
            raise ValueError(
                "jit_compile must be False, got True: XLA compiles no collective across workers"
            )
        if getattr(model.optimizer, "gradient_accumulation_steps", None):
            raise ValueError(
                "gradient_accumulation_steps must be None: Keras 3 cannot accumulate under this "
                "strategy; use a larger global_batch_size"
            )
        for problem in _inexact(model):
            logger.warning("%s", problem)


class _Fitting:
    """What changes during one `fit`."""

    def __init__(self) -> None:
        self.begun = False
        self.hold = True
        self.wants_stop = False
        self.share = 0.0


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _inexact(model: keras.Model) -> Iterator[str]:
    """What makes uneven batches differ from one whole batch in this model, and the cure."""
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    reductions = {getattr(loss, "reduction", "sum_over_batch_size") for loss in losses}
    if "mean_with_sample_weight" in reductions:
        yield (
            "a loss with reduction='mean_with_sample_weight' is not a mean over samples, so "
            "uneven batches weigh it inexactly: use reduction='sum_over_batch_size'"
        )
    if "sum" in reductions and not sums_over_samples(model):
        yield "losses reduced by sum and by mean in one model are weighted as means: use one kind"
    layers = list(model._flatten_layers(include_self=False, recursive=True))
    if any(_plain_batch_norm(layer) for layer in layers):
        yield (
            "BatchNormalization normalises each worker's batch by itself, which depends on how "
            "the batch is split: use BatchNormalization(synchronized=True)"
        )
    if any(getattr(layer, "mask_zero", False) for layer in layers):
        yield (
            "a masked loss is a mean over tokens, not over samples, so uneven batches weigh it "
            "inexactly where the mask reaches the loss: use sample_weight with "
            "reduction='sum_over_batch_size' instead"
        )


def _plain_batch_norm(layer: keras.layers.Layer) -> bool:
    return (
        isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        and not layer.synchronized
    )
