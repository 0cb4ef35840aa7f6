"""ASP for Keras 3: every push enters the model on arrival, and no worker waits.

It is meant for comparisons with BSP and LB-BSP. Keras 3's `fit` does not run under
`ParameterServerStrategy`, so this module uses TensorFlow's `ClusterCoordinator`: a queue of
iterations, from which each worker takes the next one when it has finished its previous one.
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
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.record.record import PushLine, RunHeader, run_header
from lbbsp_core.runtime.record.writer import PushLog
from lbbsp_core.runtime.reliability.exit import fail_fast
from lbbsp_core.validate import require_integer
from lbbsp_tf import compat
from lbbsp_tf.cluster import check_chief
from lbbsp_tf.compat import Nest
from lbbsp_tf.exactness.checks import check_model_class

RETRY_SECONDS = 0.05


def parameter_server_strategy() -> tf.distribute.Strategy:
    """Creates the strategy for `fit_asynchronously` on the chief of the cluster in ``TF_CONFIG``.

    Waits until all workers and servers run.

    Returns:
        A `tf.distribute.ParameterServerStrategy`.

    Raises:
        ValueError: ``TF_CONFIG`` is wrong, names no parameter server or no worker, or makes this
            process another task than the chief.
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
    """Trains by ASP: each worker's gradients are applied on arrival, without waiting for others.

    An iteration is `model.train_step` on one batch: the worker reads the model from the parameter
    servers, computes gradients, and applies them on the servers with the model's own optimizer.
    Other workers may have changed the model in the meantime: the gradient is *stale* by as many
    updates, and the result differs from that of BSP (with one worker it is that of plain SGD). The
    load is balanced implicitly, because a fast worker takes more iterations from the queue.

    Each iteration takes the next batch of a seeded order, so that an epoch uses every sample
    exactly once, on some worker, as long as no worker fails. TensorFlow runs the iteration of a
    failed worker again on another one. Its samples are then used at least once, and a second time,
    in whole or in part, if the worker failed during or after its push. (``lbbsp launch`` ends the
    job if a worker fails.) There is no barrier between epochs.

    Every change of a weight is applied as a whole, and ``optimizer.iterations`` counts all pushes.
    Momentum, Adam's moments and non-trainable weights (moving statistics) are read, changed and
    written back: if two workers push at the same time, one of these changes can be lost. Metrics
    would miscount for the same reason and are not updated: evaluate a copy of the model
    afterwards, with ``copy.set_weights(model.get_weights())``. Keras's `evaluate` and `predict` do
    not run under this strategy.

    Args:
        model: Model, built and compiled inside `with strategy.scope()` of
            `parameter_server_strategy`, with one replica per worker.
        x: Array, or a nest (tuple, list, dict) of arrays, whose first axis is that of samples.
            All data is copied to every worker once, at the start.
        y: Targets in the same form, or None.
        sample_weight: Array of shape ``(samples,)``, or None.
        batch_size: Samples per iteration, >= 1; fewer in the last iteration of an epoch. To
            compare with BSP at a global batch size of X, pass X / workers.
        epochs: Number of times that each sample is used, >= 1.
        seed: Seed of the order, >= 0.
        record: Path of the run record, as in `lbbsp_core.SessionOptions`, with one line per push.
            The busy seconds of a worker are those of its whole iteration, including reading and
            changing the model.

    Returns:
        ``{"loss": [...]}``, with one mean loss of all samples per epoch; the loss of a sample is
        that of the model which its worker had read.

    Raises:
        ValueError: The model belongs to another strategy or is not compiled, or a number is out
            of range.
        TypeError: The model is not one of Keras 3.
    """
    strategy = model.distribute_strategy
    _check(model, strategy, epochs)
    options = SessionOptions(seed=seed, record=record)
    options.check_asynchronous()
    fail_fast()
    arrays = _pack_arrays(x, y, sample_weight)
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
        if epoch > 0:  # one epoch is always scheduled ahead, so that no worker is idle
            losses.append(_log_epoch(log, _results(coordinator, scheduled.pop(0)), began))
    losses.append(_log_epoch(log, _results(coordinator, scheduled.pop(0)), began))
    log.close()
    return {"loss": losses}


class _Push(NamedTuple):
    """Report of an iteration."""

    line: PushLine  # with times of the first parameter server's clock
    loss: float  # mean of the batch

    @classmethod
    def packed(cls, loss: tf.Tensor, **line: tf.Tensor) -> tf.Tensor:
        """Packs a push into one tensor, which is sent to the chief as a single message."""
        values = [line[field.name] for field in fields(PushLine)]
        return tf.stack([tf.cast(value, tf.float64) for value in (*values, loss)])

    @classmethod
    def unpacked(cls, values: np.ndarray) -> _Push:
        """Unpacks a push; float64 keeps integers exact up to 2**53."""
        *line, loss = values.tolist()
        return cls(PushLine.from_floats(line), loss)


class _Tally:
    """Number of pushes that have entered the model, stored on one parameter server.

    `tf.Variable.assign_add` reads its result after the addition, when another push may already
    have been counted: only CountUpTo adds and reads in one operation. Create a tally inside the
    strategy's scope.
    """

    def __init__(self, workers: int) -> None:
        zeros = np.zeros(workers, np.int64)
        self._pushes = tf.Variable(np.int64(0), trainable=False, name="pushes")
        with tf.distribute.get_strategy().extended.colocate_vars_with(self._pushes):
            self._pushes_of = tf.Variable(zeros, trainable=False, name="pushes_of_worker")

    def read(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the pushes of all workers, and of each worker, shape ``(workers,)``; int64."""
        return self._pushes.read_value(), self._pushes_of.read_value()

    def count(self, worker: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Counts a push, and returns the number of pushes before it and the time."""
        with tf.device(self._pushes.device):
            before = tf.raw_ops.ResourceCountUpTo(
                resource=self._pushes.handle, limit=np.iinfo(np.int64).max, T=tf.int64
            )
            one = tf.IndexedSlices(tf.ones(1, tf.int64), worker[None])
            with tf.control_dependencies([before]):
                self._pushes_of.scatter_add(one)
            return before, self.now()

    def now(self) -> tf.Tensor:
        """Returns the time of the server's clock, in seconds."""
        with tf.device(self._pushes.device):
            return tf.timestamp()


def _iteration(
    model: keras.Model, strategy: tf.distribute.Strategy, tally: _Tally
) -> Callable[[Iterator[Nest], tf.Tensor], tf.Tensor]:
    """Creates the function that a worker runs, given all data and the indices of a batch."""

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

    # A separate function, because it returns only when all its changes have been made.
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
    """Returns a function that creates a data set whose elements are all data, without copies."""
    with tf.device("/CPU:0"):
        tensors = keras.tree.map_structure(tf.constant, arrays)
    return tf.function(lambda: tf.data.Dataset.from_tensors(tensors).repeat())


def _results(coordinator: Any, scheduled: list[Any]) -> list[_Push]:
    """Waits for iterations, including those that the coordinator runs again after a failure."""
    pushes: list[_Push] = []
    while len(pushes) < len(scheduled):
        try:
            pushes.append(_Push.unpacked(coordinator.fetch(scheduled[len(pushes)])))
        except Exception:  # noqa: PERF203
            # A result becomes ready before the coordinator has copied it, and is lost if the worker
            # dies in between; the iteration then runs again. `done` raises errors that are final.
            if coordinator.done():
                raise
            time.sleep(RETRY_SECONDS)
    return pushes


def _log_epoch(log: PushLog, pushes: list[_Push], began: float) -> float:
    """Logs the pushes of an epoch that began at `began`, and returns its mean loss per sample."""
    for line, _ in pushes:
        log.add(replace(line, seconds=line.seconds - began))
    return float(
        np.average([push.loss for push in pushes], weights=[push.line.samples for push in pushes])
    )


def _build(model: keras.Model, arrays: Nest) -> None:
    """Builds missing weights of the model and the optimizer, which workers cannot create."""
    if not model.built:
        x, *_ = keras.utils.unpack_x_y_sample_weight(arrays)
        model(keras.tree.map_structure(lambda array: array[:1], x))
    model.optimizer.build(model.trainable_variables)


def _check(model: keras.Model, strategy: tf.distribute.Strategy, epochs: int) -> None:
    check_model_class(model)
    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ValueError(
            "the model must belong to the strategy of lbbsp_tf.parameter_server_strategy(), got "
            f"{type(strategy).__name__}: build and compile it inside `with strategy.scope():`"
        )
    if strategy.num_replicas_in_sync != 1:
        raise ValueError(
            f"the strategy must have one replica per worker, got {strategy.num_replicas_in_sync}: "
            "start one worker for each GPU, with CUDA_VISIBLE_DEVICES"
        )
    if not model.compiled:
        raise ValueError("the model must be compiled: call model.compile(optimizer, loss) first")
    if getattr(model.optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "gradient_accumulation_steps must be None, because pushes of several workers would be "
            "mixed in the accumulators: use a larger batch_size"
        )
    require_integer("epochs", epochs, 1)


def _workers(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of workers, N; the ``cluster_resolver`` of this strategy is None."""
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
        hosts=_hosts(),
        devices=_devices(workers),
    )


def _hosts() -> list[str]:
    """Returns the hosts of the workers, as ``TF_CONFIG`` names them."""
    spec = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()
    return [address.rpartition(":")[0] for address in spec.as_dict().get("worker", ())]


def _devices(workers: int) -> list[str]:
    """Returns the kinds of the workers' devices; only the workers know the names of their GPUs."""
    known = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    kinds = [
        {each.device_type for each in known if (each.job, each.task) == ("worker", rank)}
        for rank in range(workers)
    ]
    return ["gpu" if "GPU" in kind else ", ".join(sorted(kind)).lower() for kind in kinds]


def _pack_arrays(x: Nest, y: Nest, sample_weight: Nest) -> Nest:
    """Packs in-memory data as Keras does: a nest of NumPy arrays, floats as floatx."""
    # Lists become tuples, as in Keras's own adapters: tf.data would stack a list into one tensor.
    packed = keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
    arrays = keras.tree.map_structure(_as_array, packed)
    lengths = {len(array) for array in keras.tree.flatten(arrays)}
    if len(lengths) != 1:
        shapes = [array.shape for array in keras.tree.flatten(arrays)]
        raise ValueError(
            f"x, y and sample_weight must have the same number of samples, got shapes {shapes}"
        )
    return arrays


def _as_array(values: object) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim == 0:
        raise ValueError(
            f"the data must be arrays whose first axis is that of samples, got {values!r}: pass "
            "one array per input"
        )
    return array.astype(keras.backend.floatx()) if array.dtype.kind == "f" else array
