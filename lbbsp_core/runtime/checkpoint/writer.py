"""Writing of checkpoints on a background thread, off the critical path of the training."""

from __future__ import annotations

import functools
import logging
import os
import threading
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint, write_checkpoint
from lbbsp_core.runtime.exchange.handshake import Identity
from lbbsp_core.validate import require_path

logger = logging.getLogger("lbbsp.checkpoint")

Every: TypeAlias = 'int | Literal["epoch"]'  # steps between two checkpoints, or after each epoch


def require_every(every: object, folder: object) -> None:
    """Raises an error unless checkpoints can be written at such intervals."""
    if every == "epoch":
        return
    if not isinstance(every, Integral) or every < 1:
        raise ValueError(
            f"every must be 'epoch' or a number of steps >= 1, got {every!r}: for example 100"
        )
    if folder is None:
        raise ValueError(
            f"every = {every} has no effect without a folder of checkpoints: pass checkpoint=, too"
        )


@functools.cache  # its file stays open
def claim_folder(folder: Path) -> BinaryIO | None:
    """Takes a folder of checkpoints for this process, until it ends in whatever way.

    The system holds the lock, and a process that is forked does not get it. Where the file system
    has no locks, or the folder cannot be written to, nothing is claimed. Raises ValueError if
    another process has claimed it; names this process and its host.
    """
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+b", buffering=0)
    except (ImportError, OSError):
        return None  # the first write will tell
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        with file:
            file.seek(0)
            owner = file.read().decode(errors="replace") or "another process"
        raise ValueError(
            f"{owner} writes its checkpoints to {folder}: give each job a folder of its own, or "
            f"wait until that one has ended (if its machine is gone, remove {folder / 'lock'})"
        ) from None
    except OSError as error:
        logger.debug("%s cannot be locked: %s", folder, error)
    with suppress(OSError):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {Identity.here().host}".encode())
    return file


class CheckpointWriter:
    """Writer of the checkpoints of a job, at most one at a time.

    A write that fails (disk full, no permission) is reported once and does not end the training;
    the checkpoints written before stay complete.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = require_path("checkpoint", folder)
        self._thread: threading.Thread | None = None
        self._succeeded = True
        self._warned = False

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, checkpoint: Checkpoint) -> None:
        """Starts to write a checkpoint, whose arrays must not change, after the write before."""
        self.flush()
        # No daemon: a process that ends waits for it.
        self._thread = threading.Thread(
            target=self._write, args=(checkpoint,), name="lbbsp-checkpoint"
        )
        self._thread.start()

    def flush(self) -> bool:
        """Waits for the end of the write, and returns whether the last one has succeeded."""
        if self._thread is not None:
            self._thread.join()
        return self._succeeded

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            write_checkpoint(self.folder, checkpoint)
            self._succeeded = True
        except Exception as error:
            self._succeeded = False
            log = logger.debug if self._warned else logger.warning
            log(
                "the checkpoint of step %d cannot be written to %s (%s): the training continues, "
                "and further failures are not reported",
                checkpoint.step,
                self.folder,
                error,
            )
            self._warned = True
