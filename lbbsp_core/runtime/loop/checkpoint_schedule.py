"""When a training writes checkpoints, and when it leaves with one: the same for all plugins.

Checkpoints are written every some steps or after each epoch, when a worker got SIGTERM (all workers
then leave together), and at the end of the training; by a background thread, into a folder that one
job at a time claims.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn, TypeAlias

from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint, write_checkpoint
from lbbsp_core.runtime.exchange.handshake import Identity
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.reliability.liveness import print_message
from lbbsp_core.runtime.reliability.preemption import STATUS, PreemptionHandler
from lbbsp_core.validate import require_path

logger = logging.getLogger("lbbsp.checkpoint")

Every: TypeAlias = 'int | Literal["epoch"]'  # steps between two checkpoints, or after each epoch


@dataclass(eq=False)
class CheckpointSchedule:
    """Schedule of the checkpoints of one training. Before `use`, its events have no effect.

    A plugin passes the events of a training on, which are the same on all workers.

    Args:
        session: Session of this worker.
        requests: Its extension that tells the others of a SIGTERM.
        collect: Returns the state of all workers; a collective. With False, this worker does not
            write it, so that nothing need be copied. None if the state cannot be saved now.
        report_exit: Says that this worker leaves; with True, its last checkpoint has failed.
        is_idle: Returns whether no step may follow. A thread then saves what `collect_own` returns,
            the state of this worker without a collective, and ends the process if none does.
    """

    session: WorkerSession
    requests: Stopping
    collect: Callable[[bool], Checkpoint | None]
    report_exit: Callable[[bool], None]
    is_idle: Callable[[], bool] = lambda: False
    collect_own: Callable[[], Checkpoint | None] | None = None

    def __post_init__(self) -> None:
        self._preemption = PreemptionHandler(
            lambda: self.requests.request_preemption(),
            is_idle=self._is_idle if self.collect_own else None,
            save=self._save_alone,
            leave=self._leave_alone,
        )
        self._copying = threading.RLock()  # a thread may copy the state, which steps change
        self._has_ended = self._leaves = False
        self._every: Every | None = None
        self.written = -1
        """Step of the last checkpoint that was written, or from which the training continues."""

    @property
    def regular(self) -> bool:
        """True after `use`."""
        return self._every is not None

    def use(self, writer: CheckpointWriter, every: Every, written: int = -1) -> None:
        """Writes checkpoints from now on, the first one at another step than `written`."""
        self.writer = writer
        self._every, self.written = every, written

    def open(self, *, alone: bool = False) -> None:
        """Handles SIGTERM from now on, see `PreemptionHandler.open`."""
        if self.regular:
            self._preemption.open(alone=alone)

    def leave_if_preempted(self) -> None:
        """Leaves if a worker was asked to before the end of the last step; call it after steps."""
        self.begin_step()
        if self._leaves:
            self.leave()

    def begin_step(self) -> None:
        """Begins a step, after which this worker leaves if one was asked to before the last ended.

        It does not leave now, when a part of the step may already have changed the model; but if
        the step before has not ended, which is a script's way to leave an update out, it does.
        """
        with self._copying:
            pass  # a step must not change the state that a thread still copies
        is_asked = self.regular and self._is_preempted
        if is_asked and self._leaves:
            self.leave()
        self._leaves = is_asked

    def end_step(self, completed: int, *, ends_epoch: bool = False) -> None:
        """Leaves if asked; writes a checkpoint if one is due after so many steps."""
        if self._every is None:
            return
        if self._leaves:
            self.leave()
        if ends_epoch:
            self._leave_if_asked()
        if ends_epoch if self._every == "epoch" else completed % self._every == 0:
            self.save(may_skip=True)

    def end(self, *, always: bool = False) -> None:
        """Writes the last checkpoint of a training; SIGTERM then ends the process until `open`.

        With `always`, also if one of the same step exists.
        """
        if self.regular:
            self._leave_if_asked()
            if always or self.session.any_worker(self._has_news):
                self.save()
            self.flush()
            self.pause()

    def pause(self) -> None:
        """Lets SIGTERM end the process, now if one has come too late to leave together."""
        self._preemption.close(leaves=self.requests.preemption_requested)

    def close(self) -> None:
        """Lets SIGTERM end the process, since the script has ended; one before it still may."""
        self._has_ended = True
        if not self.requests.preemption_requested:
            self._preemption.close()

    def save(self, *, may_skip: bool = False) -> None:
        """Starts to write a checkpoint in the background, after the one before; a collective.

        With `may_skip`, it is left out if that one is still being written.
        """
        writes = self.session.rank == 0 and not (may_skip and self.writer.is_busy)
        with self._copying:
            self._write(self.collect(writes))

    def flush(self) -> bool:
        """Waits for the end of a write; returns whether it has succeeded."""
        if not self.writer.flush():
            self.written = -1  # it is to be written again
            return False
        return True

    def leave(self) -> NoReturn:
        """Writes a checkpoint, and ends this process, as all others do; a collective."""
        self.save()
        # No worker leaves before the file is complete: its absence would be noticed.
        self.report_exit(self.session.any_worker(not self.flush() or self._has_news))
        self._preemption.close()
        sys.exit(STATUS)

    def _leave_if_asked(self) -> None:
        """Leaves if any worker was asked to; a collective between two steps."""
        preempted = self._is_preempted  # passes the last barrier, before another collective
        if self.session.any_worker(preempted or self.requests.preemption_requested):
            self.leave()

    @property
    def _is_preempted(self) -> bool:
        """True if a worker must leave, known after the last barrier, which `step` passes."""
        return self.session.step >= 0 and self.requests.preempted

    @property
    def _has_news(self) -> bool:
        """True on the worker that writes, if the last checkpoint is of an earlier step."""
        return self.session.rank == 0 and self.written != self.session.step

    def _write(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            self.writer.start(checkpoint)
            self.written = checkpoint.step

    # On the thread of the handler, without the other workers, who take part in steps only

    def _is_idle(self) -> bool:
        return self._has_ended or self.is_idle()

    def _save_alone(self) -> None:
        """Writes a checkpoint, which lacks what the other workers know of their speeds."""
        with self._copying:
            if self.collect_own and self._is_idle() and self._has_news:
                self._write(self.collect_own())

    def _leave_alone(self) -> bool:
        """Waits until the checkpoint is written; returns whether no step can begin any more."""
        self._copying.acquire()  # for good, if the process ends
        if not self._is_idle():
            self._copying.release()
            return False
        failed = "" if self.flush() else " (none could be written now)"
        print_message(
            f"worker {self.session.rank} leaves before step {self.session.step}, because it got "
            "SIGTERM, and no step has followed; the last checkpoint is in "
            f"{self.writer.folder}{failed}"
        )
        return True


def require_every(every: object, folder: object) -> None:
    """Raises an error unless checkpoints can be written at such intervals."""
    if every == "epoch":
        return
    if not isinstance(every, Integral) or isinstance(every, bool) or every < 1:
        raise ValueError(
            f"every must be 'epoch' or a number of steps >= 1, got {every!r}: for example 100"
        )
    if folder is None:
        raise ValueError(
            f"every = {every} has no effect without a folder of checkpoints: pass checkpoint=, too"
        )


_claimed: dict[Path, BinaryIO] = {}
"""Files that stay open, by the folder that this process has claimed."""


def claim_folder(folder: Path) -> BinaryIO | None:
    """Takes a folder of checkpoints for this process, until it ends in whatever way.

    The system holds the lock, which stays when the file is read and closed, as by a copy of the
    folder; a process that is forked does not get it. Where the file system has no locks, or the
    folder cannot be written to, nothing is claimed. Raises ValueError if another process has
    claimed it; names this process and its host. A folder that was removed is taken again.
    """
    if folder in _claimed and (folder / "lock").exists():
        return _claimed[folder]
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+b", buffering=0)
    except (ImportError, OSError):
        return None  # the first write will tell
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

    def release() -> None:
        _claimed.pop(folder, None)
        file.close()

    os.register_at_fork(after_in_child=release)
    with suppress(OSError):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {Identity.here().host}".encode())
    _claimed[folder] = file
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
            if (folder := self.folder.resolve()) in _claimed:
                claim_folder(folder)
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
