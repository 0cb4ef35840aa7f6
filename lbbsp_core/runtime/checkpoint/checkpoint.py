"""Checkpoints on disk: each of them is complete or absent, and nothing in them is executed.

A checkpoint is one file, an uncompressed ``.npz`` archive of the arrays and of a JSON header with
the step, the facts by which a foreign checkpoint is recognised, the state, and a checksum of all
of it. It is written under another name, flushed to the disk, and renamed. The two newest are kept.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import math
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from lbbsp_core.files import UNFINISHED, open_regular, write_whole

logger = logging.getLogger("lbbsp.checkpoint")

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Records: TypeAlias = Mapping[str, type]
"""Classes of records by name, ``module:qualified name``."""

_STATE = "state"

FORMAT: Final = 3  # files of other formats are refused, except
_UNCHECKED_FORMAT: Final = 2  # whose checksum does not cover this number
KEEP: Final = 2  # generations

_HEADER: Final = "header"
_NAME: Final = re.compile(r"step-(\d+)\.npz")
_REPLACED: Final = ".replaced"


@dataclass(frozen=True)
class Checkpoint:
    """State of a job after a step.

    Args:
        step: Number of completed steps.
        facts: Facts of the job that must be the same when it continues, by name.
        state: State of the job, see `to_json`.
        arrays: Arrays of the state, weights included, by name.
    """

    step: int
    facts: Mapping[str, Json] = field(default_factory=dict)
    state: Json = None
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


def write_checkpoint(folder: str | Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint, then removes all but the newest `KEEP`.

    Whatever interrupts it, the checkpoints that existed before stay complete. Those of later steps,
    from which this training has not continued, are renamed. Only one process may write to the
    folder.
    """
    folder = Path(folder)
    path = folder / f"step-{checkpoint.step:09d}.npz"
    write_file(path, checkpoint)
    paths = _paths(folder)
    kept = paths[: paths.index(path) + 1]
    for later in paths[len(kept) :]:  # the next start would continue from it
        logger.warning("%s is of another training, or damaged: renamed to *%s", later, _REPLACED)
        with suppress(OSError):
            later.replace(later.with_name(later.name + _REPLACED))
    for old in [*kept[:-KEEP], *folder.glob(f"step-*{UNFINISHED}")]:
        with suppress(OSError):
            old.unlink()
    return path


def write_file(path: str | Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint to a file of any name, which is complete or stays as it was.

    Several processes may write to one name at the same time: that of the last one stays.
    """
    named = {f"_{name}": np.asarray(array) for name, array in checkpoint.arrays.items()}
    for name, array in named.items():
        if array.dtype.hasobject:
            raise ValueError(f"array {name[1:]!r} must not hold objects, which would be pickled")
    arrays, types = plain_arrays(named)
    content: dict[str, Json] = {
        "format": FORMAT,
        "step": checkpoint.step,
        "facts": dict(checkpoint.facts),
        "state": checkpoint.state,
        "types": dict(types),
    }
    header = {"checksum": _checksum(content, arrays), **content}
    text = np.frombuffer(json.dumps(header, allow_nan=False).encode(), np.uint8)
    write_whole(path, partial(_save_arrays, {_HEADER: text, **arrays}), durable=True)


def _save_arrays(arrays: Arrays, file: BinaryIO) -> None:
    """Writes arrays as `numpy.savez` does, which after an error leaves the archive open."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.save(member, array, allow_pickle=False)


def newest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """Reads the newest complete checkpoint; damaged ones are skipped with a warning.

    Returns None if there is no checkpoint at all.

    Raises:
        ValueError: All are damaged, or the newest was written by another version of lbbsp.
        OSError: The newest cannot be read, by an error of the disk or for lack of permissions; it
            may be complete.
        MemoryError: There is not enough memory for it.
    """
    problems: list[Exception] = []
    for path in reversed(_paths(Path(folder))):
        try:
            return read_checkpoint(path)
        except ValueError as error:  # noqa: PERF203
            if isinstance(error, _OtherFormatError):
                raise
            logger.warning("%s: trying the checkpoint before it", error)
            problems.append(error)
    if problems:
        raise ValueError(
            f"{folder} has no complete checkpoint ({problems[0]}): delete its step-*.npz files to "
            "start from the beginning"
        )
    return None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Reads and verifies a checkpoint."""
    with open_regular(path) as file:
        try:
            return _parse(file, path)
        except _OtherFormatError:
            raise
        except Exception as error:  # damaged archives raise errors of a dozen types
            if _is_of_machine(error, os.fstat(file.fileno()).st_size):
                raise
            raise ValueError(f"{path} is damaged or no checkpoint: {error!r}") from None


def _is_of_machine(error: Exception, size: int) -> bool:
    """Returns whether an error while a file of `size` bytes is read says nothing of the file.

    A damaged archive may name a negative position, or an array that is larger than itself.
    """
    if isinstance(error, OSError):
        return error.errno not in (None, errno.EINVAL)
    claimed = math.prod(getattr(error, "shape", ()))
    return isinstance(error, MemoryError) and claimed <= size


def _parse(file: BinaryIO, path: str | Path) -> Checkpoint:
    with zipfile.ZipFile(file) as archive:  # `np.load` looks each name up in a list

        def read(name: str) -> Any:
            with archive.open(f"{name}.npy") as member:
                return np.load(member, allow_pickle=False)

        content = json.loads(read(_HEADER).tobytes())
        names = (name.removesuffix(".npy") for name in archive.namelist())
        arrays = {name: read(name) for name in names if name != _HEADER}
    checksum, version = content.pop("checksum"), content["format"]
    if version == _UNCHECKED_FORMAT:
        del content["format"]
    if checksum != _checksum(content, arrays):
        raise ValueError(f"its content does not match its checksum, as format {version}")
    if version not in (FORMAT, _UNCHECKED_FORMAT):  # as its checksum confirms: it is not damaged
        other = "a later" if version > FORMAT else "an earlier"
        raise _OtherFormatError(
            f"{path} was written by {other} version of lbbsp (format {version}, here "
            f"{FORMAT}): install that version, or start from another folder"
        )
    step, facts = content["step"], content["facts"]
    if type(step) is not int or step < 0 or not isinstance(facts, dict):
        raise TypeError(f"step {step!r}")
    typed = typed_arrays(arrays, content["types"])
    return Checkpoint(step, facts, content["state"], {n[1:]: array for n, array in typed.items()})


def plain_arrays(arrays: Arrays) -> tuple[Arrays, dict[str, str]]:
    """Returns arrays of NumPy's own types, and the names of the types of those that had others.

    These are the types of ``ml_dtypes``, bfloat16 and float8, which files of NumPy cannot hold.
    """
    registered = 2  # by a package: types of their own, also where their kind is that of NumPy's
    custom_names = {name for name, array in arrays.items() if array.dtype.isbuiltin == registered}
    plain = {
        name: array.view(f"u{array.dtype.itemsize}") if name in custom_names else array
        for name, array in arrays.items()
    }
    return plain, {name: arrays[name].dtype.name for name in custom_names}


def typed_arrays(arrays: Arrays, types: Mapping[str, str]) -> Arrays:
    """Returns the arrays of which `plain_arrays` has been made."""
    return {
        name: array.view(_type_named(types[name])) if name in types else array
        for name, array in arrays.items()
    }


def _type_named(name: str) -> npt.DTypeLike:
    try:
        import ml_dtypes  # a dependency of the frameworks that have such types

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError, TypeError):
        raise ValueError(f"an array of type {name} needs ml_dtypes: install it") from None


class _OtherFormatError(ValueError):
    """A checkpoint has the format of another version."""


def _paths(folder: Path) -> list[Path]:
    """Returns the files of checkpoints, the newest last."""
    if not folder.is_dir():
        return []
    names = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return [path for _, path in sorted((int(name[1]), path) for name, path in names if name)]


def _checksum(content: Mapping[str, Json], arrays: Arrays) -> str:
    """Returns a hash of a checkpoint's content, the types and shapes of arrays included."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def records_of(*states: object) -> dict[str, type]:
    """Returns the classes of the records that states may consist of, by name.

    They are the named tuples and dataclasses of the modules that define those of `states`.
    """
    classes: dict[str, type] = {}
    for module in {type(record).__module__ for record in _records_in(states)}:
        for value in vars(sys.modules[module]).values():
            if isinstance(value, type) and _field_names(value) is not None:
                classes[_name(value)] = value
    return classes


def to_json(value: object, arrays: Arrays) -> Json:
    """Converts a state to JSON; its arrays are added to `arrays` under new names.

    It may consist of numbers, strings, None, tuples, lists, dicts with strings as keys, arrays
    without objects, and records of these.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {"float": repr(number)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufSU":
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, list):
        return {"list": [to_json(member, arrays) for member in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: to_json(member, arrays) for key, member in value.items()}}
    names = _field_names(type(value))
    if names is not None:
        held = {name: to_json(getattr(value, name), arrays) for name in names}
        return {"record": _name(type(value)), "fields": held}
    if isinstance(value, tuple):
        return [to_json(member, arrays) for member in value]
    raise TypeError(
        f"a checkpoint cannot hold {type(value).__name__} objects: let states of predictors and "
        "policies be numbers, strings, arrays, containers, named tuples and dataclasses"
    )


def from_json(value: Json, arrays: Mapping[str, npt.NDArray[Any]], records: Records) -> Any:
    """Converts JSON back to a state; the inverse of `to_json`."""
    if isinstance(value, list):
        return tuple(from_json(member, arrays, records) for member in value)
    if not isinstance(value, dict):
        return value
    readers: dict[frozenset[str], Callable[[Any], Any]] = {
        frozenset(["float"]): lambda node: float(node["float"]),
        frozenset(["array"]): lambda node: arrays[node["array"]],
        frozenset(["list"]): lambda node: [from_json(e, arrays, records) for e in node["list"]],
        frozenset(["dict"]): lambda node: {
            key: from_json(member, arrays, records) for key, member in node["dict"].items()
        },
        frozenset(["record", "fields"]): lambda node: records[node["record"]](
            **{key: from_json(member, arrays, records) for key, member in node["fields"].items()}
        ),
    }
    try:
        return readers[frozenset(value)](value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a state cannot be read: {error!r} in an object with the keys {sorted(value)}; it was "
            "saved with another predictor, policy or version of lbbsp"
        ) from None


def to_bytes(value: object) -> bytes:
    """Converts a state to bytes."""
    arrays: Arrays = {}
    text = json.dumps(to_json(value, arrays), allow_nan=False).encode()
    stream = io.BytesIO()
    np.savez(stream, **{_STATE: np.frombuffer(text, np.uint8), **arrays})
    return stream.getvalue()


def from_bytes(data: bytes, records: Records) -> Any:
    """Converts bytes back to a state; the inverse of `to_bytes`."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = dict(archive)
        text = arrays.pop(_STATE).tobytes()
    except Exception as error:  # damaged archives raise errors of a dozen types
        raise ValueError(f"a state cannot be read: {error!r}") from None
    return from_json(json.loads(text), arrays, records)


def _records_in(value: object) -> Iterator[object]:
    """Yields the records in a state."""
    names = _field_names(type(value))
    if names is not None:
        yield value
        for name in names:
            yield from _records_in(getattr(value, name))
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from _records_in(member)


def _field_names(kind: type) -> tuple[str, ...] | None:
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple(kind._fields)
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind) if field.init)
    return None


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
