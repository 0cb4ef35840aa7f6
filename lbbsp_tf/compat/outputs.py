"""Patches with which a job leaves one event folder and one file of each kind, all of them whole.

Every worker runs all callbacks, and every worker must, because reading a variable that is averaged
over workers is a collective. On workers other than the chief, Keras's own callbacks write to a
temporary folder. Files that user code saves itself are replaced as a whole, so that workers that
save to the same path do not mix their writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.checkpoint.checkpoint import TrackableSaver

from lbbsp_core.runtime.reliability.marks import scratch_folder
from lbbsp_tf.compat.values import Method, patch

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
        patch(keras.Model, name, _save_file)
    patch(TrackableSaver, "save", _save_checkpoint)
    tf.get_logger().addFilter(_is_not_of_deleted)
    if rank == 0:
        return
    folder = cache(scratch_folder)  # created for the first callback that writes

    def redirected(path: str | Path) -> str:
        """Returns a path in the folder, whose own folder exists, for one that may be outside."""
        if Path(path).is_relative_to(folder()):
            return str(path)
        path = Path(folder(), *Path(path).absolute().parts[1:])
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path)

    def export_redirected(
        export: Method, model: keras.Model, filepath: str, *args: Any, **options: Any
    ) -> None:
        export(model, redirected(filepath), *args, **options)  # in which all workers must take part

    def redirecting(attributes: tuple[str, ...]) -> Method:
        def set_model(set_model: Method, callback: keras.callbacks.Callback, model: Any) -> None:
            for attribute in attributes:  # before the callback reads its paths
                setattr(callback, attribute, redirected(vars(callback)[attribute]))
            set_model(callback, model)

        return set_model

    patch(keras.Model, "export", export_redirected)
    keras.callbacks.RemoteMonitor.on_epoch_end = keras.callbacks.Callback.on_epoch_end
    for callback, attributes in _PATHS.items():
        patch(callback, "set_model", redirecting(attributes))


@contextmanager
def _replacing(path: Path) -> Iterator[str]:
    """Yields the path in a folder of its own, whose files then replace those beside `path`."""
    with TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        yield str(Path(folder, path.name))
        for file in sorted(Path(folder).iterdir()):  # the data of a checkpoint, then their index
            file.replace(path.with_name(file.name))


def _save_file(
    save: Method, model: keras.Model, filepath: str, overwrite: bool = True, *args: Any, **kw: Any
) -> None:
    """Replaces a method that saves a file, so that the file appears complete or not at all."""
    if not overwrite or args or kw or "://" in str(filepath):
        save(model, filepath, overwrite, *args, **kw)
        return
    with _replacing(Path(os.fspath(filepath))) as hidden:
        save(model, hidden, overwrite)


def _save_checkpoint(save: Method, saver: TrackableSaver, file_prefix: str, **options: Any) -> Any:
    """Does the same for TensorFlow's checkpoints, the names of whose files begin with a prefix."""
    if not isinstance(file_prefix, str) or "://" in file_prefix:
        return save(saver, file_prefix, **options)
    path = Path(file_prefix)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as hidden:
        save(saver, hidden, **options)
    return file_prefix


def _is_not_of_deleted(record: logging.LogRecord) -> bool:
    # Of a `CheckpointManager` whose old file another worker has deleted.
    return "Hit NotFoundError when deleting" not in record.getMessage()
