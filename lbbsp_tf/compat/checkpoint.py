"""Patch with which `ModelCheckpoint` writes one file per job."""

from __future__ import annotations

import tempfile
from functools import wraps
from pathlib import Path

import keras

from lbbsp_tf.compat.values import is_patched, patched


def checkpoint_on_chief_only(rank: int) -> None:
    """Makes `ModelCheckpoint` write to its path on the chief only, elsewhere to a temporary folder.

    Every worker must run the save, because reading a variable that is averaged over workers is
    a collective. Concurrent writes to the same file would corrupt it (HDF5 rejects them).
    """
    checkpoint = keras.callbacks.ModelCheckpoint
    path_of = getattr(checkpoint, "_get_file_path", None)
    if rank == 0 or path_of is None or is_patched(path_of):
        return
    folder = tempfile.TemporaryDirectory(prefix="lbbsp-")

    @wraps(path_of)
    def private_path(self: keras.callbacks.Callback, *args: object, **kwargs: object) -> str:
        private = Path(folder.name) / Path(path_of(self, *args, **kwargs)).name
        return str(private)

    checkpoint._get_file_path = patched(private_path)
