"""Patches with which a job leaves one event folder and one file of each kind, all of them whole.

Every worker runs all callbacks, and every worker must, because reading a variable that is averaged
over workers is a collective. On workers other than the chief, Keras's own callbacks write to a
temporary folder. Files that user code saves itself are replaced as a whole, so that workers that
save to the same path do not mix their writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import keras

from lbbsp_core.runtime.marks import scratch_folder
from lbbsp_tf.compat.values import patch

_PATHS: dict[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.ModelCheckpoint: ("filepath",),
    keras.callbacks.TensorBoard: ("log_dir",),
    keras.callbacks.CSVLogger: ("filename",),
    keras.callbacks.BackupAndRestore: (
        "backup_dir",
        "_weights_path",
        "_training_metadata_path",
        "_prev_weights_path",
        "_prev_training_metadata_path",
    ),
}
"""Attributes of Keras's callbacks with the paths to which they write."""


def write_once_per_job(rank: int) -> None:
    """Makes Keras's callbacks write to their paths on the chief only, and saves atomic."""
    for name in ("save", "save_weights"):
        patch(keras.Model, name, partial(_save_atomically, rank))
    if rank == 0:
        return
    folder = cache(scratch_folder)  # created for the first callback that writes
    patch(keras.Model, "export", partial(_export_elsewhere, folder))
    keras.callbacks.RemoteMonitor.on_epoch_end = keras.callbacks.Callback.on_epoch_end
    for callback, attributes in _PATHS.items():
        patch(callback, "set_model", partial(_redirect, attributes, folder))


def _redirect(
    attributes: tuple[str, ...],
    folder: Callable[[], Path],
    set_model: Callable[..., None],
    callback: keras.callbacks.Callback,
    model: keras.Model,
) -> None:
    """Replaces a callback's `set_model`, which runs before it reads its paths."""
    for attribute in attributes:
        setattr(callback, attribute, _elsewhere(vars(callback)[attribute], folder()))
    set_model(callback, model)


def _export_elsewhere(
    folder: Callable[[], Path],
    export: Callable[..., None],
    model: keras.Model,
    filepath: str | Path,
    *args: object,
    **options: object,
) -> None:
    """Replaces the export of a model, in which all workers must take part."""
    export(model, _elsewhere(filepath, folder()), *args, **options)


def _elsewhere(path: str | Path, folder: Path) -> str:
    """Returns a path in `folder`, whose own folder exists, for one that may be outside."""
    if Path(path).is_relative_to(folder):
        return str(path)
    path = Path(folder, *Path(path).absolute().parts[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)


def _save_atomically(
    rank: int,
    save: Callable[..., None],
    model: keras.Model,
    filepath: str | Path,
    overwrite: bool = True,
    *args: object,
    **options: object,
) -> None:
    """Replaces a method that saves a file, so that the file appears complete or not at all."""
    path = Path(os.fspath(filepath))
    if not overwrite or args or options or "://" in str(filepath):
        save(model, filepath, overwrite, *args, **options)
        return
    partial_file = path.with_name(f".{rank}-{os.getpid()}-{path.name}")
    try:
        save(model, str(partial_file), overwrite)
        os.replace(partial_file, path)
    finally:
        partial_file.unlink(missing_ok=True)
