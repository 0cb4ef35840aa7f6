"""States of gluon's optimizers and parameters as JSON and arrays, without pickle.

Gluon's own files hold a pickled optimizer: when MXNet reads one, it executes what is in it. Here
nothing is created from a file but numbers, strings, containers and arrays; they are assigned to the
attributes of the optimizer that the trainer has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

from lbbsp_core.runtime.checkpoint.checkpoint import Arrays, Json, from_json, records_of, to_json
from lbbsp_core.runtime.loop.session_state import settings_of
from lbbsp_mx.parameters import is_sparse

Params: TypeAlias = Sequence[gluon.Parameter]

PARAMETER = "parameter "
"""In front of the names of arrays of parameters, their positions."""

_DERIVED = frozenset(
    {
        "_index_update_count",  # each update lets it refer to that of its device
        "aggregate_num",  # of the environment
        "allow_np_array",
        "idx2name",
        "lr_scheduler",  # an object, whose own attributes are saved
        "param_dict",  # the parameters
        "sym_info",
    }
)
"""Attributes of an optimizer that are no state."""


class _Entries(NamedTuple):
    """A dictionary whose keys are not all strings."""

    pairs: tuple[tuple[Any, Any], ...]


class _Array(NamedTuple):
    """An array of MXNet."""

    value: npt.NDArray[Any]


class _Rows(NamedTuple):
    """A row-sparse array of MXNet."""

    values: npt.NDArray[Any]  # of the rows that it holds
    numbers: npt.NDArray[Any]  # of these rows
    shape: tuple[int, ...]  # of the whole array


_RECORDS = records_of(_Entries(()))


def optimizer_state(trainer: gluon.Trainer) -> tuple[Json, Arrays]:
    """Returns the state of a trainer's optimizer, its learning rate and schedule included."""
    arrays: Arrays = {}
    state: Json = {
        "objects": [_object_state(owner, arrays) for owner in _owners(trainer).values()],
        "states": _saved("the state of a parameter", trainer._state_updaters[0].states, arrays),
    }
    return state, arrays


def given_settings(trainer: gluon.Trainer) -> dict[str, str]:
    """Returns the settings of an optimizer and its schedule, before a step has changed one."""
    settings = {}
    for role, owner in _owners(trainer).items():
        fields = getattr(owner, "__dict__", {})
        settings[f"the {role}"] = {k: fields[k] for k in fields if k not in _DERIVED}
    return settings_of(settings)


def read_optimizer(trainer: gluon.Trainer, state: Any, arrays: Arrays) -> Callable[[], None]:
    """Reads the JSON of `optimizer_state`; returns a function that gives it to the optimizer.

    Nothing has changed if it is of another optimizer, or cannot be read.
    """
    owners = _owners(trainer)

    def read(value: Json) -> Any:
        return _of_mxnet(from_json(value, arrays, _RECORDS), trainer._contexts[0])

    try:
        attributes = [
            {name: read(value) for name, value in _checked(role, owner, saved).items()}
            for (role, owner), saved in zip(owners.items(), state["objects"], strict=True)
        ]
        # Every device gets arrays of its own.
        states = [dict(read(state["states"])) for _ in trainer._updaters]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the state of an optimizer cannot be read: {error!r}") from None

    def restore() -> None:
        for owner, values in zip(owners.values(), attributes, strict=True):
            for name, value in values.items():
                setattr(owner, name, value)
        _share_counts(trainer)
        # The optimizer of a store has one state, on whichever device.
        for updater, device_states in zip(trainer._state_updaters, states, strict=False):
            updater.states = device_states
            updater.states_synced = dict.fromkeys(device_states, False)

    return restore


def parameter_arrays(params: Params) -> Arrays:
    """Returns the values of all parameters, by `PARAMETER` and their positions."""
    require_dense_weights(params)
    for param in params:
        if param._data is None:
            raise ValueError(
                f"parameter {param.name} has no value yet: save after the first batch, or give the "
                "layers their input sizes (in_units, in_channels)"
            )
    return {f"{PARAMETER}{i}": param.list_data()[0].asnumpy() for i, param in enumerate(params)}


def require_dense_weights(params: Params) -> None:
    """Raises an error if a parameter is sparse, whose values gluon does not give as a whole."""
    for param in params:
        if is_sparse(param):
            raise ValueError(
                f"parameter {param.name} is {param._stype!r}, and a checkpoint cannot hold it: "
                "leave stype out, or use net.save_parameters for the weights and "
                "trainer.save_states for the optimizer"
            )


def check_parameters(where: object, params: Params, arrays: Arrays) -> None:
    """Raises ValueError if the arrays, by position, are those of another network."""
    if len(arrays) != len(params):
        raise ValueError(
            f"{where} holds {len(arrays)} parameters, and the trainer has {len(params)}: create "
            "the network of the checkpoint, and pass the same parameters to the trainer"
        )
    for number, param in enumerate(params):
        array, shape = arrays[str(number)], param.shape or ()
        sides = zip(shape, array.shape, strict=False)
        is_same = len(shape) in (0, array.ndim) and all(a in (0, -1, b) for a, b in sides)
        if not is_same or np.dtype(param.dtype) != array.dtype:
            raise ValueError(
                f"{where} is of another network: parameter {number} ({param.name}) had the shape "
                f"{array.shape} and type {array.dtype}, and has {param.shape} and "
                f"{np.dtype(param.dtype)} now; create the network of the checkpoint"
            )


def restore_parameters(params: Params, arrays: Arrays) -> None:
    """Gives the parameters the values in arrays, by position, on all devices."""
    create = mx.np.array if mx.util.is_np_array() else mx.nd.array
    for number, param in enumerate(params):
        array = arrays[str(number)]
        param._load_init(create(array, dtype=array.dtype), None)


def _share_counts(trainer: gluon.Trainer) -> None:
    """Gives every device the number of updates of each parameter.

    It decides the size of an update, and may have been saved with fewer devices, or by a store that
    updates each parameter on another one.
    """
    counts = getattr(trainer.optimizer, "_all_index_update_counts", {})
    latest: dict[Any, int] = {}
    for by_index in counts.values():
        latest |= {index: max(count, latest.get(index, 0)) for index, count in by_index.items()}
    for device in {*counts, *(context.device_id for context in trainer._contexts)}:
        counts[device] = dict(latest)


def _owners(trainer: gluon.Trainer) -> dict[str, object]:
    """Returns the objects whose attributes change in a training, or None where one is missing."""
    schedule = trainer.optimizer.lr_scheduler
    return {
        "optimizer": trainer.optimizer,
        "learning rate schedule": schedule,
        "loss scaler": trainer._loss_scaler,  # of mixed precision
        **_inner_schedules("learning rate schedule", schedule, [schedule]),
    }


def _inner_schedules(path: str, schedule: object, schedules: list[object]) -> dict[str, object]:
    """Returns the schedules that a schedule calls, as one that warms up does, by their places."""
    places = {}
    for name, value in getattr(schedule, "__dict__", {}).items():
        for place, inner in _schedules_in(value).items():
            if not any(inner is other for other in schedules):
                schedules.append(inner)
                places[f"{path}.{name}{place}"] = inner
                places |= _inner_schedules(f"{path}.{name}{place}", inner, schedules)
    return places


def _schedules_in(value: object) -> dict[str, object]:
    """Returns the schedules of which an attribute consists, by their places in it, or nothing."""
    places = {"": value}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        places = {f"[{key!r}]": part for key, part in value.items()}
    only = all(isinstance(part, mx.lr_scheduler.LRScheduler) for part in places.values())
    return places if only else {}


def _object_state(owner: object, arrays: Arrays) -> Json:
    kind = type(owner).__name__
    attributes = {
        name: _saved(f"the attribute {name!r} of {kind}", value, arrays)
        for name, value in getattr(owner, "__dict__", {}).items()
        if name not in _DERIVED and not _schedules_in(value)
    }
    return {"class": kind, "attributes": attributes}


def _checked(role: str, owner: object, saved: Mapping[str, Any]) -> Mapping[str, Json]:
    """Returns the saved attributes of an object like `owner`."""
    kind = saved["class"]
    attributes: Mapping[str, Json] = saved["attributes"]
    if kind != type(owner).__name__:
        raise ValueError(
            f"the state is of the {role} {kind}, and the trainer has {type(owner).__name__}: "
            f"create the trainer with the {role} of the saved state"
        )
    for name in attributes:
        inherited = getattr(type(owner), name, None)
        if name in _DERIVED or callable(inherited) or isinstance(inherited, property):
            raise ValueError(f"the state of the {role} {kind} has an attribute {name!r}, no data")
    return attributes


def _saved(subject: str, value: object, arrays: Arrays) -> Json:
    try:
        return to_json(_plain(value), arrays)
    except TypeError:
        raise ValueError(
            f"{subject} is a {type(value).__name__} that cannot be saved without pickle: keep "
            "numbers, strings, containers and dense arrays there"
        ) from None


def _plain(value: object) -> object:
    """Replaces MXNet's arrays and dictionaries by what can be saved."""
    if isinstance(value, mx.nd.sparse.RowSparseNDArray):
        return _Rows(value.data.asnumpy(), value.indices.asnumpy(), tuple(value.shape))
    if isinstance(value, mx.nd.NDArray):
        if value.stype != "default":
            raise TypeError(value.stype)
        return _Array(value.asnumpy())
    if isinstance(value, dict):
        return _Entries(tuple((key, _plain(entry)) for key, entry in value.items()))
    return _each(_plain, value)


def _of_mxnet(value: Any, context: mx.Context) -> Any:
    """Returns what `_plain` has replaced, with new arrays."""
    if isinstance(value, _Array):
        return mx.nd.array(value.value, ctx=context, dtype=value.value.dtype)
    if isinstance(value, _Rows):
        rows, kind = (value.values, value.numbers), value.values.dtype
        return mx.nd.sparse.row_sparse_array(rows, shape=value.shape, ctx=context, dtype=kind)
    if isinstance(value, _Entries):
        return {key: _of_mxnet(entry, context) for key, entry in value.pairs}
    return _each(partial(_of_mxnet, context=context), value)


def _each(convert: Callable[[Any], Any], value: Any) -> Any:
    """Converts the values of a list or tuple; others stay as they are."""
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(convert, value))
    return value
