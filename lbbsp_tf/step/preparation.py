"""Preparation of balanced steps: proves how to weight their gradients, and verifies it if asked."""

from __future__ import annotations

import logging
from dataclasses import replace

import tensorflow as tf

from lbbsp_core.runtime.exchange.protocol import fingerprint
from lbbsp_core.validate import require_known
from lbbsp_tf import compat
from lbbsp_tf.data.feed import TrainingInput
from lbbsp_tf.exactness.proof import SAMPLES, Refusal, prove
from lbbsp_tf.exactness.verification import largest_error, uneven_sizes
from lbbsp_tf.exchange.replicas import ReplicaSessions
from lbbsp_tf.step.step import BalancedStep
from lbbsp_tf.step.train_step import TrainStep
from lbbsp_tf.step.weighting import WAYS, Weighting

logger = logging.getLogger("lbbsp.tf")


class StepPreparation:
    """Makes the steps of one balancer.

    Args:
        strategy: Strategy of the user.
        sessions: Sessions of this process's replicas.
        training_input: Data of the running fit.
        weight_by: See `LoadBalancer`.
        verify: See `LoadBalancer`.

    Raises:
        ValueError: `weight_by` is unknown.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        sessions: ReplicaSessions,
        training_input: TrainingInput,
        *,
        weight_by: str,
        verify: bool,
    ) -> None:
        self._strategy = strategy
        self._sessions = sessions
        self._input = training_input
        self._weight_by = require_known("weight_by", weight_by, WAYS)
        self._verify = verify
        self.verified_error: float | None = None
        self._samples = 0
        self._train_step: TrainStep | None = None
        self._step: BalancedStep | None = None
        self._weighting: Weighting | None = None
        self._known_traces: int | None = None
        self._share_of_sample = compat.plain_variable(0.0, tf.float64)

    def set_samples(self, samples: int) -> None:
        """Sets the number of samples of all replicas in the next step."""
        if samples != self._samples:
            self._share_of_sample.assign(1.0 / samples)
            self._samples = samples

    def prepare(self, train_step: TrainStep) -> BalancedStep:
        """Returns the balanced step of a fit; every worker must call it at the same time.

        Raises:
            ValueError: The loss cannot be weighted exactly; names it and the remedy.
        """
        # Strategies broadcast what they create. A script may have seeded one worker only.
        if self._sessions.leader.any_worker(not compat.has_global_seed()):
            compat.forget_global_seed()
        if train_step.in_loop or len(self._sessions) > 1:
            # Callbacks and loops see the results of a process, and only once.
            of_all = compat.with_results_of_all(train_step.function)
            train_step = replace(train_step, function=of_all)
        self._weighting = Weighting.chosen(self._weight_by) or self._prove(train_step)
        self._train_step, self._known_traces = train_step, None
        self._step = BalancedStep(
            train_step,
            self._strategy,
            sessions=self._sessions,
            next_batches=[each.next_batch for each in self._input.iterators],
            weighting=self._weighting,
            share_of_sample=self._share_of_sample,
        )
        if self._verify:
            self._compare(train_step, self._step)
        return self._step

    def end_step(self) -> None:
        """Notes that a step is over: the first one is traced after its proof."""
        if self._known_traces is None:
            self._known_traces = self._step.traces

    def begin_epoch(self) -> None:
        """Proves the weighting once more if a step was traced again since; a collective.

        Raises:
            ValueError: The loss has changed, and the step is weighted wrongly now.
        """
        traced = self._step.traces > (self._known_traces or self._step.traces)
        if not self._sessions.leader.any_worker(traced) or Weighting.chosen(self._weight_by):
            return
        self._known_traces = self._step.traces
        if self._prove(self._train_step) != self._weighting:
            raise ValueError(
                f"{self._train_step.name} computes another kind of loss than when the fit began: "
                "compile the model again, and call fit for each kind of loss"
            )

    def _prove(self, train_step: TrainStep) -> Weighting:
        batch, by_tokens = self._input.first_samples(SAMPLES), self._weight_by == "mask"
        found = prove(train_step, self._strategy, batch, by_tokens=by_tokens)
        # Processors round differently, and so may the figures in the reasons to refuse.
        outcome = "refused" if isinstance(found, Refusal) else repr(found)
        self._sessions.leader.check_same("weighting of the loss", fingerprint(outcome))
        if isinstance(found, Refusal):
            raise ValueError(
                f"{found.problem}, so unequal batches would not learn what one process learns: "
                f'{found.remedy}; or accept this with LoadBalancer(..., weight_by="samples")'
            )
        logger.debug("weighting of the loss: %s", found)
        return found

    def _compare(self, train_step: TrainStep, step: BalancedStep) -> None:
        """Compares a weighted step on unequal batches with the whole batch in one process."""
        leader = self._sessions.leader
        sizes = uneven_sizes(self._input.order.size(0), leader.workers)
        batch = self._input.first_samples(sum(sizes))
        self.verified_error = largest_error(
            self._strategy, train_step.function, step.weighted, batch, sizes
        )
        if leader.rank == 0:
            print(
                f"lbbsp: a step on batches of {', '.join(map(str, sizes))} samples differs by "
                f"{self.verified_error:.1e} from the whole batch in one process (largest "
                "difference of a variable's gradient, relative to it)",
                flush=True,
            )
        largest = 0.1 if train_step.is_inexact else 0.01
        has_failed = leader.any_worker(not self.verified_error <= largest)
        if has_failed and not Weighting.chosen(self._weight_by):
            raise ValueError(
                f"the verification of {train_step.name} has failed: a step on unequal batches "
                f"differs by {self.verified_error:.1e} from the whole batch in one process: accept "
                'this with LoadBalancer(..., weight_by="samples"), or report it'
            )
