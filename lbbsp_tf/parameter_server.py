"""ASP under Keras 3: every push enters the model on arrival, and nobody waits.

For comparison with BSP and LB-BSP. Keras 3's `fit` does not run under `ParameterServerStrategy`,
so this drives TensorFlow's own `ClusterCoordinator`: a queue of iterations, from which every
worker takes the next when it is done with its last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from lbbsp_core import GlobalOrder, RunRecord
from lbbsp_core.runtime.env import run_dir
from lbbsp_core.runtime.exit import fail_fast
from lbbsp_core.runtime.handshake import all_versions, open_record
from lbbsp_tf import compat
from lbbsp_tf.cluster import check_chief
from lbbsp_tf.dataset import Nest, pack_arrays

RETRY_SECONDS = 0.05


def parameter_server_strategy() -> tf.distribute.Strategy:
    """The strategy for `fit_asynchronously`: the chief's view of the cluster in ``TF_CONFIG``.

    Returns:
        A `tf.distribute.ParameterServerStrategy`; it waits until all workers and servers are up.

    Raises:
        ValueError: ``TF_CONFIG`` is wrong, names no ps or no worker, or this is not its chief.
    """
    check_chief()
    fail_fast()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tf.distribute.ParameterServerStrategy(resolver)


def fit_asynchronously(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int,
    epochs: int = 1,
    seed: int = 0,
    record: str | Path | None = None,
) -> dict[str, list[float]]:
    """Trains by ASP: each worker's gradients are applied as they come, whatever the others do.

    An iteration is `model.train_step` on one batch: read the model from the parameter servers,
    compute, apply the gradients there by the model's own optimizer. By then others may have
    changed the model: the gradient is *stale* by as many updates, and the run's result is not that
    of BSP (with one worker, it is that of plain SGD). Load balances by itself: a fast worker takes
    more iterations from the queue.

    Each iteration takes the next batch of a seeded order, so that an epoch uses every sample
    exactly once, on some worker. While no worker fails, that holds. TensorFlow runs the iteration
    of a worker that fails again, on another or on its successor: its samples are then used at
    least once, and again (wholly or in part) if the worker failed while or after it pushed.
    ``lbbsp launch`` ends the job then.
    The next epoch begins as the workers come to it; they do not gather between epochs.

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
        record: File for the run record, one line a push, in their order. Defaults to none, or to
            ``RUN_DIR/run.jsonl`` under ``lbbsp launch --run-dir``. A worker's busy seconds are
            those of its whole iteration, reading and writing the model included.

    Returns:
        ``{"loss": [...]}``: for each epoch the mean loss of its samples, each by the model that
        its worker had.

    Raises:
        ValueError: A model of another strategy or not compiled, or nonsensical numbers.
    """
    strategy = model.distribute_strategy
    _check(model, strategy, epochs)
    fail_fast()
    arrays = pack_arrays(x, y, sample_weight)
    order = GlobalOrder(len(keras.tree.flatten(arrays)[0]), batch_size, seed)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        _build(model, arrays)
        tally = _Tally(_workers(strategy))
    iterate = _iteration(model, strategy, tally)
    data = iter(coordinator.create_per_worker_dataset(_whole(arrays)))
    path = Path(record) if record else run_dir()
    header = _header(strategy, order)
    ledger = _Ledger(open_record(path, header) if path else None, tally.now())
    losses = []
    begun: list[list[Any]] = []
    for epoch in range(epochs):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        begun.append([coordinator.schedule(iterate, (data, order.indices(k))) for k in steps])
        if epoch > 0:  # always an epoch ahead, so that nobody runs out of work
            losses.append(ledger.enter(_results(coordinator, begun.pop(0))))
    losses.append(ledger.enter(_results(coordinator, begun.pop(0))))
    ledger.close()
    return {"loss": losses}


class _Push(NamedTuple):
    """What an iteration reports, see `RunRecord.push`."""

    push: int
    worker: int
    iteration: int
    samples: int
    staleness: int
    lead: int
    busy_seconds: float
    entered: float  # by the clock of the first parameter server
    loss: float

    @classmethod
    def packed(cls, **values: tf.Tensor) -> tf.Tensor:
        """One tensor of all: what a worker tells goes to the chief in one message, not in nine."""
        return tf.stack([tf.cast(values[name], tf.float64) for name in cls._fields])

    @classmethod
    def unpacked(cls, values: np.ndarray) -> _Push:
        """Float64 keeps integers whole up to 2**53."""
        *integers, busy_seconds, entered, loss = values.tolist()
        return cls(*map(int, integers), busy_seconds, entered, loss)


class _Tally:
    """How many pushes the model has seen, on the first parameter server, whose clock counts.

    `tf.Variable.assign_add` gives back a value that is read after the addition, by when another
    push may have been added: CountUpTo alone adds and reads in one.

    Args:
        workers: N. Made inside the strategy's scope, on what is then the next server.
    """

    def __init__(self, workers: int) -> None:
        zeros = np.zeros(workers, np.int64)
        self._pushes = tf.Variable(np.int64(0), trainable=False, name="pushes")
        with tf.distribute.get_strategy().extended.colocate_vars_with(self._pushes):
            self._pushes_of = tf.Variable(zeros, trainable=False, name="pushes_of_worker")

    def read(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Pushes of all, int64; and of each worker, int64, shape ``(workers,)``."""
        return self._pushes.read_value(), self._pushes_of.read_value()

    def count(self, worker: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Counts a push. Returns how many came before it, and the time."""
        with tf.device(self._pushes.device):
            before = tf.raw_ops.ResourceCountUpTo(
                resource=self._pushes.handle, limit=np.iinfo(np.int64).max, T=tf.int64
            )
            one = tf.IndexedSlices(tf.ones(1, tf.int64), worker[None])
            with tf.control_dependencies([before]):
                self._pushes_of.scatter_add(one)
            return before, self.now()

    def now(self) -> tf.Tensor:
        """The server's clock, seconds."""
        with tf.device(self._pushes.device):
            return tf.timestamp()


def _iteration(model: keras.Model, strategy: tf.distribute.Strategy, tally: _Tally) -> Any:
    """What the coordinator runs on a worker, given all data and a batch's indices."""

    def learn(batch: Nest) -> tf.Tensor:
        losses: list[tf.Tensor] = []
        with compat.without_metrics(model, losses), compat.atomic_iterations(model.optimizer):
            model.train_step(batch)
        if not losses:
            raise ValueError(
                f"{type(model).__name__}.train_step computed no loss: it must call "
                "self.compute_loss for fit_asynchronously to tell it"
            )
        return losses[0]

    # A function of its own: it is over only when all that it changes has been changed.
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
            push=before,
            worker=worker,
            iteration=pushes_of[worker],
            samples=tf.size(indices),
            staleness=before - seen,
            lead=pushes_of[worker] - tf.reduce_min(pushes_of),
            busy_seconds=busy_seconds,
            entered=entered,
            loss=loss,
        )

    return iterate


def _whole(arrays: Nest) -> Any:
    """Makes a worker's data set, whose every element is all the data: the same memory."""
    with tf.device("/CPU:0"):
        tensors = keras.tree.map_structure(tf.constant, arrays)
    return tf.function(lambda: tf.data.Dataset.from_tensors(tensors).repeat())


def _results(coordinator: Any, begun: list[Any]) -> list[_Push]:
    """Waits for iterations, the failed ones that the coordinator runs again included."""
    pushes: list[_Push] = []
    while len(pushes) < len(begun):
        try:
            pushes.append(_Push.unpacked(coordinator.fetch(begun[len(pushes)])))
        except Exception:  # noqa: PERF203
            # A result is offered before the coordinator has copied it, and is gone if its worker
            # dies just then; the iteration runs again. What failed for good is raised by `done`.
            if coordinator.done():
                raise
            time.sleep(RETRY_SECONDS)
    return pushes


class _Ledger:
    """Writes pushes in their order, though iterations end in another one.

    Args:
        record: To write to, or None.
        began: When, by the clock of the first parameter server.
    """

    def __init__(self, record: RunRecord | None, began: tf.Tensor) -> None:
        self._record, self._began = record, float(began)
        self._early: list[_Push] = []
        self._next = 0

    def enter(self, pushes: list[_Push]) -> float:
        """Takes an epoch's pushes. Returns their mean loss."""
        for each in pushes:
            heappush(self._early, each)
        while self._early and self._early[0].push == self._next:
            self._write()
        weights = [each.samples for each in pushes]
        return float(np.average([each.loss for each in pushes], weights=weights))

    def close(self) -> None:
        """Writes what came after a gap: the push of a worker that failed before it could tell."""
        while self._early:
            self._write()
        if self._record is not None:
            self._record.close()

    def _write(self) -> None:
        line = heappop(self._early)._asdict()
        self._next = line["push"] + 1
        del line["loss"]
        if self._record is not None:
            self._record.push(seconds=line.pop("entered") - self._began, **line)


def _build(model: keras.Model, arrays: Nest) -> None:
    """Makes the weights that are not there yet; none can be made on the workers."""
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
    if epochs != int(epochs) or epochs < 1:
        raise ValueError(f"epochs must be an integer >= 1, got {epochs!r}")


def _workers(strategy: tf.distribute.Strategy) -> int:
    """N: this strategy keeps its resolver to itself, and gives None as its ``cluster_resolver``."""
    return int(strategy.extended._num_workers)


def _header(strategy: tf.distribute.Strategy, order: GlobalOrder) -> dict[str, Any]:
    workers = _workers(strategy)
    return {
        "framework": "tensorflow",
        "sync": "asp",
        "workers": workers,
        "servers": strategy.extended._num_ps,
        "global_batch_size": workers * order.global_batch_size,
        "batch_size": order.global_batch_size,
        "num_samples": order.num_samples,
        "seed": order.seed,
        "versions": all_versions({"tensorflow": tf.__version__, "keras": keras.__version__}),
    }
