"""What accompanies the steps of a trainer: `Training`."""

from __future__ import annotations

from typing import Any

from lbbsp_mx.reliability.agreement import Agreement
from lbbsp_mx.reliability.checkpoint import Checkpoints
from lbbsp_mx.reliability.parts import TrainerParts
from lbbsp_mx.store.native import runtime
from lbbsp_mx.trainer.steps import SEVERAL_CHECKPOINTS, Steps, StepsBeside


class Training:
    """Session, steps, comparisons and checkpoints of a trainer.

    `total` is the global batch size, `leader` that of the trainer beside which this one steps.
    """

    def __init__(
        self, parts: TrainerParts, steps: Steps, total: int | None, leader: Training | None = None
    ) -> None:
        self.parts, self.steps, self.session, self.total = parts, steps, steps.session, total
        self.agreement = Agreement(parts, self.session, leader and leader.agreement)
        self.checkpoints = Checkpoints(parts, self.session, steps.check_single)

    def end_with_process(self) -> None:
        """Ends the last step before this process leaves the cluster."""
        # Peers wait for the message of the last barrier, which comes first; a slow file system
        # comes last.
        runtime().endings.add(
            self.session.flush,
            self.checkpoints.close,
            self.agreement.close,
            self.session.finish_barrier,
        )

    def beside(self, total: int | None, parts: int, options: dict[str, Any]) -> StepsBeside:
        """Returns the steps of a trainer beside this one, if its arguments are those of this one.

        Raises ValueError, which names the remedy, if they differ.
        """
        self.steps.check_leads()
        if self.checkpoints.regular:
            raise ValueError(SEVERAL_CHECKPOINTS)
        for name, theirs, ours in (
            ("global_batch_size", total, self.total),
            ("accumulate", parts, self.steps.draws.parts),
        ):
            if theirs not in (None, ours):
                raise ValueError(
                    f"{name} must be that of the trainer beside which this one steps, {ours}, got "
                    f"{theirs}: pass it to that trainer, since both step on the same batches"
                )
        if options:
            raise ValueError(
                f"a trainer beside another one takes no options of the plan, got "
                f"{', '.join(options)}: pass them to the other trainer, whose plan both follow"
            )
        return StepsBeside(self.steps)

    def join(self) -> None:
        """Takes part in the steps of the other trainer, for good, once this one is complete."""
        self.steps.join()
        self.agreement.join()

    def begin_step(self) -> None:
        """Leaves if a worker was asked to, and compares what must be equal; before the sums."""
        self.checkpoints.begin_step()
        self.agreement.begin_step()

    def end_step(self, step: int) -> None:
        """Compares, and writes a checkpoint, where they are due after a step."""
        if not self.steps.is_beside:
            self.agreement.end_step(step)
            self.checkpoints.end_step(step)

    def begin_epoch(self) -> None:
        """Compares the parameters before the first batch is drawn."""
        self.steps.begin_epoch()
        self.agreement.before_draw()
