"""When a training writes checkpoints, and when it leaves with one: the same for all plugins.

Checkpoints are written every some steps or after each epoch, when a worker got SIGTERM (all workers
then leave together), and at the end of the training.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint
from lbbsp_core.runtime.checkpoint.writer import CheckpointWriter, Every
from lbbsp_core.runtime.reliability.preemption import STATUS, PreemptionHandler


@dataclass(eq=False)
class CheckpointSchedule:
    """Schedule of the checkpoints of one training. Before `use`, its events have no effect.

    A plugin passes the events of a training on, which are the same on all workers.

    Args:
        session: The `WorkerSession` of this worker.
        requests: Its part that tells the others of a SIGTERM: `request_preemption()`,
            `preemption_requested` of this worker, `preempted` of any.
        collect: Returns the state of all workers; a collective. With False, this worker does not
            write it, so that nothing need be copied. None if the state cannot be saved now.
        say_left: Says that this worker leaves; with True, its last checkpoint has failed.
        is_idle: Returns whether no step may follow. A thread then saves what `collect_own` returns,
            the state of this worker without a collective, and ends the process if none does.
    """

    session: Any
    requests: Any
    collect: Callable[[bool], Checkpoint | None]
    say_left: Callable[[bool], None]
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
        self._has_ended = False
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
        """Leaves if a worker was asked to before the end of the last step; call it in each step."""
        with self._copying:
            pass  # a step must not change the state that a thread still copies
        if self.regular and self._is_preempted:
            self.leave()

    def end_step(self, completed: int, *, ends_epoch: bool = False) -> None:
        """Writes a checkpoint if one is due after so many steps; leaves after an epoch if asked."""
        if self._every is None:
            return
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
        self.say_left(self.session.any_worker(not self.flush() or self._has_news))
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
        return self.session.step >= 0 and bool(self.requests.preempted)

    @property
    def _has_news(self) -> bool:
        """True on the worker that writes, if the last checkpoint is of an earlier step."""
        return bool(self.session.rank == 0 and self.written != self.session.step)

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
        print(
            f"lbbsp: worker {self.session.rank} leaves before step {self.session.step}, because "
            "it got SIGTERM, and no step has followed; the last checkpoint is in "
            f"{self.writer.folder}{failed}",
            file=sys.stderr,
        )
        return True
