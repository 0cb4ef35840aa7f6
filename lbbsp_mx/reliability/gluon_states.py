"""Reader of the files of gluon's own `Trainer.save_states`, which are pickles.

A pickle names functions and classes, and the usual reader calls whatever is named. This one
replaces each name that such a file needs by a class of its own, which only keeps data, and refuses
all other names: neither a function nor a class that a file names is ever looked up. Arrays are read
from their bytes.

Gluon numbers the states by its own order of the parameters, in which a dictionary is sorted by
name: `gluon_order`.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

import mxnet as mx
import numpy as np
from mxnet.lr_scheduler import LRScheduler

from lbbsp_mx.parameters import Parameters, as_created
from lbbsp_mx.reliability.parts import TrainerParts
from lbbsp_mx.reliability.states import optimizer_state, restore_optimizer

PICKLE: Final = b"\x80"  # first byte of gluon's files
_DENSE_ARRAY: Final = 0xF993FAC9, 0  # magic number of the format, and storage type
_TYPES: Final = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")

State = Any  # that an optimizer keeps for a parameter: an array, a tuple of states, or None


def gluon_order(params: Parameters) -> list[int]:
    """Returns the position in `as_created` of each parameter, in gluon's own order."""
    created = list(as_created(params))
    if not hasattr(params, "values"):
        return list(range(len(created)))
    places = {id(param): place for place, param in enumerate(created)}
    return [places[id(params[name])] for name in sorted(params.keys())]


def load_gluon_states(
    trainer: TrainerParts, content: bytes, order: Sequence[int], where: object
) -> None:
    """Gives a trainer's optimizer the states of a file of gluon's own trainer.

    `order` is the position of each parameter in the trainer, in gluon's order. Nothing changes if
    the file is damaged, or of another network or optimizer.
    """
    states, optimizer = _read(trainer, content, where)
    counts = dict(getattr(optimizer, "_all_index_update_counts", {}))
    for numbers in [states, *counts.values()]:
        _check_numbers(numbers, len(order), where)
    placed = {order[number]: state for number, state in states.items()}
    for place, state in placed.items():
        _check_state(trainer, place, state, where)
    if isinstance(optimizer, _Data):
        optimizer._all_index_update_counts = {
            device: {order[number]: count for number, count in each.items()}
            for device, each in counts.items()
        }
    saved = SimpleNamespace(
        params=trainer.params,
        optimizer=optimizer,
        updaters=[SimpleNamespace(states=placed)],
        loss_scaler=trainer.loss_scaler,  # is not in the file
    )
    restore_optimizer(trainer, *optimizer_state(cast(TrainerParts, saved)))


def _read(trainer: TrainerParts, content: bytes, where: object) -> tuple[dict[int, State], object]:
    """Returns the states by gluon's numbers, and the optimizer, which need not be in the file."""
    own = trainer.optimizer
    classes = {_path(own): _Data, _path(own.lr_scheduler): _Schedule}
    try:
        found = _Reader(content, classes).load()
        states, optimizer = found if isinstance(found, tuple) else (found, own)
        if not isinstance(optimizer, _Data | mx.optimizer.Optimizer):
            raise TypeError("no optimizer")
        return {number: _plain(state) for number, state in states.items()}, optimizer
    except _RefusedError as error:
        raise ValueError(
            f"{where} is a pickle that names {error}, which is no part of an optimizer's state; "
            "nothing of it was executed: load only files of gluon's Trainer.save_states"
        ) from None
    except Exception as error:  # damaged pickles raise errors of a dozen types
        raise ValueError(
            f"{where} is damaged, or no file of gluon's Trainer.save_states: {error!r}"
        ) from None


def _check_numbers(numbers: Iterable[object], parameters: int, where: object) -> None:
    """Raises an error if a number is not that of a parameter."""
    for number in numbers:
        if type(number) is not int or not 0 <= number < parameters:
            raise ValueError(
                f"{where} has a state of parameter {number!r}, and the trainer has {parameters} "
                "parameters: create the network of the file, and pass the same parameters to the "
                "trainer"
            )


def _check_state(trainer: TrainerParts, place: int, state: State, where: object) -> None:
    """Raises an error if the state is not like one that the optimizer creates for a parameter."""
    param = trainer.params[place]
    if param._data is None:  # its shape may be unknown
        return
    created = trainer.optimizer.create_state_multi_precision(place, param.list_data()[0])
    if _form(state) != _form(created):
        raise ValueError(
            f"{where} is of another network or optimizer: the state of parameter {place} "
            f"({param.name}) is {_form(state)}, and the trainer needs {_form(created)}; create the "
            "network and the optimizer of the file"
        )


def _form(state: State) -> str:
    """Returns the shapes and types of the arrays of a state."""
    if isinstance(state, (list, tuple)):
        return f"({', '.join(_form(each) for each in state)})"
    if isinstance(state, (mx.nd.NDArray, np.ndarray)):
        return f"{tuple(state.shape)} {np.dtype(state.dtype).name}"
    return "none" if state is None else type(state).__name__


class _RefusedError(Exception):
    """A pickle names something that a state does not need."""


class _Reader(pickle.Unpickler):
    """Reader of pickles that creates only objects of the classes below.

    `classes` keep the data of further classes, such as the user's own optimizer, by their names.
    """

    def __init__(self, content: bytes, classes: Mapping[str, type]) -> None:
        super().__init__(io.BytesIO(content))
        self._classes = {**_CLASSES, **classes}

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class that keeps the data of what a pickle names.

        It is created here, so that nothing that a pickle does to it outlives the reading.
        """
        path = f"{module}.{name}"
        base = self._classes.get(path) or _FAMILIES.get(module)
        if base is None:
            raise _RefusedError(path)
        return type(name, (base,), {})

    def persistent_load(self, pid: Any) -> Any:
        """Refuses objects outside the pickle."""
        raise _RefusedError("an object outside the file")


class _Data:
    """Object of which only the attributes are kept."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({str(name): _plain(value) for name, value in state.items()})


class _Schedule(_Data, LRScheduler):
    """Learning rate schedule of which only the attributes are kept."""

    def __init__(self) -> None:
        """Creates it without attributes."""


class _Inert:
    """What a pickle gives to an object: the arguments of its constructor, and its state."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Inert):
    """Array of MXNet, whose state has the bytes of MXNet's own format."""

    def value(self) -> mx.nd.NDArray:
        """Returns the array."""
        raw = self.state["handle"]
        content = bytes(raw.args[0] if isinstance(raw, _Inert) else raw)
        magic, storage, dimensions = struct.unpack_from("<Iii", content)
        if (magic, storage) != _DENSE_ARRAY or not 0 <= dimensions <= 32:
            raise ValueError("an array that is not dense")
        shape = struct.unpack_from(f"<{dimensions}q", content, 12)
        begin = 12 + 8 * dimensions
        kind = struct.unpack_from("<iii", content, begin)[2]  # after the device
        array = np.frombuffer(content, _TYPES[kind], offset=begin + 12)
        if any(side < 0 for side in shape):
            raise ValueError(f"an array of shape {shape}")
        return mx.nd.array(array.reshape(shape), dtype=array.dtype)


class _Scalar(_Inert):
    """Number of NumPy, given its type and its bytes; a type is given its code and its order."""

    def value(self) -> int | float | bool:
        """Returns the number."""
        code, content = self.args
        kind, order = np.dtype(str(code.args[0])), code.state[1] if code.state else "="
        if kind.kind not in "biuf" or order not in "<>=|":
            raise ValueError(f"a number of type {kind}")
        [number] = np.frombuffer(content, kind.newbyteorder(order)).tolist()
        return cast("int | float | bool", number)


_CLASSES: Final[Mapping[str, type]] = {
    "mxnet.ndarray.ndarray.NDArray": _Array,
    "mxnet.numpy.multiarray.ndarray": _Array,
    "numpy.core.multiarray.scalar": _Scalar,
    "numpy._core.multiarray.scalar": _Scalar,
    "numpy.dtype": _Inert,
    "builtins.bytearray": _Inert,
}
_FAMILIES: Final[Mapping[str, type]] = {  # by module
    "mxnet.optimizer.optimizer": _Data,
    "mxnet.optimizer.contrib": _Data,
    "mxnet.lr_scheduler": _Schedule,
}


def _plain(value: Any) -> Any:
    """Returns a state or attribute with Python's numbers and MXNet's arrays."""
    if isinstance(value, _Scalar | _Array):
        return value.value()
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value


def _path(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
