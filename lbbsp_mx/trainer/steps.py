"""Steps of trainers, the barriers that end them, and the weights of batches: `Steps`."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, SupportsFloat, TypeAlias

import mxnet as mx
import numpy as np
from mxnet import gluon

from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx import compat
from lbbsp_mx.data.sampler import Draws
from lbbsp_mx.store.native import runtime

logger = logging.getLogger("lbbsp.mx")

Wait = Callable[[], None]

SEVERAL_CHECKPOINTS = (
    "checkpoints hold one trainer, and several make steps on the same batches: in their place "
    "save the parameters of each network, and save_states of each trainer"
)

Weight: TypeAlias = "SupportsFloat | mx.nd.NDArray | None"
"""Weight of a worker's batch: a number, an array with one value, or none."""


class StepSizes(NamedTuple):
    """Sizes of the batches of a step."""

    local: int  # samples of this worker
    parts: tuple[int, ...]  # samples of the parts of its batch
    total: int  # samples of all workers, X_k
    rank: int
    is_planned: bool  # false in a single worker without a batch sampler, whose batches are unknown

    def check(self, batch_size: int) -> None:
        """Checks the batch size that is passed to `step`."""
        if self.is_planned and batch_size != self.local and batch_size not in self.parts:
            raise ValueError(
                f"step must be called with the {self.local} samples that the plan gives to worker "
                f"{self.rank}{self._or_a_part}, got {batch_size!r}: draw batches by "
                "trainer.batch_sampler(...), or of trainer.sizes[trainer.kvstore.rank] samples, "
                "and make a step for each; where losses are means of the batch, pass "
                "mean_loss=True, and to accumulate gradients, accumulate, to the trainer"
            )

    def check_of_means(self, batch_size: float) -> None:
        """Checks the batch size that is passed to `update`, which changes nothing there."""
        if self.is_planned and batch_size not in (1, self.local, *self.parts, self.total):
            raise ValueError(
                f"update must be called with 1, the {self.local} samples of worker {self.rank}"
                f"{self._or_a_part}, or the {self.total} samples of all workers, got "
                f"{batch_size!r}: each has the same effect, since the gradients are means; to "
                "scale the update, multiply the gradients before"
            )

    @property
    def _or_a_part(self) -> str:
        sizes = sorted(set(self.parts) - {self.local})
        return f", or those of a part ({', '.join(map(str, sizes))})" if sizes else ""


_NO_SIZES = StepSizes(0, (), 0, 0, is_planned=False)  # before the first step


class Steps:
    """Steps of a trainer, each of which ends at a barrier where the next plan is decided.

    `draws` are the loader batches that were drawn.
    """

    is_beside = False

    def __init__(self, session: PipelinedSession, draws: Draws) -> None:
        self.session, self.draws = session, draws
        self.now = _NO_SIZES  # of the running step, or of the one that has ended
        self.weight: float | None = None  # of this worker's batch, if it has one
        self.others = 0  # trainers that step beside this one
        self.has_rows = False  # whether the script slices this worker's rows of global batches
        self.shows_sizes = False  # whether the script has read the plan, to draw batches itself
        self.pauses = False  # whether layers or other trainers pause the timer within a step
        self._has_warned = self._knows_draws = session.workers == 1

    def check_leads(self) -> None:
        """Raises ValueError if these are steps beside those of another trainer."""
        if self.is_beside:
            raise ValueError(
                "this trainer steps beside another one, which has the plan: pass the other one as "
                "`beside`, and call batch_sampler of the other one"
            )

    def check_single(self) -> None:
        """Raises ValueError if several trainers make steps on the same batches."""
        if self.is_beside or self.others:
            raise ValueError(SEVERAL_CHECKPOINTS)

    def take_weight(self, weight: Weight) -> None:
        """Takes the weight of this worker's batch, which the next step has."""
        if isinstance(weight, mx.nd.NDArray):
            weight = weight.asnumpy().item()
        self.weight = None if weight is None else float(weight)
        if self.weight is not None and not 0 <= self.weight < math.inf:
            raise ValueError(
                f"weight must be a finite number >= 0, got {weight!r}: pass the number of valid "
                "tokens, or the sum of the sample weights, in this worker's batch"
            )
        if self.session.workers > 1:
            SampleWeights.of_process().warn_of_means(self.weight)

    def begin(self, batch_size: int | None, params: Sequence[gluon.Parameter]) -> None:
        """Begins a step, if it fits the plan and the batches that were drawn."""
        self._warn_of_others()  # first: it explains a batch size that is not that of this plan
        if self.session.workers > 1:
            self.draws.require_steps(self.session.step, params)
        else:
            for _ in range(self.draws.check(self.session.step, params)):
                self.session.skip_step()
        sizes = self._sizes(batch_size)
        if batch_size is not None:
            sizes.check(batch_size)
        self._check_drawing()
        self.now = sizes

    def end(self, computed: Wait, summed: Wait, *, at_once: bool = False) -> None:
        """Passes the barrier, in the background unless `at_once` or if others pause the timer."""
        self.session.end_step(computed, summed, self.weight)
        if at_once or self.pauses or self.session.workers == 1:
            self.session.finish_barrier()

    def _warn_of_others(self) -> None:
        """Warns once if batches are drawn by the plan of another trainer."""
        other = runtime().drawn_for()
        if isinstance(other, Steps) and other is not self and other.session.in_epoch:
            if not self._has_warned:
                logger.warning(
                    "a trainer steps while batches of another one are drawn, and each measures the "
                    "waits of the other: to share the batches, pass beside=trainer to one of them"
                )
            self._has_warned = self._knows_draws = True

    def _check_drawing(self) -> None:
        """Checks once that batches are drawn by this plan, whose first sizes are even."""
        if self._knows_draws:
            return
        self._knows_draws = True
        if self.session.order is not None or self.has_rows or self.shows_sizes:
            return
        remedy = "pass DataLoader(dataset, batch_sampler=trainer.batch_sampler(len(dataset)))"
        if not self.session.balancer.policy.is_static:
            raise ValueError(
                "batches must follow the plan of the trainer, which changes from step to step, "
                f"but the script has used neither its batch_sampler nor its sizes: {remedy}"
            )
        logger.warning(
            "the script has used neither batch_sampler nor sizes of the trainer: unless each "
            "worker draws other samples, all of them train on the same ones; %s",
            remedy,
        )

    def _sizes(self, batch_size: int | None) -> StepSizes:
        """Reads the batch sizes of the running step from the plan, if it has one."""
        session, rank = self.session, self.session.rank
        if session.workers == 1 and session.order is None and not self.has_rows:
            size = 1 if batch_size is None else batch_size  # if only `update` will know it
            return StepSizes(size, (), size, 0, is_planned=False)
        sizes = session.sizes
        cut = self.draws.cut(np.arange(sizes[rank])) if self.draws.parts > 1 else ()
        return StepSizes(sizes[rank], tuple(map(len, cut)), sum(sizes), rank, is_planned=True)


class StepsBeside(Steps):
    """Steps of a trainer within those of another one, the leader, whose plan and timer it shares.

    Each ends at a barrier of its own. The wait there counts as little as busy time as that of the
    leader, but the work before it does count. Workers tell each other their batch sizes, since the
    step may be on the batch for which the leader steps next, or has just stepped.
    """

    is_beside = True

    def __init__(self, leader: Steps) -> None:
        super().__init__(leader.session, leader.draws)
        self._leader, self._number = leader, leader.others + 1

    def begin(self, batch_size: int | None, params: Sequence[gluon.Parameter]) -> None:
        """Begins a step on the batch of either step; the total is known at the end."""
        self.draws.check_adding(params)
        last, self.now = self._leader.now, self._sizes(batch_size)
        if not self.now.is_planned:
            return
        if batch_size is None:
            raise ValueError(
                "allreduce_grads of a trainer beside another one needs the samples of this "
                "worker's batch, because the other one may step before or after it: pass batch_size"
            )
        if last.is_planned and batch_size == last.local:
            self.now = last
        else:
            self.now._replace(parts=()).check(batch_size)

    def end(self, computed: Wait, summed: Wait, *, at_once: bool = True) -> None:
        """Passes the barrier within the step of the leader."""
        sizes = self.session.pass_inner(self._number, computed, summed, self.now.local, self.weight)
        self.now = self.now._replace(total=sum(sizes))


def total_weight(weights: Sequence[float]) -> float:
    """Returns the sum of the weights of all workers, by rank."""
    total = math.fsum(weights)
    if total <= 0:
        raise ValueError(
            "the sum of `weight` over all workers must be > 0, got 0: a global batch needs at "
            "least one valid token or sample with a positive weight"
        )
    return total


class SampleWeights:
    """Notes that a gluon loss has got a `sample_weight` while gradients were recorded."""

    def __init__(self) -> None:
        self._seen = self._has_warned = False
        compat.watch_sample_weights(self._notice)

    def warn_of_means(self, weight: float | None) -> None:
        """Warns once if such a loss is followed by a step without `weight`."""
        if self._seen and weight is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a loss has a sample_weight, and the update divides by the number of samples: to "
                "divide by the sum of the weights, or of the valid tokens, let the loss be a sum "
                "over tokens, and call trainer.step(batch_size, weight=...) with this worker's sum"
            )

    def _notice(self) -> None:
        self._seen = self._seen or mx.autograd.is_recording()

    @classmethod
    @functools.cache
    def of_process(cls) -> SampleWeights:
        """Returns the only observer of this process; gluon's losses are patched once."""
        return cls()
