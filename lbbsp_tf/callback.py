"""Keras callback for LB-BSP: `LoadBalancer`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy.typing as npt
import tensorflow as tf

from lbbsp_core.runtime.loop.checkpoint_schedule import Every, require_every
from lbbsp_core.runtime.options.options import Options, SessionOptions
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_core.runtime.reliability.exit import fail_fast
from lbbsp_core.runtime.reliability.preemption import end_with_peers
from lbbsp_core.validate import require_flag
from lbbsp_tf import compat
from lbbsp_tf.activity import current_activity
from lbbsp_tf.cluster import addresses, check_devices, check_tf_config, rank_and_workers
from lbbsp_tf.compat import Nest
from lbbsp_tf.data.dataset import PlaceholderDataset
from lbbsp_tf.data.options import InputOptions
from lbbsp_tf.devices import devices_of
from lbbsp_tf.exactness import agreement, checks
from lbbsp_tf.exactness.effects import kinds_of_evaluated
from lbbsp_tf.exchange.collectives import LocalReplicas, ReplicaSessions, mirrored_collectives
from lbbsp_tf.fit import BalancedFit
from lbbsp_tf.loop import BalancedLoop
from lbbsp_tf.reliability.board import Meetings
from lbbsp_tf.reliability.checkpoints import Checkpoints
from lbbsp_tf.reliability.leaving import leave_together
from lbbsp_tf.reliability.liveness import start_heartbeat
from lbbsp_tf.training import Training

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("lbbsp.tf")


class LoadBalancer(BalancedFit):
    """Balances `model.fit` over unequal workers by LB-BSP, without changing what is learned.

    In every step, each worker's share of the constant global batch follows its predicted speed,
    so that all workers reach the gradient all-reduce together. Gradients are weighted by batch
    size, so that the update is that of plain BSP on the same samples (Chen et al., arXiv
    1806.02508).

    The unit that gets a batch size is the replica (a device). With a single replica it is passive,
    so that the same script runs without a cluster.

    Args:
        strategy: Strategy under which the model is built: a
            `tf.distribute.MultiWorkerMirroredStrategy`, or a `tf.distribute.MirroredStrategy` with
            several devices.
        global_batch_size: X, samples per step over all replicas; constant.
        weight_by: What a worker's gradients are weighted by. ``"auto"`` proves, before a fit, that
            the loss is a mean (or a sum) over samples, and refuses other losses. ``"mask"`` weights
            losses under a mask, or divided by the sample weights, by their valid tokens.
            ``"samples"`` and ``"sum"`` treat the loss as a mean or a sum without a proof.
        verify: Whether to compare, before a fit, one weighted step on all workers with the whole
            batch in one process, and to print the difference; see `verified_error`.
        checkpoint: Folder of checkpoints from which the same script, started again, continues at
            the same step: weights, optimizers, metrics, random states, plans and position in the
            data. The chief writes and reads it. Also on SIGTERM to any worker: all save one after
            the same step, and leave with status 143. None writes none.
        every: Steps between two checkpoints, or "epoch" for one after each epoch.
        logs: Whether to add ``waiting``, ``waiting_and_communication``, ``speedup``,
            ``speedup_at_most`` and ``hidden_communication`` to the logs of `fit`, which the
            progress bar, History and other callbacks show, see docs/monitoring.md.
        share_work: Whether a part of each step is left to whoever has finished its own, see
            docs/sharing.md. ``"auto"`` does so where measured times say that it saves time; True
            as well, but a model for which it is impossible is refused in the first step. A number
            in [0.01, 0.8] is the part of every step that is shared. By default there is none.
        **options: Options of `lbbsp_core.SessionOptions`, such as ``policy``, ``predictor``,
            ``cost``, ``limits`` and ``seed``.

    Raises:
        ValueError: No plan can satisfy the options, the strategy is unsuitable, or TF_CONFIG is
            wrong.
        RuntimeError: Keras is too old, or ``TF_USE_LEGACY_KERAS`` makes `tf.keras` Keras 2.

    Example::

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        balancer = lbbsp_tf.LoadBalancer(strategy, global_batch_size=256)
        with strategy.scope():
            model = build()
            model.compile(...)
        model.fit(
            balancer.dataset(x, y, seed=0),
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
        verify: bool = False,
        checkpoint: str | Path | None = None,
        every: Every = "epoch",
        logs: bool = True,
        share_work: bool | str | float = False,
        **options: Unpack[Options],
    ) -> None:
        require_flag("verify", verify)
        require_flag("logs", logs)
        checks.require_strategy(strategy)
        check_tf_config()
        checks.check_keras()
        self.rank, workers = rank_and_workers(strategy.cluster_resolver)
        checks.check_strategy(strategy, workers)
        replicas = strategy.num_replicas_in_sync
        local = replicas // workers
        settings = SessionOptions.of(options, LoadBalancer.__init__)
        if workers > 1:
            heartbeat = start_heartbeat(self.rank, addresses(strategy.cluster_resolver), settings)
            leave_together(self.rank, workers, heartbeat)
            compat.restore_sigterm()
            end_with_peers(heartbeat.leave)
            with current_activity().during(Activity.MEETING):
                check_devices(self.rank, workers, strategy.extended.worker_devices)
        sessions = ReplicaSessions(
            mirrored_collectives(strategy) if workers > 1 else LocalReplicas(local),
            local,
            global_batch_size,
            settings,
            versions={"tensorflow": tf.__version__, "keras": keras.__version__},
            activity=current_activity(),
            devices=devices_of(strategy) if replicas > 1 else None,
        )
        training = Training(
            strategy, sessions, weight_by=weight_by, verify=verify, share_work=share_work
        )
        require_every(every, checkpoint or None)
        checkpoints = checkpoint and Checkpoints(
            checkpoint, every, strategy=strategy, sessions=sessions, training_input=training.input
        )
        super().__init__(training, workers, checkpoints or None, logs=logs)
        compat.patch_keras()  # fit needs it under a strategy, also with a single replica
        if not self.active:
            logger.warning("LoadBalancer is passive, because there is only one replica")
            return
        checks.warn_of_auto_jit(self._session, strategy)
        compat.allow_conditional_updates()
        compat.synchronize_moments()
        compat.patch_evaluation(
            agreement.global_logs,
            Meetings(self.rank, self.workers).meet,
            partial(agreement.check_evaluated, self._session),
            kinds_of_evaluated,
        )
        if self.workers > 1:
            compat.write_once_per_job(self.rank)
            fail_fast()  # for a cluster that is not described by TF_CONFIG

    @property
    def sizes(self) -> tuple[int, ...]:
        """Plan of the running step: samples by rank."""
        return self._session.sizes

    @property
    def verified_error(self) -> float | None:
        """Difference that ``verify=True`` has found, relative to the gradient; else None."""
        return self._training.verified_error

    @property
    def steps_per_epoch(self) -> int:
        """Number of global steps per epoch of the latest data set, which `fit` takes by itself.

        Raises:
            RuntimeError: `dataset` was not called before.
        """
        if self._input.order is None:
            raise RuntimeError(
                "steps_per_epoch depends on the data set: call balancer.dataset(...) first"
            )
        return self._input.order.steps_per_epoch

    @property
    def validation_data(self) -> Nest:
        """Samples that `dataset` has kept for validation; pass them to `fit`.

        Raises:
            RuntimeError: `dataset` was not called with ``validation_split=`` before.
        """
        latest = self._input.latest
        data = latest.source.validation_data if latest else None
        if data is None:
            raise RuntimeError(
                "there is no validation data: call balancer.dataset(..., validation_split=...) "
                "first"
            )
        return data

    def dataset(
        self,
        x: Nest,
        y: Nest = None,
        sample_weight: Nest = None,
        *,
        seed: int | None = None,
        map: Callable[..., Nest] | None = None,
        batch_map: Callable[..., Nest] | None = None,
        shuffle: bool | None = None,
        steps_per_epoch: int | None = None,
        validation_split: float = 0.0,
        num_samples: int | None = None,
        batched: bool | None = None,
        padded: bool | None = None,
        readers: int = 1,
        prefetch: int | None = None,
        work: npt.ArrayLike | None = None,
    ) -> tf.data.Dataset | PlaceholderDataset:
        """Creates the training data of `fit`: this worker's samples of each global step.

        Every worker must pass the *whole* data set, in the same order. Each step draws this
        worker's batch of the plan from a seeded order that is the same on all workers; each sample
        occurs exactly once per pass over the data, for any plans. Each worker reads only its own
        samples, batch by batch; of a `tf.data.Dataset`, it reads the records of all workers and
        maps only its own.

        Args:
            x: Array, or a nest (tuple, list, dict) of arrays, whose first axis is that of samples:
                NumPy arrays and memory maps, HDF5 data sets, tensors, ragged and sparse tensors,
                data frames, lists of strings or paths. Or an object with ``__len__`` and
                ``__getitem__`` whose items are samples; a `keras.utils.PyDataset` whose items are
                global batches; or a `tf.data.Dataset` of samples or of batches of any size.
            y: Targets in the same form as arrays, or None.
            sample_weight: Array of shape ``(samples,)``, or None.
            seed: Seed of the order. Defaults to the balancer's.
            map: Function that augments or decodes one sample, called as ``map(x, y,
                sample_weight)`` without the arguments that are None.
            batch_map: Function of this worker's batch, called with the same arguments after `map`.
            shuffle: False keeps the order of the data set in all epochs. Defaults to True; a
                `tf.data.Dataset` keeps its own order, so leave it out there.
            steps_per_epoch: Steps of an epoch. Defaults to those of a pass over the data.
            validation_split: Fraction of the arrays, their last samples, to keep for
                `validation_data`, in [0, 1).
            num_samples: Number of samples of a `tf.data.Dataset`, where TensorFlow does not know
                it.
            batched: Whether the elements of a `tf.data.Dataset` are batches, where its operations
                do not tell.
            padded: What becomes of samples (after `map`) whose lengths differ: True pads them with
                zeros to the longest of this worker's batch, False makes ragged tensors; by default
                they raise an error.
            readers: Number of threads that read items and apply `map`.
            prefetch: Batches that are read ahead while the model computes. Plans then apply
                `prefetch` steps later. Defaults to 0 for arrays in memory without `map`, else to 1.
            work: Work of each sample of the data set, such as its tokens or pixels, shape
                ``(samples,)``. Each worker's share of a step is then a part of its work, see
                docs/work.md. Needs samples with numbers: no `tf.data.Dataset`, no `PyDataset`.

        Returns:
            Data to pass to `fit` as `x`. Only `fit` can use it: evaluate on arrays or on a
            `tf.data.Dataset`.

        Raises:
            ValueError: The kind of data is not supported, lengths differ, the data set is smaller
                than one global batch, or `work` is wrong; names the remedy.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        return self._input.dataset(InputOptions(**arguments))

    def loop(
        self, train_step: Callable[[Nest], Nest], data: tf.data.Dataset | PlaceholderDataset
    ) -> BalancedLoop:
        """Returns a custom training loop, for users of `strategy.run` and of `train_on_batch`.

        Args:
            train_step: Function of a batch that applies gradients by Keras optimizers, written as
                for a single process: its loss is a mean (or a sum) over the samples of the batch.
                ``model.train_step`` of a compiled model is one.
            data: What `dataset` has returned.

        Raises:
            ValueError: The data did not come from the balancer, or it has ``checkpoint=``.

        Example::

            with balancer.loop(train_step, balancer.dataset(x, y)) as loop:
                for epoch in range(5):
                    for loss in loop.epoch():
                        ...
        """
        if self._checkpoints:
            raise ValueError(
                "checkpoint= is for fit: a custom loop must save and restore its own state, which "
                "the balancer does not know; leave checkpoint= out"
            )
        return BalancedLoop(train_step, data, self._training)

    def sum_gradients(self, gradients: Nest) -> Nest:
        """Returns the gradients of the global batch, for steps that do not just apply them.

        Call it in a train step after each tape, or in the `apply` of an optimizer's subclass,
        before gradients are clipped, normalised, assigned, or used to move weights::

            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = balancer.sum_gradients(gradients)
            gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
            self.optimizer.apply(gradients, self.trainable_variables)

        Optimizers then apply what was computed from it as it is. With ``weight_by="samples"`` or
        ``"sum"``, a step that calls it must do so for the gradients of all later `apply` calls.

        Args:
            gradients: Gradients of a mean (or sum) over this worker's samples, in any nest.

        Returns:
            Those of all samples; outside of a balanced step, and with one replica, `gradients`.
        """
        return compat.sum_gradients(gradients)
