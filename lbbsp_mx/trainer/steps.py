"""Steps of trainers, and the barriers that end them: `Steps`, and `StepsBeside` of a GAN."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

from mxnet import gluon

from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx.data.draws import Draws, part_sizes
from lbbsp_mx.store.native import runtime
from lbbsp_mx.trainer.means import StepSizes

logger = logging.getLogger("lbbsp.mx")

Wait = Callable[[], None]

SEVERAL_CHECKPOINTS = (
    "checkpoints hold one trainer, and several make steps on the same batches: leave out resume, "
    "save and load; save the parameters of each network, and save_states of each trainer"
)


class Steps:
    """Steps of a trainer, each of which ends at a barrier where the next plan is decided.

    Args:
        session: Session of the training.
        draws: Loader batches that were drawn.
    """

    is_beside = False

    def __init__(self, session: PipelinedSession, draws: Draws) -> None:
        self.session, self.draws = session, draws
        self.now: StepSizes | None = None  # of the running step, or of the one that has ended
        self.others = 0  # trainers that step beside this one
        self.has_rows = False  # whether the script slices this worker's rows of global batches
        self.shows_sizes = False  # whether the script has read the plan, to draw batches itself
        self.pauses = False  # whether layers or other trainers pause the timer within a step
        self._has_warned = session.workers == 1
        self._knows_draws = session.workers == 1

    def join(self) -> None:
        """Does nothing, because there is no other trainer."""

    def check_leads(self) -> None:
        """Raises ValueError if these are steps beside those of another trainer."""

    def check_single(self) -> None:
        """Raises ValueError if several trainers make steps on the same batches."""
        if self.others:
            raise ValueError(SEVERAL_CHECKPOINTS)

    def begin_epoch(self) -> None:
        """Notes that batches are drawn for these steps from now on."""
        runtime().drawn_for = weakref.ref(self)

    def begin(self, batch_size: int | None, params: Sequence[gluon.Parameter]) -> StepSizes:
        """Begins a step, if it fits the plan and the batches that were drawn; returns its sizes."""
        self._warn_of_others()
        if unused := self.draws.check(self.session.step, params):
            self._skip(unused)
        sizes = self._sizes(batch_size)
        if batch_size is not None:
            sizes.check(batch_size)
        self._check_drawing()
        self.now = sizes
        return sizes

    def end(
        self, computed: Wait, summed: Wait, weight: float | None = None, *, at_once: bool = False
    ) -> None:
        """Passes the barrier, in the background unless `at_once` or if others pause the timer."""
        self.session.end_step(computed, summed, weight)
        if at_once or self.pauses or self.session.workers == 1:
            self.session.finish_barrier()

    def _skip(self, unused: int) -> None:
        """Skips the steps of batches that were not used, which a single worker may do."""
        if self.session.workers > 1:
            raise ValueError(
                f"the batch of step {self.session.step} was drawn, and no step was made before the "
                "next one: call step on all workers for every batch (to leave out gradients that "
                "are not finite, zero_grad() before it), and try out learning rates on a loader "
                "without batch_sampler"
            )
        for _ in range(unused):
            self.session.skip_step()

    def _check_drawing(self) -> None:
        """Checks once that the script draws batches by the plan, whose first sizes are even."""
        if self._knows_draws:
            return
        self._knows_draws = True
        if self.session.order is not None or self.has_rows or self.shows_sizes:
            return
        if self._other_draws():
            return  # there is a warning with another remedy
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

    def _warn_of_others(self) -> None:
        """Warns once if another trainer draws batches meanwhile."""
        if not self._has_warned and self._other_draws():
            self._has_warned = True
            logger.warning(
                "a trainer steps while batches of another one are drawn, so that each measures the "
                "waits of the other one: if both step on the same batches, pass beside=trainer to "
                "one of them"
            )

    def _other_draws(self) -> bool:
        """Returns whether the running epoch is drawn by the plan of another trainer."""
        other = runtime().drawn_for()
        return isinstance(other, Steps) and other is not self and other.session.in_epoch

    def _sizes(self, batch_size: int | None) -> StepSizes:
        """Reads the batch sizes of the running step from the plan, if it has one."""
        session, rank = self.session, self.session.rank
        if session.workers == 1 and session.order is None and not self.has_rows:
            size = 1 if batch_size is None else batch_size  # if only `update` will know it
            return StepSizes(size, (), size, 0, is_planned=False)
        sizes, parts = session.sizes, self.draws.parts
        local = sizes[rank]
        cut = part_sizes(local, parts, self.draws.unit) if parts > 1 else ()
        return StepSizes(local, cut, sum(sizes), rank, is_planned=True)


class StepsBeside(Steps):
    """Steps of a trainer within those of another one, whose plan and timer it shares.

    Each ends at a barrier of its own. The wait there counts as little as busy time as that of the
    other trainer, but the work before it does count. Workers tell each other their batch sizes,
    since the step may be on the batch for which the other trainer steps next, or has just stepped.

    Args:
        leader: Steps of the other trainer.
    """

    is_beside = True

    def __init__(self, leader: Steps) -> None:
        super().__init__(leader.session, leader.draws)
        self._leader, self._number = leader, leader.others + 1

    def join(self) -> None:
        """Tells the steps of the other trainer, for good, that there are steps beside them."""
        self._leader.pauses, self._leader.others = True, self._leader.others + 1

    def check_leads(self) -> None:
        """Raises ValueError: the other trainer leads."""
        raise ValueError(
            "this trainer steps beside another one, which has the plan: pass the other one as "
            "`beside`, and call batch_sampler of the other one"
        )

    def check_single(self) -> None:
        """Raises ValueError: there are several trainers."""
        raise ValueError(SEVERAL_CHECKPOINTS)

    def begin(self, batch_size: int | None, params: Sequence[gluon.Parameter]) -> StepSizes:
        """Begins a step; the total of its sizes is known at its end."""
        self.draws.check_adding(params)
        running = self._sizes(batch_size)
        if running.is_planned:
            running = _on_batch(self._leader.now, running, batch_size)
        self.now = running
        return running

    def end(
        self, computed: Wait, summed: Wait, weight: float | None = None, *, at_once: bool = True
    ) -> None:
        """Passes the barrier within the step of the other trainer."""
        if self.now is None:
            raise RuntimeError("a step must begin before it ends")
        local = self.now.local
        sizes = self.session.pass_inner(self._number, computed, summed, local, weight)
        self.now = self.now._replace(total=sum(sizes))


def _on_batch(last: StepSizes | None, running: StepSizes, batch_size: int | None) -> StepSizes:
    """Returns the sizes of a step on a whole batch of either step."""
    if batch_size is None:
        raise ValueError(
            "allreduce_grads of a trainer beside another one needs the samples of this worker's "
            "batch, because the other one may step before or after it: pass batch_size"
        )
    if last is not None and batch_size == last.local:
        return last
    running._replace(parts=()).check(batch_size)
    return running
