"""Agreement of workers: the same epoch logs before callbacks see them, the same model after.

Callbacks run on every worker. One that acts on a value that differs between workers (a learning
rate, a choice of the best epoch) leaves different models, and no later step would show it.
"""

from __future__ import annotations

import codecs
import marshal
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from types import CodeType

import keras
import numpy as np
from keras.src.utils.python_utils import pythonify_logs

from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.exchange.collectives import Collectives, weighted_mean
from lbbsp_core.runtime.exchange.digest import Digest, check_samples
from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf import compat
from lbbsp_tf.compat import Array, Nest
from lbbsp_tf.data.source import digests_of
from lbbsp_tf.exchange.collectives import MirroredCollectives, mirrored_collectives

Logs = Mapping[str, object]

_WEIGHTS = "trainable weights"
_EVALUATED = "the data of evaluate, predict or validation"
_COMPARED = 256

_CAUSE = (
    "a callback has probably acted on a value that differs between workers, such as a loss that it "
    "computed itself or a random number: use only the epoch logs, or a seed"
)


def global_logs(model: keras.Model, logs: Logs) -> dict[str, object]:
    """Computes the logs of all workers from those that a custom step has computed on each.

    An entry with the name of a metric becomes the metric's result over all workers. Other numbers
    are averaged, weighted by each worker's rows in the last step. Numbers that are equal on all
    workers, arrays and other values are kept. Every worker must call this.
    """
    logs = pythonify_logs(logs)  # numbers are floats, and at the top, as callbacks see them
    numbers = {name: value for name, value in logs.items() if isinstance(value, float)}
    collectives = mirrored_collectives(model.distribute_strategy)
    handshake.compare(collectives, {"names of logs": " ".join(numbers)})
    metrics = _updated_metrics(model)
    other_numbers = {name: value for name, value in numbers.items() if name not in metrics}
    rows = compat.last_rows(model)  # of the first replica: a short batch may have none for those
    weight = rows if any(count for (count,) in collectives.all_gather([rows])) else 1
    means = weighted_mean(collectives, list(other_numbers.values()), weight)
    of_metrics = {name: metrics[name] for name in numbers if name in metrics}
    return {**logs, **of_metrics, **dict(zip(other_numbers, means, strict=True))}


def check_evaluated(session: WorkerSession, samples: Iterable[Nest]) -> None:
    """Raises unless all workers have evaluated, or predicted, the same samples; a collective."""
    digests = [digest for batch in samples for digest in digests_of(batch)]
    digests += [Digest(0.0, 0.0)] * _COMPARED  # their numbers may differ, too
    check_samples(session.collectives, digests[:_COMPARED], _EVALUATED)


def share_restored_model(model: keras.Model, collectives: MirroredCollectives) -> None:
    """Copies the chief's model to the other workers if any of them has restored one.

    `BackupAndRestore` writes on the chief only, so that all workers continue from one state, and
    from the same epoch, whether or not they share a file system. A worker may have restored a
    backup of its own, of another epoch. Every worker must call this.
    """
    restored = model._initial_epoch  # None unless a callback has restored one, which may be 0
    rows = collectives.all_gather([0 if restored is None else 1 + restored])
    if not any(row[0] for row in rows):
        return
    (follows,), *_ = rows
    model._initial_epoch = follows - 1 if follows else None
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    for variable in (*model.variables, *model.optimizer.variables):
        variable.assign(collectives.broadcast(keras.ops.convert_to_numpy(variable)))


def facts_of(model: keras.Model) -> dict[str, str]:
    """Returns what must be equal on all workers before a fit, as texts by name.

    Names are left out, which Keras numbers by process, and so are learning rates, which a restored
    model may have only after the fit has begun.
    """
    variables = (
        f"{tuple(v.shape)} {v.dtype}" + " fixed" * (not v.trainable) for v in model.variables
    )
    layers = (type(layer).__name__ for layer in model._flatten_layers(include_self=False))
    weights = getattr(getattr(model, "_compile_loss", None), "_user_loss_weights", None)
    return {
        "model parameters": ", ".join(variables),
        "layers": ", ".join(layers),
        "loss": _described(getattr(model, "loss", None))
        + (f" with weights {_described(weights)}" if weights is not None else ""),
        "optimizer": ", ".join(map(_described, optimizers_of(model))),
        "run_eagerly": str(model.run_eagerly),
    }


def weights_of(model: keras.Model) -> Iterator[Array]:
    """Yields the weights that must be equal on all workers."""
    return map(keras.ops.convert_to_numpy, filter(compat.is_mirrored, model.trainable_variables))


def check_learning_rates(model: keras.Model, collectives: Collectives) -> None:
    """Raises unless all workers start with the same learning rates; a collective."""
    rates = (optimizer.learning_rate for optimizer in optimizers_of(model))
    text = ", ".join(f"{float(keras.ops.convert_to_numpy(rate)):.7g}" for rate in rates)
    handshake.compare(collectives, {"learning rate": text})


def check_models(model: keras.Model, collectives: Collectives) -> None:
    """Raises unless all workers have the same weights, learning rates and steps.

    Weights may differ by the rounding of unlike processors, see `runtime.exchange.digest`. Every
    worker must call this, after all callbacks. Variables that the strategy does not keep equal
    (statistics that are averaged when they are read) are not compared.
    """
    facts = model_facts(model)
    rows = collectives.all_gather(list(facts.values()))
    for column, name in enumerate(facts):
        values = [row[column] for row in rows]
        if name == _WEIGHTS:
            digests = [Digest.from_integer(value) for value in values]
            values = [next(i for i, first in enumerate(digests) if first.is_close(digest))
                      for digest in digests]  # fmt: skip
        groups = [
            "worker" + "s" * (len(ranks) > 1) + " " + ", ".join(map(str, ranks))
            for value in dict.fromkeys(values)
            if (ranks := [rank for rank, other in enumerate(values) if other == value])
        ]
        if len(groups) > 1:
            raise DisagreementError(
                f"workers disagree on the {name} ({' against '.join(groups)}): {_CAUSE}"
            )


def model_facts(model: keras.Model) -> dict[str, int]:
    """Returns what must be equal on all workers after a step, as integers by name."""
    optimizers = optimizers_of(model)
    return {
        "learning rate": _crc32(optimizer.learning_rate for optimizer in optimizers),
        "number of updates": _crc32(optimizer.iterations for optimizer in optimizers),
        _WEIGHTS: Digest.of(weights_of(model)).to_integer(),
    }


def _described_code(code: CodeType) -> str:
    """Returns a text for the code of a function, without its file."""
    constants = [
        _described_code(constant)
        if isinstance(constant, CodeType)  # or a set, whose order differs between processes
        else repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
        for constant in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {', '.join(constants)}"


def _described(value: Nest) -> str:
    """Returns a text for a loss or an optimizer, without names and addresses."""
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":  # its code names the file
            code, *captured = value["config"]["value"]
            code = marshal.loads(codecs.decode(code.encode(), "base64"))  # Keras has just made it
            return f"lambda({_described_code(code)}, {_described(captured)})"
        return "{" + ", ".join(f"{key}: {_described(value[key])}" for key in value) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described, value))}]"
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about lambdas, which only loading would execute
            # The configuration of Huber leaves out delta.
            config = {**value.get_config(), **getattr(value, "_fn_kwargs", {})}
    except Exception:  # a class of the user need not have one
        return name
    return f"{name}({_described(_without_names(config))})"


def _without_names(config: Mapping[str, object]) -> dict[str, object]:
    """Removes names and numbers of learning rates, also those of nested objects."""
    return {
        key: _without_names(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not (key == "name" or (key == "learning_rate" and isinstance(value, int | float)))
    }


def _updated_metrics(model: keras.Model) -> dict[str, object]:
    """Returns the results of metrics over all workers, without metrics that were not updated.

    A compiled model always has a metric "loss", which a custom step need not update.
    """
    results: dict[str, object] = {}
    for metric in model.metrics:
        if any(np.any(keras.ops.convert_to_numpy(variable)) for variable in metric.variables):
            result = metric.result()
            results.update(result if isinstance(result, dict) else {metric.name: result})
    return results


def optimizers_of(model: keras.Model) -> Iterable[keras.optimizers.Optimizer]:
    """Returns the optimizers that a model has, and the models and layers that it consists of.

    They are attributes, or in lists or dictionaries.
    """
    # A MultiOptimizer has no learning rate of its own.
    held = (optimizer for layer in model._flatten_layers() for optimizer in _optimizers_in(layer))
    all_held = (inner for outer in held for inner in getattr(outer, "optimizers", ()) or [outer])
    return {id(optimizer): optimizer for optimizer in all_held}.values()


def undiscovered(
    applied: Iterable[keras.optimizers.Optimizer], model: keras.Model
) -> list[keras.optimizers.Optimizer]:
    """Returns those of the applied optimizers that `optimizers_of` and their wrappers lack."""
    optimizers = [*optimizers_of(model)]
    ids = {id(inner) for outer in optimizers for inner in (outer, *_optimizers_in(outer))}
    return [optimizer for optimizer in applied if id(optimizer) not in ids]


def _optimizers_in(owner: object) -> Iterator[keras.optimizers.Optimizer]:
    for value in vars(owner).values():
        held = value.values() if isinstance(value, Mapping) else value
        items = held if isinstance(held, list | tuple | ValuesView) else [held]
        yield from (item for item in items if isinstance(item, keras.optimizers.Optimizer))


def _crc32(variables: Iterable[object]) -> int:
    values = map(keras.ops.convert_to_numpy, variables)
    return zlib.crc32(b"".join(value.tobytes() for value in values))
