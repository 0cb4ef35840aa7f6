"""All patches of Keras: idempotent, applied only where Keras needs them, each with its reason.

Keras 3's `fit` does not run under `MultiWorkerMirroredStrategy` (keras-team/keras#20585, open),
because it calls `strategy.reduce` twice with values that the strategy does not accept. Both calls
need the local value.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import TypeAlias

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

Nest: TypeAlias = object
"""A value, or a nest (tuple, list, dict) of values."""

_DONE = "_lbbsp_patched"


def patch_keras() -> None:
    """Makes `fit`, `evaluate` and validation run under MultiWorkerMirroredStrategy."""
    trainer = keras_trainer.TensorFlowTrainer
    build = getattr(trainer, "_maybe_symbolic_build", None)
    if build is not None and _is_broken(build, "distribute_strategy.reduce("):
        trainer._maybe_symbolic_build = _patched(_build_from_local_batch)
    reduce = getattr(keras_trainer, "reduce_per_replica", None)
    if reduce is not None and _is_broken(reduce, 'strategy.reduce("MEAN", v, axis=0)'):
        keras_trainer.reduce_per_replica = _patched(_reduce_locally(reduce))


def checkpoint_on_chief_only(rank: int) -> None:
    """Makes `ModelCheckpoint` write to its path on the chief only, elsewhere to a temporary folder.

    Every worker must run the save, because reading a variable that is averaged over workers is
    a collective. Concurrent writes to the same file would corrupt it (HDF5 rejects them).
    """
    checkpoint = keras.callbacks.ModelCheckpoint
    path_of = getattr(checkpoint, "_get_file_path", None)
    if rank == 0 or path_of is None or hasattr(path_of, _DONE):
        return
    folder = tempfile.TemporaryDirectory(prefix="lbbsp-")

    @wraps(path_of)
    def private_path(self: keras.callbacks.Callback, *args: object, **kwargs: object) -> str:
        private = Path(folder.name) / Path(path_of(self, *args, **kwargs)).name
        return str(private)

    checkpoint._get_file_path = _patched(private_path)


def local(strategy: tf.distribute.Strategy, value: Nest) -> Nest:
    """Returns this worker's part of a distributed value, or of each value in a nest."""
    return keras.tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], value)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replaces a method of one instance inside the context, hidden from Keras's tracking."""
    before = vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)


@contextmanager
def without_metrics(model: keras.Model, losses: list[tf.Tensor]) -> Iterator[None]:
    """Prevents `train_step` from updating metrics, and appends its losses to a list.

    Metrics are read, changed and written back in separate operations. If steps on different
    workers ran at the same time, only one of them would be counted.
    """
    compute_loss = model.compute_loss

    def appending(*args: object, **kwargs: object) -> tf.Tensor:
        losses.append(compute_loss(*args, **kwargs))
        return losses[-1]

    with ExitStack() as stack:
        stack.enter_context(replaced(model, "compute_loss", appending))
        stack.enter_context(replaced(model, "compute_metrics", lambda *_, **__: {}))
        tracker = getattr(model, "_loss_tracker", None)
        if tracker is not None:
            stack.enter_context(replaced(tracker, "update_state", lambda *_, **__: None))
        yield


@contextmanager
def atomic_iterations(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes `optimizer.apply` count its calls in one operation.

    Keras reads the count, adds one and assigns the sum in separate operations. In a test it
    counted 159 of 200 asynchronous steps on two workers.
    """
    count = optimizer.iterations
    with replaced(count, "assign_add", lambda value: count.value.assign_add(value)):
        yield


def _build_from_local_batch(
    self: keras_trainer.TensorFlowTrainer, iterator: Nest = None, data_batch: Nest = None
) -> None:
    """Builds the model; replaces `_maybe_symbolic_build`, which reduces a tuple of values."""
    if self._distribute_strategy is None:
        return
    if iterator is not None:
        _, _, batches = next(iter(iterator))
        data_batch = local(self.distribute_strategy, next(batches))
    with self.distribute_strategy.scope():
        self._symbolic_build(data_batch=data_batch)


def _reduce_locally(reduce: Callable[..., Nest]) -> Callable[..., Nest]:
    """Wraps `reduce_per_replica`, which averages scalars over an axis that they do not have."""

    @wraps(reduce)
    def reduce_per_replica(values: Nest, strategy: tf.distribute.Strategy, reduction: str) -> Nest:
        if reduction == "auto" and keras_trainer._collective_all_reduce_multi_worker(strategy):
            return local(strategy, values)
        return reduce(values, strategy, reduction)

    return reduce_per_replica


def _is_broken(function: Callable[..., Nest], sign: str) -> bool:
    return not hasattr(function, _DONE) and sign in inspect.getsource(function)


def _patched(function: Callable[..., Nest]) -> Callable[..., Nest]:
    setattr(function, _DONE, True)
    return function
