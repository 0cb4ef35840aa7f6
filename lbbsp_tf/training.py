"""Training on several replicas: what `fit` and custom loops do, in the order of their events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import tensorflow as tf

from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.exchange.handshake import Facts
from lbbsp_core.runtime.extensions.settings import Settings, SettingsComparison
from lbbsp_core.runtime.extensions.weights import WeightComparison
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_core.validate import require_known
from lbbsp_tf import compat
from lbbsp_tf.data.feed import TrainingInput
from lbbsp_tf.exactness.proof import SAMPLES, Refusal, prove
from lbbsp_tf.exactness.verification import largest_error, uneven_sizes
from lbbsp_tf.exchange.collectives import ReplicaSessions
from lbbsp_tf.sharing import Sharing
from lbbsp_tf.step.buckets import measured_bytes
from lbbsp_tf.step.step import BalancedStep
from lbbsp_tf.step.train_step import WAYS, TrainStep, Weighting

logger = logging.getLogger("lbbsp.tf")

_REMEDY = "let it follow what loop.epoch() yields, which is the same on all workers"


class Training:
    """Training with one balancer: its input, its sessions, and the balanced step.

    Args:
        strategy: Strategy of the user.
        sessions: Sessions of this process's replicas.
        weight_by: See `LoadBalancer`.
        verify: See `LoadBalancer`.
        share_work: See `LoadBalancer`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        sessions: ReplicaSessions,
        *,
        weight_by: str,
        verify: bool,
        share_work: bool | str | float = False,
    ) -> None:
        self.strategy = strategy
        self._weight_by = require_known("weight_by", weight_by, WAYS)
        self._verify = verify
        self.verified_error: float | None = None
        self.sessions, self._leader = sessions, sessions.leader
        self.input = TrainingInput(sessions, strategy)
        self._samples = 0  # of all replicas in the step
        self._share_of_sample = compat.plain_variable(0.0, tf.float64)
        self.sharing = Sharing(share_work, strategy, sessions)
        self.user: object = None  # the loop or callback that has begun last

    def begin(
        self,
        facts: Facts,
        weights: Callable[[], Iterable[compat.Array]],
        settings: Callable[[], Settings] | None = None,
    ) -> None:
        """Starts the sessions for the announced data set; a collective.

        Weights are compared every some steps; settings in every step, in a loop whose end of an
        epoch only the user's code sees.
        """
        self._weights, self._settings = weights, settings
        self.input.begin_fit()
        self.sessions.close()  # a failed fit does not close its session
        alike: Facts = {
            "shapes and types of the data": str(self.input.pipeline.batches.element_spec),
            "bytes_per_pack of CommunicationOptions": compat.bytes_per_pack(self.strategy),
            "tf.config.run_functions_eagerly": int(tf.config.functions_run_eagerly()),
        }
        self.sessions.start({**alike, **facts})
        self.input.compare_samples()

    def begin_first_epoch(self, epoch: int, *, resumes: bool = False) -> None:
        """Moves to the epoch at which the training begins, and starts to draw; a collective."""
        if not resumes:  # else the sessions are at a step of it already
            for session in self.sessions:
                session.begin_epoch(epoch)
        handshake.compare(self._leader.collectives, {"first epoch": epoch})
        self.input.begin_epochs()

    def prepare(self, train_step: TrainStep) -> BalancedStep:
        """Returns the balanced step of a fit, proven to be exact; a collective."""
        # Strategies broadcast what they create. A script may have seeded one worker only.
        if self._leader.any_worker(not compat.has_global_seed()):
            compat.forget_global_seed()
        if train_step.in_loop or len(self.sessions) > 1:
            # Callbacks and loops see the results of a process, and only once.
            of_all = compat.with_results_of_all(train_step.function)
            train_step = replace(train_step, function=of_all)
        weighting = Weighting.chosen(self._weight_by) or self._prove(train_step)
        self._known_traces: int | None = None
        hosts = [peer.identity.host for peer in self._leader.peers or ()]
        self._step = BalancedStep(
            train_step,
            self.sessions,
            [iterator.get_next for iterator in self.input.iterators],
            weighting,
            self._share_of_sample,
            compat.shared_global_seed(self.strategy),
            measured_bytes(self.strategy, self._leader.collectives, hosts),
        )
        if self._verify:
            self._compare_with_one_process()
        return self._step

    def begin_epoch(self) -> None:
        """Begins a further epoch, whose first step is excluded; a collective.

        If a step was traced again since the last proof, its weighting is proven once more.
        """
        traced = self._step.traces > (self._known_traces or self._step.traces)
        if self._leader.any_worker(traced) and not Weighting.chosen(self._weight_by):
            self._known_traces = self._step.traces
            if self._prove(self._step.train_step) != self._step.weighting:
                raise ValueError(
                    f"{self._step.train_step.name} computes another kind of loss than when the fit "
                    "began: compile the model again, and call fit for each kind of loss"
                )
        self.sessions.exclude_step()

    def begin_step(self) -> None:
        """Sets the weight of a sample; restarts the timers if the step is excluded."""
        leader, is_last = self._leader, False
        self.input.begin_step()
        samples = sum(leader.sizes)
        if samples != self._samples:
            self._share_of_sample.assign(1.0 / samples)
            self._samples = samples
        if self._settings:
            leader.extensions[SettingsComparison].compare(self._settings, _REMEDY)
            is_last = (leader.step + 1) % self.input.pipeline.order.steps_per_epoch == 0
        leader.extensions[WeightComparison].compare(self._weights, now=is_last)
        for session in self.sessions:
            session.begin_step()
        self._step.parts = self.sharing.begin_step(self._step, self.input.pipeline)

    def end_step(self) -> None:
        """Adds up the waits for input; compares the first records of a training."""
        self.input.end_step()
        if self._known_traces is None:
            self._known_traces = self._step.traces  # the first step is traced after its proof
        extensions = self._leader.extensions
        extensions[WeightComparison].check()
        extensions[SettingsComparison].check(_REMEDY)
        self.leave_steps()

    def leave_steps(self) -> None:
        """Notes that this worker is outside of steps, in a callback or an evaluation."""
        self._leader.activity.enter(Activity.OUTSIDE, self._leader.step)

    def end(self) -> None:
        """Releases the data, and ends the sessions."""
        self.input.end_fit()
        self.sessions.close()
        self._leader.activity.enter(Activity.TRAINED)

    def _prove(self, train_step: TrainStep) -> Weighting:
        batch, by_tokens = self.input.pipeline.first_samples(SAMPLES), self._weight_by == "mask"
        verdict = prove(train_step, self.strategy, batch, by_tokens=by_tokens)
        problem = verdict.problem if isinstance(verdict, Refusal) else None
        # Processors round differently, and so may the figures in the reasons to refuse.
        if self._leader.any_worker(problem is None):
            outcome = repr(verdict) if problem is None else f"refused ({problem})"
            handshake.compare(self._leader.collectives, {"weighting of the loss": outcome})
        if isinstance(verdict, Refusal):
            raise ValueError(
                f"{verdict.problem}, so unequal batches would not learn what one process learns: "
                f'{verdict.remedy}; or accept this with LoadBalancer(..., weight_by="samples")'
            )
        logger.debug("weighting of the loss: %s", verdict)
        return verdict

    def _compare_with_one_process(self) -> None:
        """Compares a weighted step on unequal batches with the whole batch in one process."""
        leader, train_step, pipeline = self._leader, self._step.train_step, self.input.pipeline
        sizes = uneven_sizes(pipeline.order.size(0), leader.workers)
        batch = pipeline.first_samples(sum(sizes))
        self.verified_error = error = largest_error(
            self.strategy, train_step.function, self._step.weighted, batch, sizes
        )
        if leader.rank == 0:
            print(
                f"lbbsp: a step on batches of {', '.join(map(str, sizes))} samples differs by "
                f"{error:.1e} from the whole batch in one process (largest difference of a "
                "variable's gradient, relative to it)",
                flush=True,
            )
        largest = 0.1 if train_step.is_inexact else 0.01
        has_failed = leader.any_worker(not error <= largest)
        if has_failed and not Weighting.chosen(self._weight_by):
            raise ValueError(
                f"the verification of {train_step.name} has failed: a step on unequal batches "
                f"differs by {error:.1e} from the whole batch in one process: accept this with "
                'LoadBalancer(..., weight_by="samples"), or report it'
            )
