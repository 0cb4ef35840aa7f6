"""ASP under Keras 3: every push enters the model on arrival, and no worker waits.

For comparison with BSP and LB-BSP. Keras 3's `fit` does not run under `ParameterServerStrategy`,
so this drives TensorFlow's own `ClusterCoordinator`: a queue of iterations, from which every
worker takes the next one when it has finished its last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.exit import fail_fast
from lbbsp_core.runtime.options import SessionOptions
from lbbsp_core.runtime.record import PushLine, PushLog, RunHeader, run_header
from lbbsp_core.validate import require_integer
from lbbsp_tf import compat
from lbbsp_tf.cluster import check_chief
from lbbsp_tf.dataset import Nest, pack_arrays

RETRY_SECONDS = 0.05


def parameter_server_strategy() -> tf.distribute.Strategy:
    """Makes the strategy for `fit_asynchronously` on the chief of the cluster in ``TF_CONFIG``.

    Returns:
        A `tf.distribute.ParameterServerStrategy`; it waits until all workers and servers run.

    Raises:
        ValueError: ``TF_CONFIG`` is wrong, names no ps or no worker, or this is not its chief.
    """
    check_chief()
    fail_fast()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tf.distribute.ParameterServerStrategy(resolver)


def fit_asynchronously(
    model: keras.Model,
    x: Nest,
    y: Nest = None,
    sample_weight: Nest = None,
    *,
    batch_size: int,
    epochs: int = 1,
    seed: int = 0,
    record: str | Path | None = None,
) -> dict[str, list[float]]:
    """Trains by ASP: each worker's gradients are applied on arrival, whatever the others do.

    An iteration is `model.train_step` on one batch: read the model from the parameter servers,
    compute, apply the gradients there by the model's own optimizer. By then others may have
    changed the model: the gradient is *stale* by as many updates, and the run's result is not that
    of BSP (with one worker, it is that of plain SGD). The load balances by itself: a fast worker
    takes more iterations from the queue.

    Each iteration takes the next batch of a seeded order, so that an epoch uses every sample
    exactly once, on some worker. While no worker fails, that holds. TensorFlow runs the iteration
    of a worker that fails again, on another or on its successor: its samples are then used at
    least once, and again (wholly or in part) if the worker failed while or after it pushed.
    ``lbbsp launch`` ends the job then.
    The next epoch starts when the workers reach it; there is no barrier between epochs.

    Every update of a weight is applied whole, and ``optimizer.iterations`` counts all pushes. What
    an optimizer reads, changes and writes back (momentum, Adam's moments), and non-trainable
    weights (moving statistics), can lose the change of one of two pushes at the same time:
    asynchronous training is like that. Metrics would count wrongly for that reason, and are left
    alone: evaluate a copy afterwards, ``copy.set_weights(model.get_weights())``. Keras's own
    `evaluate` and `predict` do not run under this strategy.

    Args:
        model: Built and compiled inside `with strategy.scope()` of `parameter_server_strategy`,
            with one replica a worker.
        x: Array, or a nest (tuple, list, dict) of arrays, first axis samples. A copy of all data
            goes to every worker once, at the start.
        y: The same, or None.
        sample_weight: Array of shape ``(samples,)``, or None.
        batch_size: Samples of an iteration (the last of an epoch has what is left), >= 1. To
            compare with BSP at a global batch of X, give X / workers.
        epochs: How often to use each sample, >= 1.
        seed: Seed of the order.
        record: As in `lbbsp_core.SessionOptions`, with one line a push. A worker's busy seconds
            are those of its whole iteration, reading and writing the model included.

    Returns:
        ``{"loss": [...]}``: for each epoch the mean loss of its samples, each by the model that
        its worker had.

    Raises:
        ValueError: A model of another strategy or not compiled, or invalid numbers.
    """
    strategy = model.distribute_strategy
    _check(model, strategy, epochs)
    options = SessionOptions(seed=seed, record=record)
    fail_fast()
    arrays = pack_arrays(x, y, sample_weight)
    order = GlobalOrder(len(keras.tree.flatten(arrays)[0]), batch_size, seed)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        _build(model, arrays)
        tally = _Tally(_workers(strategy))
    iterate = _iteration(model, strategy, tally)
    data = iter(coordinator.create_per_worker_dataset(_whole(arrays)))
    log = PushLog.open(options.record_path(), _header(strategy, order))
    began = float(tally.now())
    losses = []
    scheduled: list[list[Any]] = []
    for epoch in range(epochs):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        scheduled.append([coordinator.schedule(iterate, (data, order.indices(k))) for k in steps])
        if epoch > 0:  # always an epoch ahead, so that no worker runs out of work
            losses.append(_log_epoch(log, _results(coordinator, scheduled.pop(0)), began))
    losses.append(_log_epoch(log, _results(coordinator, scheduled.pop(0)), began))
    log.close()
    return {"loss": losses}


class _Push(NamedTuple):
    """What an iteration reports.

    Args:
        line: Of the run record; its seconds are by the clock of the first parameter server.
        loss: Mean loss of the batch.
    """

    line: PushLine
    loss: float

    @classmethod
    def packed(cls, loss: tf.Tensor, **line: tf.Tensor) -> tf.Tensor:
        """Packs a push into one tensor: one message to the chief instead of many."""
        values = [line[field.name] for field in fields(PushLine)]
        return tf.stack([tf.cast(value, tf.float64) for value in (*values, loss)])

    @classmethod
    def unpacked(cls, values: np.ndarray) -> _Push:
        """Unpacks a push; float64 keeps integers exact up to 2**53."""
        *line, loss = values.tolist()
        return cls(PushLine.from_floats(line), loss)


class _Tally:
    """Number of pushes that the model has seen, on the first parameter server.

    `tf.Variable.assign_add` returns a value that is read after the addition, by when another push
    may have been added: only CountUpTo adds and reads in one operation.

    Args:
        workers: N. Made inside the strategy's scope, on what is then the next server.
    """

    def __init__(self, workers: int) -> None:
        zeros = np.zeros(workers, np.int64)
        self._pushes = tf.Variable(np.int64(0), trainable=False, name="pushes")
        with tf.distribute.get_strategy().extended.colocate_vars_with(self._pushes):
            self._pushes_of = tf.Variable(zeros, trainable=False, name="pushes_of_worker")

    def read(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads the pushes of all, int64, and of each worker, int64, shape ``(workers,)``."""
        return self._pushes.read_value(), self._pushes_of.read_value()

    def count(self, worker: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Counts a push. Returns the number of pushes before it, and the time."""
        with tf.device(self._pushes.device):
            before = tf.raw_ops.ResourceCountUpTo(
                resource=self._pushes.handle, limit=np.iinfo(np.int64).max, T=tf.int64
            )
            one = tf.IndexedSlices(tf.ones(1, tf.int64), worker[None])
            with tf.control_dependencies([before]):
                self._pushes_of.scatter_add(one)
            return before, self.now()

    def now(self) -> tf.Tensor:
        """Reads the server's clock, in seconds."""
        with tf.device(self._pushes.device):
            return tf.timestamp()


def _iteration(
    model: keras.Model, strategy: tf.distribute.Strategy, tally: _Tally
) -> Callable[[Iterator[Nest], tf.Tensor], tf.Tensor]:
    """Makes what the coordinator runs on a worker, given all data and a batch's indices."""

    def learn(batch: Nest) -> tf.Tensor:
        losses: list[tf.Tensor] = []
        with compat.without_metrics(model, losses), compat.atomic_iterations(model.optimizer):
            model.train_step(batch)
        if not losses:
            raise ValueError(
                f"{type(model).__name__}.train_step computed no loss: it must call "
                "self.compute_loss for fit_asynchronously to report it"
            )
        return losses[0]

    # A separate function: it ends only when everything that it changes has been changed.
    push = tf.function(lambda batch: strategy.run(learn, (batch,)))

    @tf.function
    def iterate(data: Iterator[Nest], indices: tf.Tensor) -> tf.Tensor:
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        worker = tf.cast(worker, tf.int64)
        started = tf.timestamp()
        with tf.control_dependencies([started]):
            seen, pushes_of = tally.read()
            batch = keras.tree.map_structure(lambda t: tf.gather(t, indices), next(data))
        with tf.control_dependencies([seen, pushes_of]):
            loss = push(batch)
        with tf.control_dependencies([loss]):
            busy_seconds = tf.timestamp() - started
            before, entered = tally.count(worker)
        return _Push.packed(
            loss,
            push=before,
            worker=worker,
            iteration=pushes_of[worker],
            samples=tf.size(indices),
            staleness=before - seen,
            lead=pushes_of[worker] - tf.reduce_min(pushes_of),
            busy_seconds=busy_seconds,
            seconds=entered,
        )

    return iterate


def _whole(arrays: Nest) -> Callable[[], tf.data.Dataset]:
    """Makes a worker's data set, whose every element is all the data in the same memory."""
    with tf.device("/CPU:0"):
        tensors = keras.tree.map_structure(tf.constant, arrays)
    return tf.function(lambda: tf.data.Dataset.from_tensors(tensors).repeat())


def _results(coordinator: Any, scheduled: list[Any]) -> list[_Push]:
    """Waits for iterations, including those that failed and that the coordinator runs again."""
    pushes: list[_Push] = []
    while len(pushes) < len(scheduled):
        try:
            pushes.append(_Push.unpacked(coordinator.fetch(scheduled[len(pushes)])))
        except Exception:  # noqa: PERF203
            # A result is announced before the coordinator has copied it, and is lost if its worker
            # dies just then; the iteration runs again. `done` raises what has finally failed.
            if coordinator.done():
                raise
            time.sleep(RETRY_SECONDS)
    return pushes


def _log_epoch(log: PushLog, pushes: list[_Push], began: float) -> float:
    """Logs an epoch's pushes, by seconds since `began`. Returns the mean loss of its samples."""
    for line, _ in pushes:
        log.add(replace(line, seconds=line.seconds - began))
    return float(
        np.average([push.loss for push in pushes], weights=[push.line.samples for push in pushes])
    )


def _build(model: keras.Model, arrays: Nest) -> None:
    """Builds the weights that do not exist yet; none can be made on the workers."""
    if not model.built:
        x, *_ = keras.utils.unpack_x_y_sample_weight(arrays)
        model(keras.tree.map_structure(lambda array: array[:1], x))
    model.optimizer.build(model.trainable_variables)


def _check(model: keras.Model, strategy: tf.distribute.Strategy, epochs: int) -> None:
    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ValueError(
            "build and compile the model inside `with strategy.scope():` of "
            f"lbbsp_tf.parameter_server_strategy(), got a model of {type(strategy).__name__}"
        )
    if strategy.num_replicas_in_sync != 1:
        raise ValueError(
            f"one replica a worker is needed, got {strategy.num_replicas_in_sync}: start one "
            "worker for each GPU, with CUDA_VISIBLE_DEVICES"
        )
    if not model.compiled:
        raise ValueError("the model must be compiled: call model.compile(optimizer, loss) before")
    if getattr(model.optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "gradient_accumulation_steps must be None: pushes of several workers would mix in the "
            "accumulators; use a larger batch_size"
        )
    require_integer("epochs", epochs, 1)


def _workers(strategy: tf.distribute.Strategy) -> int:
    """Returns N: the ``cluster_resolver`` of this strategy is None, it keeps its own."""
    return int(strategy.extended._num_workers)


def _header(strategy: tf.distribute.Strategy, order: GlobalOrder) -> RunHeader:
    workers = _workers(strategy)
    return run_header(
        "tensorflow",
        workers=workers,
        global_batch_size=workers * order.global_batch_size,
        versions={"tensorflow": tf.__version__, "keras": keras.__version__},
        num_samples=order.num_samples,
        seed=order.seed,
        sync="asp",
        servers=strategy.extended._num_ps,
        batch_size=order.global_batch_size,
    )
