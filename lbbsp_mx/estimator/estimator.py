"""LB-BSP for ``gluon.contrib.estimator``: `LoadBalancingHandler`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxnet.gluon.contrib.estimator import (
    EpochBegin,
    EpochEnd,
    GradientUpdateHandler,
    TrainBegin,
    TrainEnd,
)

from lbbsp_core.runtime.checkpoint.writer import Every, require_every
from lbbsp_mx.estimator.metrics import EpochEnds, join_estimators
from lbbsp_mx.trainer.trainer import Trainer


class LoadBalancingHandler(TrainBegin, TrainEnd, EpochBegin, EpochEnd, GradientUpdateHandler):
    """Handler with which `Estimator.fit` trains on unequal workers that stop at the same step.

    Pass it as one of the ``event_handlers`` of `fit`, together with a loader that has the
    trainer's batch sampler. A handler that ends the training on one worker at the end of a batch
    must call `lbbsp_mx.Trainer.request_stop`; all workers then stop at the same step.

    At the end of an epoch of that sampler, handlers such as gluon's EarlyStoppingHandler,
    CheckpointHandler and LoggingHandler read metrics over all workers: their sums and numbers of
    values are added, those of the training and of a ValidationHandler. Metrics of another form, as
    Pearson's correlation, stay those of the worker. If a handler ends the fit on one worker alone,
    the others end too, after handlers have seen one more epoch, which has no steps. Only worker 0
    writes to the `model_dir` of CheckpointHandlers, unless workers name folders of their own.

    With a `checkpoint` folder the first `fit` continues where the last job has ended, and makes the
    epochs or batches that are left; see `lbbsp_mx.Trainer.resume`. The state at the end of a `fit`
    is written too. Metrics of an epoch that is continued are those of its rest.

    Args:
        priority: Order among the handlers, as for gluon's GradientUpdateHandler.
        checkpoint: Folder of the checkpoints, which all workers share; None writes none.
        every: Steps between two checkpoints, or "epoch".

    Example::

        handler = lbbsp_mx.LoadBalancingHandler(checkpoint="checkpoints", every=100)
        estimator.fit(loader, epochs=5, event_handlers=[handler])
    """

    def __init__(
        self,
        priority: int = -2000,
        *,
        checkpoint: str | Path | None = None,
        every: Every = "epoch",
    ) -> None:
        super().__init__(priority)
        require_every(every, checkpoint)
        self._checkpoint, self._every = checkpoint, every
        self.ends = EpochEnds()
        join_estimators()

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Checks the estimator's trainer, and continues from the newest checkpoint.

        Raises:
            ValueError: The trainer is no `lbbsp_mx.Trainer`, or the checkpoint is of another job.
        """
        if not isinstance(estimator.trainer, Trainer):
            raise ValueError(
                "the estimator's trainer must be an lbbsp_mx.Trainer, got "
                f"{type(estimator.trainer).__module__}.{type(estimator.trainer).__name__}: pass "
                "Estimator(..., trainer=lbbsp_mx.Trainer(...))"
            )
        checkpoints = estimator.trainer.training.checkpoints
        first = self._checkpoint is not None and not checkpoints.regular
        if first and checkpoints.resume(self._checkpoint, self._every):
            _leave_out_what_is_done(estimator)
        checkpoints.begin_training()
        self.ends.begin(estimator.trainer.training.session)

    def train_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Writes the last checkpoint and metrics; SIGTERM then ends the process at once."""
        self.ends.end()
        estimator.trainer.training.checkpoints.end_training()
        estimator.trainer.training.session.flush()

    def epoch_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Excludes the first step, because it may follow a validation."""
        self.ends.epoch_begin()
        estimator.trainer.exclude_step()

    def epoch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        """Returns whether the fit ends because a worker has requested it."""
        return bool(estimator.trainer.stopping)

    def batch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        """Makes a step of the trainer, and returns whether all workers stop after it.

        Raises:
            ValueError: The losses are already averaged, without ``mean_loss=True``.
        """
        losses, labels = _listed(kwargs["loss"]), _listed(kwargs["label"])
        samples = sum(label.shape[0] for label in labels)
        averaged = sum(loss.size for loss in losses) == len(losses) < samples
        if averaged and not estimator.trainer.mean_loss:
            raise ValueError(
                f"the loss must be per sample, got one number for {samples} samples: do not "
                "average it, or pass mean_loss=True to lbbsp_mx.Trainer if it is a mean"
            )
        estimator.trainer.step(samples)
        return bool(estimator.trainer.stopping)


def _leave_out_what_is_done(estimator: Any) -> None:
    """Lowers the numbers of epochs and batches, which the handler that ends the fit reads later."""
    session = estimator.trainer.training.session
    steps = session.step_of_order(session.step)
    done = {"max_epoch": estimator.trainer.epoch, "max_batch": steps}
    for name, count in done.items():
        total = getattr(estimator, name)
        if total is not None and total > count:
            setattr(estimator, name, total - count)
        elif total is not None:
            estimator.max_epoch = 1
            session.skip_epoch()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
