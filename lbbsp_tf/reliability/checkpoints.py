"""Checkpoints of `fit`: written at the same step on all workers, exact at the step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import keras
import tensorflow as tf

from lbbsp_core.runtime.checkpoint.checkpoint import (
    Arrays,
    Checkpoint,
    Json,
    from_json,
    newest_checkpoint,
    to_json,
)
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.loop.checkpoint_schedule import (
    CheckpointSchedule,
    CheckpointWriter,
    Every,
    claim_folder,
)
from lbbsp_core.runtime.loop.session_state import check_same_job, check_states, warn_of_changes
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_tf import compat
from lbbsp_tf.data.feed import TrainingInput
from lbbsp_tf.exchange.collectives import ReplicaSessions, mirrored_collectives
from lbbsp_tf.reliability.model_state import ModelState, share_checkpoint

logger = logging.getLogger("lbbsp.checkpoint")

_owners: dict[Path, weakref.ref[Checkpoints]] = {}  # by folder; also of those that are gone

_STATE: Final = {"fits", "place", "session", "callbacks", "model"}


def _is_rate(setting: str) -> bool:
    """Returns whether a setting is a learning rate, which an optimizer keeps in a variable."""
    return setting.partition(" ")[0].rpartition(".")[2] == "learning_rate"


def _which_counts(setting: str) -> str:
    if not _is_rate(setting):
        return "the value in the script counts; to take the other one, change it back"
    remedy = "assign the optimizer's learning_rate in on_epoch_begin of a callback"
    return f"the value in the checkpoint counts; to take another one, {remedy}"


class Place(NamedTuple):
    """Place of a checkpoint in a script."""

    fit: int  # counted by the balancer from 0
    epoch: int  # number of completed epochs
    batch: int  # number of completed batches of the running epoch; 0 between epochs
    finished: bool = False  # before its last epoch, because a callback stopped the fit


def _state_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the parts of a state, see `_STATE`; none if it was not written here."""
    return checkpoint.state if isinstance(checkpoint.state, dict) else {}


class Checkpoints:
    """Checkpoints of one balancer: those that it writes, and the one from which it continues."""

    def __init__(
        self,
        folder: str | Path,
        every: Every,
        *,
        strategy: tf.distribute.Strategy,
        sessions: ReplicaSessions,
        training_input: TrainingInput,
    ) -> None:
        self._strategy, self._input = strategy, training_input
        self._sessions, self._session = sessions, sessions.leader
        is_only_process = len(sessions) == self._session.workers
        self._collectives = None if is_only_process else mirrored_collectives(strategy)
        writer = CheckpointWriter(folder)
        self._folder = writer.folder
        self.schedule = CheckpointSchedule(
            self._session, self._session.extensions[Stopping], self._collect, self._report_exit
        )
        self.schedule.use(writer, every)
        self._has_read = False
        self._found: Checkpoint | None = None  # of this fit or a later one
        self._resumed: Checkpoint | None = None
        self._place = Place(-1, 0, 0)
        self._fits: list[dict[str, Any]] = []
        self._initial_epoch: int | None = None
        self._printed: set[str] = set()

    # A fit, in the order of its events

    def begin_fit(self, model: keras.Model, epochs: int) -> None:
        """Continues from the newest checkpoint, if it was written in this fit; a collective.

        The model is built, and its first epoch is set. A fit that had ended before trains nothing
        more.
        """
        if _owners.setdefault(self._folder.resolve(), weakref.ref(self))() is not self:
            raise ValueError(
                f"another LoadBalancer of this process writes to {self._folder}, so that "
                "this one would continue from its checkpoint: give each a folder of its own, or "
                "use one for all fits of a model"
            )
        self._model = model
        self._state = ModelState(model, self._strategy, self._session.rank)
        self._applied = compat.note_optimizers()
        self._last_epoch = epochs
        self._callbacks = compat.running_callbacks()
        self._epochs = compat.latest_epochs()
        self._facts = {**self._session.facts(), **self._state.facts()}
        self._place = Place(self._place.fit + 1, 0, 0)
        settings = self._state.settings()
        if self._fits:  # only those of the running fit are read
            self._fits[-1].pop("settings")
        self._fits.append({"facts": self._facts, "history": None, "settings": settings})
        self._resumed, self._initial_epoch = None, model._initial_epoch
        check_states(self._session.balancer)
        if self._input.pipeline.source.is_reshuffled:
            raise ValueError(
                "a fit cannot continue in a tf.data.Dataset that is endless or has a new order in "
                "each pass: pass shuffle(..., reshuffle_each_iteration=False) and leave out "
                "repeat(), or leave out checkpoint="
            )
        for layer, variable in self._state.untracked_variables():
            self._warn_once(
                f"layer {layer!r} has a state that Keras does not know, the tf.Variable "
                f"{variable!r}: it is not in the checkpoint, so that a restart is not exact; make "
                "it by add_weight(..., trainable=False)"
            )
        if not self._has_read:
            self._has_read = True
            self._found = share_checkpoint(self._read, self._collectives)
        self.schedule.open(alone=True)
        if self._found is None:
            return
        place = Place(*_state_of(self._found)["place"])
        if place.fit > self._place.fit:
            self._skip(self._found, place.fit, epochs)
        else:
            checkpoint, self._found = self._found, None
            self._resume(checkpoint, place, epochs)

    @property
    def resumes(self) -> bool:
        """True if the fit that begins continues from a checkpoint."""
        return self._resumed is not None

    def begin_epoch(self, epoch: int) -> None:
        """Notes the number of an epoch; the first one may continue in its middle.

        What callbacks have changed at the start of that epoch is in its checkpoint already.
        """
        batch = self._place.batch  # of the checkpoint, if the fit continues from one
        self._place = self._place._replace(epoch=epoch, batch=0)
        self._model._initial_epoch = self._initial_epoch
        if self._resumed is None:
            return
        checkpoint, self._resumed = self._resumed, None
        if batch:
            self._state.restore(_state_of(checkpoint)["model"], checkpoint.arrays)
            self._state.restore_in_epoch(checkpoint.arrays)
            compat.start_at_batch(self._epochs, batch)
        else:
            self._state.restore_random(checkpoint.arrays)

    def end_step(self, batch: int, *, is_last: bool) -> None:
        """Writes a checkpoint if one is due, or if a worker must leave; a collective.

        After the last batch of an epoch, it is written at the end of the epoch.
        """
        self._place = self._place._replace(batch=batch + 1)
        if self._applied:  # the step has been traced, or runs eagerly
            self._state.check_optimizers(self._applied)
            self._applied.clear()
        if is_last:
            return
        if self._session.workers == 1 and self._session.extensions[Stopping].preemption_requested:
            self.schedule.leave()  # a single replica has no exchange
        self.schedule.leave_if_preempted()
        self.schedule.end_step(self._session.step)

    def end_epoch(self, epoch: int, *, stops: bool) -> None:
        """Writes a checkpoint if one is due, or if a worker must leave; a collective.

        `stops` says that the fit ends with this epoch on the request of a callback.
        """
        self._place = self._place._replace(epoch=epoch + 1, batch=0, finished=stops)
        if not stops and epoch + 1 < self._last_epoch:  # else the end of the fit follows
            self.schedule.end_step(self._session.step, ends_epoch=True)

    def end_fit(self) -> None:
        """Writes the last checkpoint of a fit, and waits for it; a collective."""
        self._model._initial_epoch = self._initial_epoch
        if self._resumed is not None:  # nothing was left to train
            self._state.restore_random(self._resumed.arrays)
        if self._found is None:
            # The place may have changed since a checkpoint of the same step.
            self.schedule.end(always=True)
        else:  # the fit was skipped
            self.schedule.pause()
        self._callbacks = []

    # Where a fit continues

    def _read(self) -> Checkpoint | None:
        """Claims the folder, and reads the newest checkpoint; one of this fit must fit to it."""
        claim_folder(self._folder.resolve())
        checkpoint = newest_checkpoint(self._folder)
        if checkpoint is None:
            return None
        state = _state_of(checkpoint)
        if state.keys() != _STATE:
            raise ValueError(
                f"the checkpoint in {self._folder} was not written by LoadBalancer: choose "
                "another folder"
            )
        if Place(*state["place"]).fit == self._place.fit:
            check_same_job(self._folder, checkpoint.facts, self._facts)
        return checkpoint

    def _skip(self, checkpoint: Checkpoint, later: int, epochs: int) -> None:
        """Lets the fit that begins train nothing, because the checkpoint is of a later one.

        It must be the one that came before, and of the model whose weights are in the checkpoint.
        """
        fit = self._place.fit
        before = _state_of(checkpoint)["fits"][fit]
        check_same_job(self._folder, before["facts"], self._facts)
        saved, here = (
            {name: fact for name, fact in facts.items() if name.startswith("variable ")}
            for facts in (checkpoint.facts, self._facts)
        )
        if saved != here:
            raise ValueError(
                f"the checkpoint in {self._folder} is of fit {later} of the script (counted "
                f"from 0), whose model is not that of fit {fit}: a folder has the checkpoints of "
                "one model; make a LoadBalancer with a folder of its own for each"
            )
        self._state.restore_weights(checkpoint.arrays)
        self._restore_history(before)
        self._model._initial_epoch = epochs
        self._print_once(
            f"fit {fit} of the script (counted from 0) is skipped, because the checkpoint in "
            f"{self._folder} is of fit {later}"
        )

    def _resume(self, checkpoint: Checkpoint, place: Place, epochs: int) -> None:
        """Restores all that Keras does not reset before the first epoch."""
        state = _state_of(checkpoint)
        self._state.restore(state["model"], checkpoint.arrays)
        self._sessions.load_state(state["session"], checkpoint.arrays)
        self._sessions.exclude_step()
        callback_states = from_json(state["callbacks"], checkpoint.arrays, {})
        compat.restore_callbacks(self._callbacks, callback_states)
        before = state["fits"][place.fit]
        self._restore_history(before)
        if self._session.rank == 0:
            here = self._fits[-1]["settings"]
            if place.fit:  # a fit that was skipped would have changed the rates
                here = {name: setting for name, setting in here.items() if not _is_rate(name)}
            warn_of_changes(before.get("settings", {}), here, _which_counts)
        self._model._initial_epoch = epochs if place.finished else place.epoch
        self._place, self._resumed = place, checkpoint
        self._print_once(
            f"continues after step {checkpoint.step} from {self._folder} (epoch {place.epoch}, "
            f"batch {place.batch})"
        )

    def _restore_history(self, fit: Mapping[str, Json]) -> None:
        if fit["history"] is not None:
            self._fits[-1]["history"] = fit["history"]
            history = self._model.history
            history.epoch, history.history = from_json(fit["history"], {}, {})

    # What is written

    def _collect(self, writes: bool) -> Checkpoint | None:
        """Returns a copy of the state, if this worker writes it; a collective."""
        for session in self._sessions:
            session.meter.begin_wait()
        session_state, arrays = self._sessions.save_state()
        self._session.activity.enter(Activity.OUTSIDE)  # the others may have to wait for this one
        model_state, model_arrays = self._state.read(copy=writes)
        copy = None
        if writes:
            history = self._model.history
            self._fits[-1]["history"] = None  # if a log is no number
            with suppress(TypeError):
                shown = list(history.epoch), dict(history.history)
                self._fits[-1]["history"] = to_json(shown, {})
            state: Json = {
                "fits": list(self._fits),
                "place": list(self._place),
                "session": session_state,
                "callbacks": self._seen_by_callbacks(arrays),
                "model": model_state,
            }
            copy = Checkpoint(self._session.step, self._facts, state, {**arrays, **model_arrays})
        for session in self._sessions:
            session.meter.end_wait()
        return copy

    def _seen_by_callbacks(self, arrays: Arrays) -> Json:
        """Returns what Keras's callbacks have seen; without those that hold no numbers."""
        callback_states: list[Json] = []
        for kind, values in compat.callback_states(self._callbacks):
            own_arrays = dict(arrays)
            try:
                callback_states.append(to_json((kind, values), own_arrays))
                arrays |= own_arrays
            except TypeError as error:  # of a subclass
                callback_states.append(to_json((kind, None), arrays))
                self._warn_once(
                    f"what the callback {kind} has seen is not in the checkpoint, and starts again "
                    f"after a restart: {error}"
                )
        return {"list": callback_states}

    # Messages of the chief

    def _warn_once(self, message: str) -> None:
        if self._session.rank == 0 and message not in self._printed:
            self._printed.add(message)
            logger.warning("%s", message)

    def _print_once(self, text: str) -> None:
        if self._session.rank == 0:
            print(f"lbbsp: {text}", flush=True)

    def _report_exit(self, failed: bool) -> None:
        outcome = "could not be written" if failed else f"is in {self._folder}"
        self._print_once(
            f"leaves after step {self._session.step}, because a worker got SIGTERM; the checkpoint "
            f"{outcome}"
        )
