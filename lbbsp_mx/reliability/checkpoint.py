"""Checkpoints of a gluon training: written regularly and before a preempted worker leaves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mxnet import gluon

from lbbsp_core.runtime.checkpoint import checkpoint as files
from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint, Json
from lbbsp_core.runtime.exchange.protocol import DisagreementError, fingerprint
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.loop.checkpoint_schedule import (
    CheckpointSchedule,
    CheckpointWriter,
    Every,
    claim_folder,
    require_every,
)
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_core.runtime.loop.session_state import check_same_job, check_states, warn_of_changes
from lbbsp_core.runtime.reliability.liveness import print_message
from lbbsp_core.validate import require_path
from lbbsp_mx.reliability import states
from lbbsp_mx.reliability.agreement import ends_epoch

logger = logging.getLogger("lbbsp.mx")

_SESSION, _OPTIMIZER = "session: ", "optimizer: "  # in front of the names of arrays
_FROM_CHECKPOINT = (
    "the value in the checkpoint counts; to take another one, call trainer.set_learning_rate, or "
    "assign it to trainer.optimizer, after the checkpoint is loaded"
)
_PICKLE = b"\x80"  # first byte of the files of gluon's own trainer


class Checkpoints:
    """Checkpoints of one trainer."""

    def __init__(self, trainer: gluon.Trainer) -> None:
        session: PipelinedSession = trainer._session
        self._trainer, self._session = trainer, session
        self.schedule = CheckpointSchedule(
            session, session.extensions[Stopping], self._collect_regular, self._report_exit,
            is_idle=lambda: session.order is not None and not session.in_epoch,
            collect_own=lambda: self._or_warn(*session.save_state(alone=True)),
        )  # fmt: skip
        self._writers: dict[Path, CheckpointWriter] = {}
        self._has_warned = False
        self._given = states.given_settings(trainer)
        self._unchecked: tuple[object, Checkpoint] | None = None  # whence, and what was loaded

    # Folder with the checkpoints of all workers

    def save(self, folder: str | Path) -> bool:
        """Writes a checkpoint; a collective. Returns whether this worker's part has succeeded."""
        self._trainer._steps.check_single()
        check_states(self._session.balancer)
        writer = self._writer_to(folder)
        if self.schedule.regular and writer is self.schedule.writer:
            self.schedule.save()
        else:
            state = self._session.save_state()
            self._session.exclude_step()
            if self._session.rank == 0:
                writer.start(self._checkpoint(*state))
        return writer.flush()

    def load(self, folder: str | Path) -> bool:
        """Continues from the newest complete checkpoint, if there is any; a collective."""
        self._trainer._steps.check_single()
        for writer in self._writers.values():
            writer.flush()
        self._session.any_worker(False)  # the others read after the file is complete
        checkpoint = files.newest_checkpoint(folder)
        self._check_same_file(folder, checkpoint)
        if checkpoint is None:
            return False
        self._restore(folder, checkpoint)
        logger.info("continuing after step %d, from the checkpoint in %s", checkpoint.step, folder)
        return True

    def resume(self, folder: str | Path, every: Every) -> bool:
        """Loads the newest checkpoint, then writes one regularly, and before this worker leaves."""
        require_path("folder", folder)
        require_every(every, folder)
        check_states(self._session.balancer)
        states.require_dense_weights(self._trainer._params)
        states.optimizer_state(self._trainer)  # raises an error now, if it cannot be saved
        writer = self._writer_to(folder)
        has_checkpoint = self.load(folder)
        self.schedule.use(writer, every, self._session.step)
        self.schedule.open()
        return has_checkpoint

    def end_step(self, step: int) -> None:
        """Writes a checkpoint if one is due after `step`; leaves after an epoch, if asked to."""
        is_last = ends_epoch(self._session, step)
        self.schedule.end_step(step + 1, ends_epoch=is_last)
        if is_last:
            self._session.in_epoch = False

    def _collect_regular(self, writes: bool) -> Checkpoint | None:
        state = self._session.save_state()
        self._session.exclude_step()
        return self._or_warn(*state) if writes else None

    def _or_warn(self, *session: Any) -> Checkpoint | None:
        """Returns a regular checkpoint; if the state cannot be saved, says so once."""
        try:
            return self._checkpoint(*session)
        except ValueError as error:
            log = logger.debug if self._has_warned else logger.warning
            log("no checkpoint, and the training continues: %s", error)
            self._has_warned = True
            return None

    def _report_exit(self, failed: bool) -> None:
        earlier = ", which is of an earlier step because none could be written" * failed
        print_message(
            f"worker {self._session.rank} leaves before step {self._session.step}, because a "
            "worker got SIGTERM: start the job again to continue from the checkpoint in "
            f"{self.schedule.writer.folder}{earlier}"
        )

    # File with the states of one worker

    def save_file(self, path: str | Path) -> None:
        """Writes the states of the optimizer and of this worker's balancer, without weights."""
        state = self._session.save_state(alone=True)
        files.write_file(path, self._checkpoint(*state, with_parameters=False))
        self._session.exclude_step()

    def load_file(self, path: str | Path) -> None:
        """Continues from the states of `save_file`."""
        with Path(path).open("rb") as stream:
            if stream.read(1) == _PICKLE:
                raise ValueError(
                    f"{path} is a pickle, as gluon's own Trainer.save_states writes, and was not "
                    "read, because a pickle can execute code: load the parameters alone, so that "
                    "the optimizer's state begins anew, or save it by lbbsp_mx.Trainer.save_states"
                )
        self._restore(path, files.read_checkpoint(path))

    # Both

    def check_order(self) -> None:
        """Checks that the order, which is new, is that of the state that was loaded before it."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None and unchecked[1].step == self._session.step:
            check_same_job(unchecked[0], unchecked[1].facts, self._facts())

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
        self, session_state: Json, session_arrays: Any, *, with_parameters: bool = True
    ) -> Checkpoint:
        optimizer, optimizer_arrays = states.optimizer_state(self._trainer)
        arrays = states.parameter_arrays(self._trainer._params) if with_parameters else {}
        arrays |= {_SESSION + name: array for name, array in session_arrays.items()}
        arrays |= {_OPTIMIZER + name: array for name, array in optimizer_arrays.items()}
        state: Json = {"session": session_state, "optimizer": optimizer, "given": {**self._given}}
        return Checkpoint(self._session.step, self._facts(), state, arrays)

    def _restore(self, where: str | Path, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint; nothing changes if it is of another job."""
        state, arrays = checkpoint.state, checkpoint.arrays
        if not isinstance(state, dict) or not {"session", "optimizer"} <= set(state):
            raise ValueError(f"{where} is no checkpoint of lbbsp_mx: choose another folder or file")
        has_session = state["session"] is not None  # it was saved with a global batch size
        here = self._facts() if has_session else _common(self._facts(), checkpoint.facts)
        facts = (
            checkpoint.facts if self._session.order is not None else _common(checkpoint.facts, here)
        )
        check_same_job(where, facts, here)
        weights, params = _named(arrays, states.PARAMETER), self._trainer._params
        if weights:
            states.check_parameters(where, params, weights)
        optimizer_arrays = _named(arrays, _OPTIMIZER)
        restore = states.read_optimizer(self._trainer, state["optimizer"], optimizer_arrays)
        if weights:
            states.restore_parameters(params, weights)  # gluon may drop its store and optimizer
            self._trainer._send_known()
        restore()
        if self._session.rank == 0 and isinstance(settings := state.get("given"), dict):
            warn_of_changes(settings, self._given, lambda _: _FROM_CHECKPOINT)
        if has_session:
            self._session.load_state(state["session"], _named(arrays, _SESSION))
        is_unchecked = has_session and self._session.order is None
        self._unchecked = (where, checkpoint) if is_unchecked else None
        self.schedule.written = checkpoint.step

    def _check_same_file(self, folder: str | Path, checkpoint: Checkpoint | None) -> None:
        """Checks that all workers have read the same checkpoint; a collective."""
        after = 0 if checkpoint is None else checkpoint.step + 1
        content = fingerprint(repr(checkpoint and (checkpoint.facts, checkpoint.state)))
        rows = self._session.collectives.all_gather([after, content])
        if any(row != rows[0] for row in rows):
            steps = ", ".join(str(after - 1) if after else "none" for after, _ in rows)
            raise DisagreementError(
                f"the workers find different checkpoints in {folder} (of steps {steps}, by rank): "
                "use a folder that all workers share"
            )


def _named(arrays: Any, prefix: str) -> dict[str, Any]:
    """Returns the arrays with a prefix, without it."""
    return {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}


def _common(facts: Any, here: Any) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name in here}
