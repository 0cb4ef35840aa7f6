"""State of a Keras model in training: weights, optimizers, metrics and random states as arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lbbsp_core.runtime.checkpoint.checkpoint import (
    Arrays,
    Checkpoint,
    Json,
    plain_arrays,
    typed_arrays,
)
from lbbsp_core.runtime.loop.session_state import settings_of
from lbbsp_tf import compat
from lbbsp_tf.exactness.agreement import optimizers_of, undiscovered
from lbbsp_tf.exchange.collectives import MirroredCollectives


class ModelState:
    """State of one model, which is read after a step, and restored before one."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, rank: int) -> None:
        self._model = model
        self._strategy = strategy
        self._rank = rank

    def facts(self) -> dict[str, Json]:
        """Returns what must be the same for a model to continue from a state, by name."""
        variables = self._model.variables
        facts: dict[str, Json] = {
            "optimizer": ", ".join(
                type(optimizer).__name__ for optimizer in optimizers_of(self._model)
            ),
            "number of the model's variables": len(variables),
        }
        for i, variable in enumerate(variables):
            path = re.sub(r"_\d+(?=/|$)", "", variable.path)  # without Keras's numeric suffixes
            facts[f"variable {i} of the model"] = f"{path} {tuple(variable.shape)} {variable.dtype}"
        return facts

    def settings(self) -> dict[str, str]:
        """Returns the settings of optimizers and layers, before a step has changed one."""
        owners = {f"optimizer {i}": owner for i, owner in enumerate(optimizers_of(self._model))}
        for i, layer in enumerate(self._model._flatten_layers(include_self=False)):
            owners[f"layer {i} ({type(layer).__name__})"] = layer
        configs = {}
        for name, owner in owners.items():
            with suppress(Exception):  # a class of the user need not have one
                configs[name] = owner.get_config()
        settings = settings_of(configs)  # the names of layers are counted
        return {k: v for k, v in settings.items() if not re.match(r"(.*\.)?name ", k)}

    def check_optimizers(self, applied: Iterable[keras.optimizers.Optimizer]) -> None:
        """Raises ValueError if a state has not all optimizers that the steps apply."""
        lacking = [type(optimizer).__name__ for optimizer in undiscovered(applied, self._model)]
        if lacking:
            raise ValueError(
                "checkpoints hold the optimizers that are attributes of the model or its layers, "
                f"and {type(self._model).__name__}.train_step also applies "
                f"{', '.join(sorted(lacking))}, which would begin anew after a restart: keep each "
                "as an attribute of the model, or leave out checkpoint="
            )

    def untracked_variables(self) -> Iterator[tuple[str, str]]:
        """Yields the names of layers, and of attributes that hold variables Keras does not know."""
        ids = {id(variable.value) for variable in self._model.variables}
        for layer in self._model._flatten_layers():
            for name, value in vars(layer).items():
                # TensorFlow itself keeps them a second time.
                is_own = not name.startswith("_self_")
                if is_own and any(id(variable) not in ids for variable in _raw_variables(value)):
                    yield layer.name, name

    def read(self, *, copy: bool) -> tuple[Json, Arrays]:
        """Returns the state, if `copy`; a collective: statistics are averaged over replicas."""
        numbers = {id(variable): i for i, variable in enumerate(self._model.variables)}
        trained: list[Json] = []
        for optimizer in optimizers_of(self._model):
            weights = getattr(optimizer, "_trainable_variables", None) or []
            trained.append([numbers[id(weight)] for weight in weights if id(weight) in numbers])
        arrays: Arrays = {}
        for group, variables in self._groups().items():
            for i, variable in enumerate(variables):
                if copy or not compat.is_mirrored(variable):
                    value = keras.ops.convert_to_numpy(variable)  # a copy
                    if copy:
                        arrays[f"{group}/{i}"] = value
        return {"trained": trained}, arrays

    def restore(self, state: Any, arrays: Mapping[str, compat.Array]) -> None:
        """Restores weights and optimizers; call it before the step is traced."""
        self.restore_weights(arrays)
        variables = self._model.variables
        optimizers = list(optimizers_of(self._model))
        for i, (optimizer, trained) in enumerate(zip(optimizers, state["trained"], strict=True)):
            if not optimizer.built and trained:  # else it is built when the step is traced
                with self._strategy.scope():
                    optimizer.build([variables[number] for number in trained])
            for variable, value in _pairs(f"optimizer {i}", optimizer.variables, arrays):
                variable.assign(value)

    def restore_weights(self, arrays: Mapping[str, compat.Array]) -> None:
        """Restores the weights only."""
        for variable, value in _pairs("model", self._model.variables, arrays):
            variable.assign(value)

    def restore_in_epoch(self, arrays: Mapping[str, compat.Array]) -> None:
        """Restores metrics, after Keras has reset them, and the global random state."""
        if _group(arrays, "metrics"):
            for variable, value in _pairs("metrics", self._model.metrics_variables, arrays):
                compat.assign_total(self._strategy, variable, value, sends=self._rank == 0)
        self.restore_random(arrays)

    def restore_random(self, arrays: Mapping[str, compat.Array]) -> None:
        """Restores Keras's global random state, where one was saved."""
        for value in _group(arrays, "random"):
            with self._strategy.scope():
                compat.global_random_state().assign(value)

    def _groups(self) -> dict[str, Sequence[keras.Variable]]:
        """Returns the variables by the first part of their names."""
        groups: dict[str, Sequence[keras.Variable]] = {
            "model": self._model.variables,
            "metrics": self._model.metrics_variables,
        }
        for i, optimizer in enumerate(optimizers_of(self._model)):
            groups[f"optimizer {i}"] = optimizer.variables
        if compat.has_global_seed():
            groups["random"] = [compat.global_random_state()]
        return groups


def _raw_variables(value: object, outside: tuple[int, ...] = ()) -> Iterator[tf.Variable]:
    """Yields TensorFlow's own variables in a value; `outside` has the ids of what holds it."""
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, tf.Module):
        yield from value.variables
    elif isinstance(value, (Mapping, list, tuple, set)) and id(value) not in outside:
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _raw_variables(part, (*outside, id(value)))


def _pairs(
    group: str, variables: Sequence[keras.Variable], arrays: Mapping[str, compat.Array]
) -> Iterator[tuple[keras.Variable, compat.Array]]:
    """Returns the variables of a group with their saved values, if these have the same shapes."""
    saved = _group(arrays, group)
    before, now = [array.shape for array in saved], [tuple(v.shape) for v in variables]
    if before != now:
        raise ValueError(
            f"the checkpoint is of another job: the variables of {group} had the shapes {before}, "
            f"and have {now} now; build and compile the model as before (all layers before fit, "
            "not in its first step), or choose another folder"
        )
    return zip(variables, saved, strict=True)


def _group(arrays: Mapping[str, compat.Array], name: str) -> list[compat.Array]:
    """Returns the arrays of a group, in the order in which they were read."""
    count = sum(key.startswith(f"{name}/") for key in arrays)
    return [arrays[f"{name}/{i}"] for i in range(count)]


_CHUNK = 1 << 24  # bytes; a collective needs several times as much memory


def share_checkpoint(
    read: Callable[[], Checkpoint | None], collectives: MirroredCollectives | None
) -> Checkpoint | None:
    """Returns the checkpoint of the chief on all workers; a collective.

    The workers need no common file system. If the chief cannot read or use it, all raise the same
    `ValueError`.
    """
    checkpoint: Checkpoint | None = None
    problem = None
    if collectives is None or collectives.rank == 0:
        try:
            checkpoint = read()
        except (OSError, ValueError, MemoryError) as error:
            problem = str(error)
    if collectives is not None:
        checkpoint, problem = _shared(checkpoint, problem, collectives)
    if problem is not None:
        raise ValueError(problem)
    return checkpoint


def _shared(
    checkpoint: Checkpoint | None, problem: str | None, collectives: MirroredCollectives
) -> tuple[Checkpoint | None, str | None]:
    arrays, types = plain_arrays(dict(checkpoint.arrays) if checkpoint else {})
    header: dict[str, Any] = {
        "problem": problem,
        "found": checkpoint and [checkpoint.step, dict(checkpoint.facts), checkpoint.state],
        "types": types,
        "arrays": [[name, array.dtype.str, array.shape] for name, array in arrays.items()],
    }
    text = json.dumps(header).encode() if collectives.rank == 0 else b""
    header = json.loads(_broadcast(text, collectives))
    if header["found"] is None:
        return None, header["problem"]
    for name, dtype, shape in header["arrays"]:
        data = arrays[name].tobytes() if name in arrays else b""
        arrays[name] = np.frombuffer(_broadcast(data, collectives), dtype).reshape(shape)
    step, facts, state = header["found"]
    return Checkpoint(step, facts, state, typed_arrays(arrays, header["types"])), None


def _broadcast(data: bytes, collectives: MirroredCollectives) -> bytes:
    """Returns the bytes of the first process; the others pass none."""
    size = collectives.all_gather([len(data)])[0][0]
    padded = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    parts = [
        collectives.broadcast(padded[start : start + _CHUNK]) for start in range(0, size, _CHUNK)
    ]
    return b"".join(part.tobytes() for part in parts)
