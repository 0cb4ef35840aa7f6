"""Checks before a fit: of the strategy, the model and the arguments of `fit`."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from importlib import metadata

import keras
import tensorflow as tf

from lbbsp_core.installation import extra
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.options.env import AUTO_JIT_REMEDY, auto_jit
from lbbsp_core.validate import shortened
from lbbsp_tf import compat, env
from lbbsp_tf.cluster import cluster_size

logger = logging.getLogger("lbbsp.tf")


def check_keras() -> None:
    """Raises an error unless Keras is recent enough, uses TensorFlow, and is also `tf.keras`."""
    if env.uses_legacy_keras():
        raise RuntimeError(
            "TF_USE_LEGACY_KERAS makes tf.keras Keras 2, whose models LoadBalancer cannot train: "
            "remove TF_USE_LEGACY_KERAS from the environment, and build the model with Keras 3 "
            "(import keras)"
        )
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise RuntimeError(
            f"the backend of Keras must be tensorflow, got {backend}: set KERAS_BACKEND=tensorflow "
            "in the environment, or change ~/.keras/keras.json"
        )
    oldest = _oldest_keras()
    if _numbers(keras.__version__) < _numbers(oldest):
        raise RuntimeError(
            f"LoadBalancer needs Keras {oldest} or later, got {keras.__version__}: run pip install "
            f"--upgrade {extra('keras')}"
        )


def _oldest_keras() -> str:
    """Returns the lowest version that lbbsp requires in any Python; "0" if it is not installed."""
    try:
        required = metadata.requires("lbbsp") or ()
    except metadata.PackageNotFoundError:
        required = ()
    matches = (re.match(r"keras\b(?!-)[^;]*>=([\d.]+)", requirement) for requirement in required)
    return min((match[1] for match in matches if match), key=_numbers, default="0")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def require_strategy(strategy: object) -> None:
    """Raises an error unless `strategy` is a strategy of TensorFlow."""
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"strategy must be a tf.distribute.Strategy, got {shortened(strategy)}: write "
            "LoadBalancer(strategy, global_batch_size=256), where strategy = "
            "tf.distribute.MultiWorkerMirroredStrategy()"
        )


def check_model_class(model: object) -> None:
    """Raises an error unless `model` belongs to Keras 3."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"the model must be a keras.Model of Keras {keras.__version__}, got a class of "
            f"{type(model).__module__.partition('.')[0]}: build it with `import keras`, instead "
            "of tf_keras (Keras 2)"
        )


def check_strategy(strategy: tf.distribute.Strategy, workers: int) -> None:
    """Raises an error unless `strategy` is supported; a single replica may use any."""
    if workers > 1 and not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise ValueError(
            "strategy must be a tf.distribute.MultiWorkerMirroredStrategy, got "
            f"{type(strategy).__name__}: LoadBalancer supports no other one on several workers"
        )
    if workers == 1 and cluster_size() > 1:
        raise ValueError(
            f"TF_CONFIG names {cluster_size()} workers, but {type(strategy).__name__} trains "
            "on one worker only: pass a tf.distribute.MultiWorkerMirroredStrategy"
        )
    if strategy.num_replicas_in_sync > 1 and not isinstance(strategy, compat.STRATEGIES):
        raise ValueError(
            f"strategy must be a MirroredStrategy or a MultiWorkerMirroredStrategy, got "
            f"{type(strategy).__name__}: LoadBalancer supports no other one on several devices"
        )


def warn_of_auto_jit(session: WorkerSession, strategy: tf.distribute.Strategy) -> None:
    """Warns, on worker 0, if XLA compiles the step for each new batch size of a plan."""
    if session.rank or session.balancer.policy.is_static:
        return
    on_gpu = "GPU" in strategy.extended.worker_devices[0]
    if flag := auto_jit(env.xla_flags(), on_gpu=on_gpu):
        logger.warning(
            "TF_XLA_FLAGS has %s: XLA compiles the step anew for each new batch size: %s",
            flag,
            AUTO_JIT_REMEDY,
        )


def check_callbacks(
    callbacks: Sequence[keras.callbacks.Callback], balancer: type[keras.callbacks.Callback]
) -> None:
    """Raises an error for several balancers, and for callbacks that would repeat samples."""
    balancers = sum(isinstance(callback, balancer) for callback in callbacks)
    if balancers > 1:
        raise ValueError(
            f"callbacks must contain one LoadBalancer, got {balancers}: pass the one whose dataset "
            "feeds the fit, once"
        )
    for callback in callbacks:
        frequency = getattr(callback, "save_freq", "epoch")
        if isinstance(callback, keras.callbacks.BackupAndRestore) and frequency != "epoch":
            raise ValueError(
                f"BackupAndRestore(save_freq={frequency}) would restart an epoch at its first "
                "batch with weights of its middle: pass LoadBalancer(..., checkpoint=folder, "
                f'every={frequency}), which continues at the same batch, or save_freq="epoch"'
            )


def check_steps(steps: int | None, steps_per_epoch: int) -> None:
    """Raises an error unless `fit` was given the balancer's own ``steps_per_epoch``."""
    if steps != steps_per_epoch:
        raise ValueError(
            f"steps_per_epoch must be balancer.steps_per_epoch = {steps_per_epoch}, got {steps!r}: "
            "leave steps_per_epoch out, or give it to balancer.dataset(..., steps_per_epoch=)"
        )


def not_fed_by_balancer() -> ValueError:
    """Returns the error for a `fit` on data that did not come from the balancer."""
    return ValueError(
        "fit needs the data of the balancer: call fit(balancer.dataset(x, y), "
        "callbacks=[balancer]), without batch_size and validation_split (use validation_data)"
    )


def check_model(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Raises an error if `model` cannot be trained; warns if its training is not exact."""
    if model.distribute_strategy is not strategy:
        raise ValueError(
            "the model must belong to the balancer's strategy: build and compile it inside `with "
            "strategy.scope():`"
        )
    if model.steps_per_execution != 1:
        raise ValueError(
            f"steps_per_execution must be 1, got {model.steps_per_execution}: leave it out, "
            "because Keras 3 cannot run several steps at once under this strategy"
        )
    if model.jit_compile:
        raise ValueError(
            "jit_compile must be False, got True: leave it out, because XLA cannot compile "
            "collectives across workers"
        )
    for variable in model.metrics_variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ValueError(
                f"metric {variable.path!r} was created outside the strategy's scope, so that each "
                "worker would count its own samples only: create the metrics and compile the model "
                "inside `with strategy.scope():`"
            )
    layers = list(model._flatten_layers(include_self=False, recursive=True))
    for layer in layers:
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"layer {layer.name!r} is stateful, which fixes the size of a batch, but the sizes "
                "of workers change from step to step: build it with stateful=False"
            )
