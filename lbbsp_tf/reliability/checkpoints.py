"""Checkpoints of `fit`: written at the same step on all workers, exact at the step."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import keras
import tensorflow as tf

from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint, newest_checkpoint
from lbbsp_core.runtime.checkpoint.serialization import Arrays, Json, from_json, to_json
from lbbsp_core.runtime.checkpoint.writer import CheckpointWriter, Every, claim_folder
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.loop.session_state import check_same_job, check_states
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_core.runtime.reliability.preemption import STATUS, PreemptionHandler
from lbbsp_tf import compat
from lbbsp_tf.data.feed import TrainingInput
from lbbsp_tf.exchange.collectives import mirrored_collectives
from lbbsp_tf.exchange.replicas import ReplicaSessions
from lbbsp_tf.reliability.model_state import ModelState
from lbbsp_tf.reliability.sharing import share_checkpoint

logger = logging.getLogger("lbbsp.checkpoint")

_owners: dict[Path, weakref.ref[Checkpoints]] = {}  # by folder; also of those that are gone

_STATE: Final = {"fits", "place", "session", "callbacks", "model"}


class Place(NamedTuple):
    """Place of a checkpoint in a script.

    Args:
        fit: Number of the fit, counted by the balancer from 0.
        epoch: Number of completed epochs.
        batch: Number of completed batches of the running epoch; 0 between epochs.
        finished: Whether the fit has ended before its last epoch, because a callback stopped it.
    """

    fit: int
    epoch: int
    batch: int
    finished: bool = False


class Checkpoints:
    """Checkpoints of one balancer: those that it writes, and the one from which it continues.

    Args:
        folder: Folder of the checkpoints.
        every: Steps between two checkpoints, or "epoch".
        strategy: Strategy of the user.
        sessions: Sessions of this process's replicas.
        training_input: Data of the running fit.
        processes: Number of processes of the job.

    Raises:
        TypeError: `folder` is no path.
    """

    def __init__(
        self,
        folder: str | Path,
        every: Every,
        *,
        strategy: tf.distribute.Strategy,
        sessions: ReplicaSessions,
        training_input: TrainingInput,
        processes: int,
    ) -> None:
        self._every = every
        self._strategy = strategy
        self._sessions = sessions
        self._session = sessions.leader
        self._input = training_input
        self._collectives = mirrored_collectives(strategy) if processes > 1 else None
        self._is_chief = self._session.rank == 0
        self._writer = CheckpointWriter(folder)
        self._requests = self._session.extensions[Stopping]
        self._preemption = PreemptionHandler(self._requests.request_preemption)
        self._has_read = False
        self._found: Checkpoint | None = None
        self._resumed: Checkpoint | None = None
        self._place = Place(-1, 0, 0)
        self._fits: list[dict[str, Json]] = []
        self._initial_epoch: int | None = None
        self._said: set[str] = set()

    # A fit, in the order of its events

    def begin_fit(self, model: keras.Model, epochs: int) -> None:
        """Continues from the newest checkpoint, if it was written in this fit; a collective.

        A fit that had ended before trains nothing more.

        Args:
            model: Built model; its first epoch is set.
            epochs: Number of epochs of the fit.

        Raises:
            TypeError: A state of the user's predictor or policy cannot be saved.
            ValueError: The checkpoint is of another job, or cannot be read.
        """
        if _owners.setdefault(self._writer.folder.resolve(), weakref.ref(self))() is not self:
            raise ValueError(
                f"another LoadBalancer of this process writes to {self._writer.folder}, so that "
                "this one would continue from its checkpoint: give each a folder of its own, or "
                "use one for all fits of a model"
            )
        self._model = model
        self._state = ModelState(model, self._strategy, self._session.rank)
        self._last_epoch = epochs
        self._callbacks = compat.running_callbacks()
        self._epochs = compat.latest_epochs()
        self._facts = {**self._session.facts(), **self._state.facts()}
        self._place = Place(self._place.fit + 1, 0, 0)
        self._fits.append({"facts": self._facts, "history": None})
        self._resumed, self._initial_epoch = None, model._initial_epoch
        check_states(self._session.balancer)
        if self._input.is_reshuffled:
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
        self._preemption.open(alone=True)
        if self._found is None:
            return
        place = _place_in(self._found)
        if place.fit > self._place.fit:
            self._skip(self._found, place.fit, epochs)
            return
        found, self._found = self._found, None
        self._resume(found, place, epochs)

    @property
    def resumes(self) -> bool:
        """True if the fit that begins continues from a checkpoint."""
        return self._resumed is not None

    def begin_epoch(self, epoch: int) -> None:
        """Notes the number of an epoch; the first one may continue in its middle.

        What callbacks have changed at the start of that epoch is in its checkpoint already.
        """
        self._place = self._place._replace(epoch=epoch, batch=0)
        self._model._initial_epoch = self._initial_epoch
        if self._resumed is None:
            return
        found, self._resumed = self._resumed, None
        place = _place_in(found)
        if place.batch:
            self._state.restore(found.state["model"], found.arrays)
            self._state.restore_in_epoch(found.arrays)
            compat.start_at_batch(self._epochs, place.batch)
        else:
            self._state.restore_random(found.arrays)

    def end_step(self, batch: int, *, is_last: bool) -> None:
        """Writes a checkpoint if one is due, or if a worker must leave; a collective.

        Args:
            batch: Number of the batch in its epoch.
            is_last: Whether the epoch ends with it; a checkpoint is then written after its end.
        """
        self._place = self._place._replace(batch=batch + 1)
        if is_last:
            return
        if self._requests.preempted or (self._is_alone and self._requests.preemption_requested):
            self._leave()
        if self._every != "epoch" and self._session.step % self._every == 0:
            self._save()

    def end_epoch(self, epoch: int, *, stops: bool) -> None:
        """Writes a checkpoint if one is due, or if a worker must leave; a collective.

        Args:
            epoch: Number of the epoch.
            stops: Whether the fit ends with it on the request of a callback.
        """
        self._place = self._place._replace(epoch=epoch + 1, batch=0, finished=stops)
        if stops or epoch + 1 == self._last_epoch:
            return  # the end of the fit follows
        if self._session.any_worker(self._requests.preemption_requested):
            self._leave()
        if self._every == "epoch" or self._session.step % self._every == 0:
            self._save()

    def end_fit(self) -> None:
        """Writes the last checkpoint of a fit, and waits for it; a collective."""
        self._model._initial_epoch = self._initial_epoch
        if self._resumed is not None:  # nothing was left to train
            self._state.restore_random(self._resumed.arrays)
        if self._found is None:  # else the fit was skipped
            if self._session.any_worker(self._requests.preemption_requested):
                self._leave()
            self._writer.flush()
            self._save()
            self._writer.flush()
        self._callbacks = []
        self._preemption.close(leaves=self._requests.preemption_requested)

    # Helpers

    @property
    def _is_alone(self) -> bool:
        """True for a single replica, which has no exchange."""
        return self._session.workers == 1

    def _read(self) -> Checkpoint | None:
        """Claims the folder, and reads the newest checkpoint; one of this fit must fit to it."""
        claim_folder(self._writer.folder.resolve())
        found = newest_checkpoint(self._writer.folder)
        if found is not None and not _is_of_fit(found):
            raise ValueError(
                f"the checkpoint in {self._writer.folder} was not written by LoadBalancer: choose "
                "another folder"
            )
        if found is not None and _place_in(found).fit == self._place.fit:
            check_same_job(self._writer.folder, found.facts, self._facts)
        return found

    def _skip(self, found: Checkpoint, later: int, epochs: int) -> None:
        """Lets the fit that begins train nothing, because the checkpoint is of a later one.

        Raises:
            ValueError: The fit is not the one that came before; or it has another model, whose
                weights are not in the checkpoint.
        """
        fit = self._place.fit
        before = found.state["fits"][fit]
        check_same_job(self._writer.folder, before["facts"], self._facts)
        if ModelState.facts_of_weights(found.facts) != ModelState.facts_of_weights(self._facts):
            raise ValueError(
                f"the checkpoint in {self._writer.folder} is of fit {later} of the script (counted "
                f"from 0), whose model is not that of fit {fit}: a folder has the checkpoints of "
                "one model; make a LoadBalancer with a folder of its own for each"
            )
        self._state.restore_weights(found.arrays)
        self._restore_history(before)
        self._model._initial_epoch = epochs
        if self._is_chief:
            print(
                f"lbbsp: fit {fit} of the script (counted from 0) is skipped, because the "
                f"checkpoint in {self._writer.folder} is of fit {later}",
                flush=True,
            )

    def _restore_history(self, fit: Mapping[str, Json]) -> None:
        if fit["history"] is not None:
            self._fits[-1]["history"] = fit["history"]
            history = self._model.history
            history.epoch, history.history = from_json(fit["history"], {}, {})

    def _resume(self, found: Checkpoint, place: Place, epochs: int) -> None:
        """Restores all that Keras does not reset before the first epoch."""
        self._state.restore(found.state["model"], found.arrays)
        self._sessions.load_state(found.state["session"], found.arrays)
        self._sessions.exclude_step()
        seen = from_json(found.state["callbacks"], found.arrays, {})
        compat.restore_callbacks(self._callbacks, seen)
        self._restore_history(found.state["fits"][place.fit])
        self._model._initial_epoch = epochs if place.finished else place.epoch
        self._place, self._resumed = place, found
        if self._is_chief:
            print(
                f"lbbsp: continues after step {found.step} from {self._writer.folder} "
                f"(epoch {place.epoch}, batch {place.batch})",
                flush=True,
            )

    def _save(self) -> None:
        """Copies the state, and starts to write it unless the last write is still running."""
        for session in self._sessions:
            session.meter.begin_wait()
        session_state, arrays = self._sessions.save_state()
        self._session.activity.enter(Activity.OUTSIDE)  # the others may have to wait for this one
        writes = self._is_chief and not self._writer.is_busy
        model_state, model_arrays = self._state.read(copy=writes)
        if writes:
            self._fits[-1]["history"] = _history_of(self._model)
            state: Json = {
                "fits": list(self._fits),
                "place": to_json(tuple(self._place), arrays),
                "session": session_state,
                "callbacks": self._seen_by_callbacks(arrays),
                "model": model_state,
            }
            arrays |= model_arrays
            self._writer.start(Checkpoint(self._session.step, self._facts, state, arrays))
        for session in self._sessions:
            session.meter.end_wait()

    def _seen_by_callbacks(self, arrays: Arrays) -> Json:
        """Returns what Keras's callbacks have seen; without those that hold no numbers."""
        seen: list[Json] = []
        for kind, values in compat.callback_states(self._callbacks):
            own = dict(arrays)
            try:
                seen.append(to_json((kind, values), own))
                arrays |= own
            except TypeError as error:  # of a subclass
                seen.append(to_json((kind, None), arrays))
                self._warn_once(
                    f"what the callback {kind} has seen is not in the checkpoint, and starts again "
                    f"after a restart: {error}"
                )
        return {"list": seen}

    def _warn_once(self, message: str) -> None:
        """Logs a warning on the chief, unless it has been logged before."""
        if self._is_chief and message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)

    def _leave(self) -> None:
        """Writes a checkpoint, waits for it, and ends this process, as all others do.

        Raises:
            SystemExit: Always.
        """
        self._writer.flush()
        self._save()
        failed = self._session.any_worker(not self._writer.flush())
        if self._is_chief:
            outcome = "could not be written" if failed else f"is in {self._writer.folder}"
            print(
                f"lbbsp: leaves after step {self._session.step}, because a worker got SIGTERM; "
                f"the checkpoint {outcome}",
                flush=True,
            )
        self._preemption.close()
        sys.exit(STATUS)


def _is_of_fit(found: Checkpoint) -> bool:
    return isinstance(found.state, dict) and found.state.keys() == _STATE


def _place_in(found: Checkpoint) -> Place:
    return Place(*from_json(found.state["place"], {}, {}))


def _history_of(model: keras.Model) -> Json:
    """Returns the epochs and logs of a fit; None if a log is no number."""
    try:
        return to_json((list(model.history.epoch), dict(model.history.history)), {})
    except TypeError:
        return None
