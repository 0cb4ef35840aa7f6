"""Training on several replicas: what `fit` and custom loops do, in the order of their events."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from lbbsp_core.runtime.exchange.handshake import Facts
from lbbsp_core.runtime.exchange.settings import Settings
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_tf.data.feed import TrainingInput
from lbbsp_tf.exchange.replicas import ReplicaSessions
from lbbsp_tf.step.preparation import StepPreparation

_REMEDY = "let it follow what loop.epoch() yields, which is the same on all workers"


class Training:
    """Parts of one balancer, which take part in each event of a training."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        sessions: ReplicaSessions,
        *,
        weight_by: str,
        verify: bool,
    ) -> None:
        self.sessions = sessions
        self.input = TrainingInput(sessions, strategy)
        self._weights: Callable[[], Iterable[np.ndarray]] = tuple
        self._settings: Callable[[], Settings] | None = None
        self.preparation = StepPreparation(
            strategy, sessions, self.input, weight_by=weight_by, verify=verify
        )

    def begin(
        self,
        facts: Facts,
        weights: Callable[[], Iterable[np.ndarray]],
        settings: Callable[[], Settings] | None = None,
    ) -> None:
        """Starts the sessions for the announced data set; a collective.

        Weights are compared every some steps; settings in every step, in a loop whose end of an
        epoch only the user's code sees.
        """
        self._weights, self._settings = weights, settings
        self.input.begin_fit()
        self.sessions.close()  # a failed fit does not close its session
        self.sessions.start({"shapes and types of the data": self.input.spec, **facts})
        self.input.compare_samples()

    def begin_first_epoch(self, epoch: int, *, resumes: bool = False) -> None:
        """Moves to the epoch at which the training begins, and starts to draw; a collective."""
        if not resumes:  # else the sessions are at a step of it already
            self.sessions.begin_epoch(epoch)
        self.sessions.leader.check_same("first epoch", epoch)
        self.input.begin_epochs()

    def begin_epoch(self) -> None:
        """Begins a further epoch, whose first step is excluded; a collective."""
        self.preparation.begin_epoch()
        self.sessions.exclude_step()

    def begin_step(self) -> None:
        """Sets the weight of a sample; restarts the timers if the step is excluded."""
        self.input.begin_step()
        self.preparation.set_samples(sum(self.sessions.leader.sizes))
        leader, is_last = self.sessions.leader, False
        if self._settings:
            leader.offer_settings(self._settings, _REMEDY)
            is_last = (leader.step + 1) % self.input.order.steps_per_epoch == 0
        leader.offer_weights(self._weights, now=is_last)
        self.sessions.begin_step()

    def end_step(self) -> None:
        """Adds up the waits for input; compares the first records of a training."""
        self.input.end_step()
        self.preparation.end_step()
        self.sessions.leader.check_weights()
        self.sessions.leader.check_settings(_REMEDY)
        self.leave_steps()

    def leave_steps(self) -> None:
        """Notes that this worker is outside of steps, in a callback or an evaluation."""
        leader = self.sessions.leader
        leader.activity.enter(Activity.OUTSIDE, leader.step)

    def end(self) -> None:
        """Releases the data, and ends the sessions."""
        self.input.end_fit()
        self.sessions.close()
        self.sessions.leader.activity.enter(Activity.TRAINED)
