"""Agreement of workers: the same epoch logs before callbacks see them, the same model after.

Callbacks run on every worker. One that acts on a value that differs between workers (a learning
rate, a choice of the best epoch) leaves different models, and no later step would show it.
"""

from __future__ import annotations

import codecs
import marshal
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from types import CodeType

import keras
import numpy as np

from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.runtime.exchange.digest import Digest, check_samples
from lbbsp_core.runtime.exchange.protocol import DisagreementError, pack_float, unpack_float
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf import compat
from lbbsp_tf.compat import Nest
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
    logs = _flat(logs)
    collectives = mirrored_collectives(model.distribute_strategy)
    numbers = {name: float(value) for name, value in logs.items() if _is_number(value)}
    names = " ".join(numbers)
    handshake.compare(collectives, {"names of logs": names})
    if not numbers:
        return dict(logs)
    metrics = _updated_metrics(model)
    local = [number for name, number in numbers.items() if name not in metrics]
    means = iter(weighted_means(local, compat.last_rows(model), collectives))
    return {
        name: value if name not in numbers else metrics[name] if name in metrics else next(means)
        for name, value in logs.items()
    }


def check_evaluated(session: WorkerSession, samples: Iterable[Nest]) -> None:
    """Raises unless all workers have evaluated, or predicted, the same samples; a collective."""
    digests = [digest for each in samples for digest in digests_of(each)]
    digests += [Digest(0.0, 0.0)] * _COMPARED  # their numbers may differ, too
    check_samples(session.collectives, digests[:_COMPARED], _EVALUATED)


def weighted_means(values: Sequence[float], weight: int, collectives: Collectives) -> list[float]:
    """Returns the means of values over workers; a collective.

    Values that are equal on all workers are kept. Those of a worker without weight do not count,
    not even if they are NaN. Scalar arithmetic by rank gives the same bits on all workers.
    """
    row = [weight, *(half for value in values for half in pack_float(value))]
    rows = collectives.all_gather(row)
    counted = [row for row in rows if row[0]] or [[1, *row[1:]] for row in rows]
    total = sum(row[0] for row in counted)
    means = []
    for column in range(1, len(row), 2):
        halves = [row[column : column + 2] for row in counted]
        mean = 0.0
        for (weight, *_), bits in zip(counted, halves, strict=True):
            mean += unpack_float(bits) * (weight / total)
        equal = all(bits == halves[0] for bits in halves)
        means.append(unpack_float(halves[0]) if equal else mean)
    return means


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
        value = keras.ops.convert_to_numpy(variable)
        variable.assign(collectives.broadcast(value))


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
    }


def weights_of(model: keras.Model) -> Iterator[np.ndarray]:
    """Yields the weights that must be equal on all workers."""
    for variable in filter(compat.is_mirrored, model.trainable_variables):
        yield keras.ops.convert_to_numpy(variable)


def check_learning_rates(model: keras.Model, collectives: Collectives) -> None:
    """Raises unless all workers start with the same learning rates; a collective."""
    rates = (keras.ops.convert_to_numpy(each.learning_rate) for each in optimizers_of(model))
    text = ", ".join(f"{float(rate):.7g}" for rate in rates)
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
            values = [next(i for i, first in enumerate(digests) if first.is_close(each))
                      for each in digests]  # fmt: skip
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
    optimizers = list(optimizers_of(model))
    return {
        "learning rate": _crc32(optimizer.learning_rate for optimizer in optimizers),
        "number of updates": _crc32(optimizer.iterations for optimizer in optimizers),
        _WEIGHTS: Digest.of(weights_of(model)).to_integer(),
    }


def _described_code(code: CodeType) -> str:
    """Returns a text for the code of a function, without its file."""
    constants = [
        _described_code(each) if isinstance(each, CodeType) else _described_constant(each)
        for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {', '.join(constants)}"


def _described_constant(value: object) -> str:
    if isinstance(value, frozenset):  # whose order differs between processes
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return repr(value)


def _described(value: object) -> str:
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
            config = {
                **value.get_config(),
                **getattr(value, "_fn_kwargs", {}),  # Huber leaves out delta
            }
    except Exception:  # a class of the user need not have one
        return name
    return f"{name}({_described(_without_names(config))})"


def _without_names(config: Mapping[str, object]) -> dict[str, object]:
    """Removes names and numbers of learning rates, also those of nested objects."""
    kept = {}
    for key, value in config.items():
        if key == "name" or (key == "learning_rate" and isinstance(value, int | float)):
            continue
        kept[key] = _without_names(value) if isinstance(value, Mapping) else value
    return kept


def _flat(logs: Logs) -> dict[str, object]:
    """Returns logs with those in dictionaries moved to the top, as Keras shows them."""
    flat: dict[str, object] = {}
    for name, value in logs.items():
        flat.update(_flat(value) if isinstance(value, Mapping) else {name: value})
    return flat


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


def optimizers_of(model: keras.Model) -> Iterator[keras.optimizers.Optimizer]:
    """Yields the optimizers that a model has as attributes, or in lists or dictionaries."""
    yield from {id(each): each for each in _held_optimizers(model)}.values()


def _held_optimizers(model: keras.Model) -> Iterator[keras.optimizers.Optimizer]:
    for value in vars(model).values():
        held = value.values() if isinstance(value, Mapping) else value
        for item in held if isinstance(held, list | tuple | ValuesView) else [held]:
            if isinstance(item, keras.optimizers.Optimizer):
                # A MultiOptimizer has no learning rate of its own.
                yield from getattr(item, "optimizers", None) or [item]


def _crc32(arrays: Iterable[object]) -> int:
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(keras.ops.convert_to_numpy(array)), value)
    return value


def _is_number(value: object) -> bool:
    try:
        return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiub"
    except (TypeError, ValueError):
        return False
