"""Checkpoints of a gluon training: written regularly and before a preempted worker leaves."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lbbsp_core.runtime.checkpoint.checkpoint import (
    Checkpoint,
    newest_checkpoint,
    read_checkpoint,
    write_file,
)
from lbbsp_core.runtime.checkpoint.serialization import Arrays, Json
from lbbsp_core.runtime.checkpoint.session_state import check_same_job
from lbbsp_core.runtime.checkpoint.writer import (
    CheckpointWriter,
    Every,
    claim_folder,
    require_every,
)
from lbbsp_core.runtime.exchange.protocol import DisagreementError, fingerprint
from lbbsp_core.runtime.reliability.preemption import STATUS, PreemptionHandler
from lbbsp_core.validate import require_path
from lbbsp_mx.reliability.agreement import ends_epoch
from lbbsp_mx.reliability.gluon_states import PICKLE, load_gluon_states
from lbbsp_mx.reliability.states import (
    check_parameters,
    optimizer_state,
    parameter_arrays,
    read_optimizer,
    require_dense_weights,
    restore_parameters,
)

if TYPE_CHECKING:
    from lbbsp_core.runtime.loop.pipelined import PipelinedSession
    from lbbsp_mx.reliability.parts import TrainerParts

logger = logging.getLogger("lbbsp.mx")

_SESSION, _OPTIMIZER = "session: ", "optimizer: "  # in front of the names of arrays
_ORDER = "gluon's order of the parameters (by name)"


class Checkpoints:
    """Checkpoints of one trainer."""

    def __init__(
        self, trainer: TrainerParts, session: PipelinedSession, check_single: Callable[[], None]
    ) -> None:
        self._trainer, self._session = trainer, session
        self._check_single = check_single  # raises an error if several trainers share the batches
        self._preemption = PreemptionHandler(
            lambda: session.request_preemption(),
            is_idle=lambda: self._is_idle,
            save=self._save_alone,
            leave=self._leave_alone,
        )
        self._copying = threading.RLock()  # a thread may copy the state, which steps change
        self._writers: dict[Path, CheckpointWriter] = {}
        self._writer: CheckpointWriter | None = None  # of regular checkpoints
        self._has_warned = self._has_ended = False
        self._every: Every | None = None
        self._step = -1  # of the last regular checkpoint that was written, or of what was loaded
        self._unchecked: Checkpoint | None = None
        self._where: object = None

    @property
    def regular(self) -> bool:
        """True if checkpoints are written regularly."""
        return self._every is not None

    # Folder with the checkpoints of all workers

    def save(self, folder: str | Path) -> bool:
        """Writes a checkpoint; a collective. Returns whether this worker's part has succeeded."""
        self._check_single()
        self._session.check_state()
        writer = self._writer_to(folder)
        self._begin_save(folder)
        return writer.flush()

    def _begin_save(self, folder: str | Path, *, may_skip: bool = False) -> None:
        """Starts to write a checkpoint in the background; a collective.

        With `may_skip`, it is left out if the one before is still being written.
        """
        state, session_arrays = self._session.save_state()
        self._session.exclude_step()
        if may_skip and self._session.rank == 0 and self._writer_to(folder).is_busy:
            logger.debug("no checkpoint: the last one is still being written")
        elif self._session.rank == 0:
            self._start_write(self._writer_to(folder), state, session_arrays)

    def _start_write(self, writer: CheckpointWriter, state: Json, session_arrays: Arrays) -> None:
        """Starts to write a checkpoint; what cannot be saved is reported if it is a regular one."""
        try:
            with self._copying:
                writer.start(self._checkpoint(state, session_arrays, with_parameters=True))
                if writer is self._writer:
                    self._step = self._session.step
        except ValueError as error:
            if writer is not self._writer:
                raise
            log = logger.debug if self._has_warned else logger.warning
            log("no checkpoint, and the training continues: %s", error)
            self._has_warned = True

    def load(self, folder: str | Path) -> bool:
        """Continues from the newest complete checkpoint, if there is any; a collective."""
        self._check_single()
        for writer in self._writers.values():
            writer.flush()
        self._session.any_worker(False)  # the others read after the file is complete
        found = newest_checkpoint(folder)
        self._check_same_file(folder, found)
        if found is None:
            return False
        self._restore(folder, found)
        logger.info("continuing after step %d, from the checkpoint in %s", found.step, folder)
        return True

    def resume(self, folder: str | Path, every: Every) -> bool:
        """Loads the newest checkpoint, then writes one regularly, and before this worker leaves."""
        require_path("folder", folder)
        require_every(every, folder)
        self._session.check_state()
        require_dense_weights(self._trainer.params)
        optimizer_state(self._trainer)  # raises an error now, if it cannot be saved
        writer = self._writer_to(folder)
        found = self.load(folder)
        self._writer = writer
        self._step = self._session.step
        self._every = every
        self.begin_training()
        return found

    def begin_training(self) -> None:
        """Waits for SIGTERM from now on, if checkpoints are written regularly."""
        if self.regular:
            self._preemption.open()

    def begin_step(self) -> None:
        """Leaves, with a checkpoint, if a worker was asked to before the end of the last step."""
        with self._copying:
            pass  # a step must not change the state that a thread still copies
        if self._writer is not None and self._session.preempted:
            self._leave(self._writer)

    def end_step(self, step: int) -> None:
        """Writes a checkpoint if one is due after `step`; leaves after an epoch, if asked to."""
        is_last = ends_epoch(self._session, step)
        if is_last and self._writer is not None:
            self._leave_if_asked(self._writer)
        if is_last:
            self._session.in_epoch = False
        if self._writer is None:
            return
        if is_last if self._every == "epoch" else (step + 1) % int(self._every or 1) == 0:
            self._begin_save(self._writer.folder, may_skip=True)

    def end_training(self) -> None:
        """Writes the last checkpoint of a training, and lets SIGTERM end the process again."""
        if self._writer is None:
            return
        self._leave_if_asked(self._writer)
        if self._session.any_worker(self._has_news):
            self._begin_save(self._writer.folder)
        self._flush(self._writer)
        self._preemption.close(leaves=self._session.preemption_requested)

    def close(self) -> None:
        """Lets SIGTERM end the process again, because the script has ended.

        One that has arrived before ends it if the other workers let it wait.
        """
        self._has_ended = True
        if not self._session.preemption_requested:
            self._preemption.close()

    @property
    def _is_idle(self) -> bool:
        """True between epochs, of which none may follow."""
        return self._has_ended or (self._session.order is not None and not self._session.in_epoch)

    @property
    def _has_news(self) -> bool:
        """True on the worker that writes, if the last checkpoint is of an earlier step."""
        return self._session.rank == 0 and self._step != self._session.step

    def _leave_if_asked(self, writer: CheckpointWriter) -> None:
        """Leaves if any worker was asked to; a collective between two steps."""
        preempted = self._session.preempted  # passes the last barrier, before another collective
        if self._session.any_worker(preempted or self._session.preemption_requested):
            self._leave(writer)

    def _leave(self, writer: CheckpointWriter) -> NoReturn:
        """Writes a checkpoint, and ends this process, as all others do; a collective."""
        session, folder = self._session, writer.folder
        self._begin_save(folder)
        # No worker leaves before the file is complete: its absence would be noticed.
        failed = session.any_worker(not self._flush(writer) or self._has_news)
        print(
            f"lbbsp: worker {session.rank} leaves before step {session.step}, because a worker got "
            f"SIGTERM: start the job again to continue from the checkpoint in {folder}"
            + (", which is of an earlier step because none could be written" if failed else ""),
            file=sys.stderr,
        )
        self._preemption.close()
        sys.exit(STATUS)

    def _save_alone(self) -> None:
        """Writes a checkpoint without the other workers, who take part in steps only.

        It lacks what they know of their speeds.
        """
        with self._copying:
            if self._writer is not None and self._is_idle and self._has_news:
                self._start_write(self._writer, *self._session.own_state())

    def _leave_alone(self) -> bool:
        """Waits until the checkpoint is written; returns whether no step can begin any more."""
        self._copying.acquire()  # for good, if the process ends
        if not self._is_idle:
            self._copying.release()
            return False
        if self._writer is not None:
            failed = "" if self._flush(self._writer) else " (none could be written now)"
            print(
                f"lbbsp: worker {self._session.rank} leaves before step {self._session.step}, "
                "because it got SIGTERM, and no step has followed; the last checkpoint is in "
                f"{self._writer.folder}{failed}",
                file=sys.stderr,
            )
        return True

    def _flush(self, writer: CheckpointWriter) -> bool:
        """Waits for the end of a write; returns whether it has succeeded."""
        succeeded = writer.flush()
        if not succeeded and writer is self._writer:
            self._step = -1  # it is to be written again
        return succeeded

    # File with the states of one worker

    def save_file(self, path: str | Path) -> None:
        """Writes the states of the optimizer and of this worker's balancer, without weights."""
        state, arrays = self._session.own_state()
        write_file(path, self._checkpoint(state, arrays, with_parameters=False))
        self._session.exclude_step()

    def load_file(self, path: str | Path) -> None:
        """Continues from the states of `save_file`, or from those of gluon's own trainer."""
        with Path(path).open("rb") as stream:
            is_of_gluon = stream.read(1) == PICKLE
        if is_of_gluon:
            self._load_gluon(path)
        else:
            self._restore(path, read_checkpoint(path))

    def _load_gluon(self, path: str | Path) -> None:
        """Continues from the optimizer of gluon's own trainer; a collective."""
        order = self._trainer.order
        self._session.check_same(_ORDER, fingerprint(repr(order)))
        load_gluon_states(self._trainer, Path(path).read_bytes(), order, path)
        self._session.exclude_step()

    # Both

    def check_order(self) -> None:
        """Checks that the order, which is new, is that of the state that was loaded before it."""
        if self._unchecked is not None and self._unchecked.step == self._session.step:
            check_same_job(self._where, self._unchecked.facts, self._facts())
        self._unchecked = None

    def _writer_to(self, folder: str | Path) -> CheckpointWriter:
        """Returns the writer to a folder, which worker 0 claims; a collective the first time."""
        folder = Path(folder)
        if folder not in self._writers:
            writer, problem = CheckpointWriter(folder), ""
            try:
                if self._session.rank == 0:
                    claim_folder(folder.resolve())
            except ValueError as error:
                problem = str(error)
            if self._session.any_worker(bool(problem)):
                raise ValueError(problem or f"another job writes to {folder}: see worker 0")
            self._writers[folder] = writer
        return self._writers[folder]

    def _facts(self) -> dict[str, Json]:
        return {**self._session.facts(), "mean_loss": self._trainer.mean_loss}

    def _checkpoint(
        self, session_state: Json, session_arrays: Any, *, with_parameters: bool
    ) -> Checkpoint:
        optimizer, optimizer_arrays = optimizer_state(self._trainer)
        arrays = {
            **{_SESSION + name: each for name, each in session_arrays.items()},
            **{_OPTIMIZER + name: each for name, each in optimizer_arrays.items()},
            **(parameter_arrays(self._trainer.params) if with_parameters else {}),
        }
        state: Json = {"session": session_state, "optimizer": optimizer}
        return Checkpoint(self._session.step, self._facts(), state, arrays)

    def _restore(self, where: str | Path, found: Checkpoint) -> None:
        """Continues from a checkpoint; nothing changes if it is of another job."""
        state, arrays = found.state, found.arrays
        if not isinstance(state, dict) or not {"session", "optimizer"} <= set(state):
            raise ValueError(f"{where} is no checkpoint of lbbsp_mx: choose another folder or file")
        has_session = state["session"] is not None  # it was saved with a global batch size
        here = self._facts() if has_session else _common(self._facts(), found.facts)
        known = found.facts if self._session.order is not None else _common(found.facts, here)
        check_same_job(where, known, here)
        weights = {name: each for name, each in arrays.items() if name.startswith("parameter ")}
        params = self._trainer.params
        if weights:
            check_parameters(where, params, weights)
        restore = read_optimizer(self._trainer, state["optimizer"], _named(arrays, _OPTIMIZER))
        if weights:
            restore_parameters(params, weights)  # gluon may drop its store, and its optimizer
            self._trainer.send()
        restore()
        if has_session:
            self._session.load_state(state["session"], _named(arrays, _SESSION))
        self._unchecked = found if has_session and self._session.order is None else None
        self._where = where
        self._step = found.step

    def _check_same_file(self, folder: str | Path, found: Checkpoint | None) -> None:
        """Checks that all workers have read the same checkpoint; a collective."""
        step = -1 if found is None else found.step
        content = fingerprint(repr(found and (found.facts, found.state)))
        rows = self._session.collectives.all_gather([step + 1, content])
        if any(row != rows[0] for row in rows):
            steps = ", ".join(
                f"worker {rank} {f'that of step {after - 1}' if after else 'none'}"
                for rank, (after, _) in enumerate(rows)
            )
            raise DisagreementError(
                f"the workers find different checkpoints in {folder} ({steps}): use a folder that "
                "all workers share"
            )


def _named(arrays: Any, prefix: str) -> dict[str, Any]:
    """Returns the arrays with a prefix, without it."""
    return {n.removeprefix(prefix): each for n, each in arrays.items() if n.startswith(prefix)}


def _common(facts: Any, here: Any) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name in here}
