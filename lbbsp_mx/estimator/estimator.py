"""LB-BSP for ``gluon.contrib.estimator``: `LoadBalancingHandler`, and metrics over all workers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from mxnet.gluon.contrib.estimator import event_handler as event
from mxnet.metric import CompositeEvalMetric, EvalMetric

from lbbsp_core.runtime.exchange.collectives import sums
from lbbsp_core.runtime.extensions.record_file import Recording
from lbbsp_core.runtime.loop.checkpoint_schedule import Every, require_every
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_core.validate import require_path
from lbbsp_mx import compat
from lbbsp_mx.fence import arrays_in
from lbbsp_mx.reliability.agreement import ends_epoch
from lbbsp_mx.trainer.trainer import Trainer

_PARTS: Final = ("sum_metric", "num_inst", "global_sum_metric", "global_num_inst")
Values = list[float]


class LoadBalancingHandler(
    event.TrainBegin, event.TrainEnd, event.EpochBegin, event.EpochEnd, event.GradientUpdateHandler
):
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
        self, priority: int = -2000, *, checkpoint: str | Path | None = None, every: Every = "epoch"
    ) -> None:
        super().__init__(priority)
        if checkpoint is not None:
            require_path("checkpoint", checkpoint)
        require_every(every, checkpoint)
        self._checkpoint, self._every = checkpoint, every
        self._batches = 0  # of this epoch
        self.ends = EpochEnds()
        join_estimators()

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Checks the estimator's trainer, and continues from the newest checkpoint.

        Raises:
            ValueError: The trainer is no `lbbsp_mx.Trainer`, or the checkpoint is of another job.
        """
        if not isinstance(estimator.trainer, Trainer):
            kind = type(estimator.trainer)
            raise ValueError(
                f"the estimator's trainer must be an lbbsp_mx.Trainer, got {kind.__module__}."
                f"{kind.__name__}: pass Estimator(..., trainer=lbbsp_mx.Trainer(...))"
            )
        checkpoints, session = estimator.trainer._checkpoints, estimator.trainer._session
        folder = None if checkpoints.schedule.regular else self._checkpoint
        if folder is not None and checkpoints.resume(folder, self._every):
            _leave_out_what_is_done(estimator)
        checkpoints.schedule.open()
        self.ends.begin(session)
        session.extensions[Recording].plan(epochs=estimator.max_epoch, steps=estimator.max_batch)

    def train_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Writes the last checkpoint and metrics; SIGTERM then ends the process at once."""
        self.ends.end(estimator.trainer._session)
        estimator.trainer._checkpoints.schedule.end()
        estimator.trainer._session.flush()

    def epoch_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Excludes the first step, because it may follow a validation."""
        self._batches = 0
        self.ends.epoch_begin(estimator.trainer._session)
        estimator.trainer.exclude_step()

    def epoch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        """Returns whether the fit ends because a worker has requested it."""
        return bool(estimator.trainer.stopping)

    def batch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        """Makes a step of the trainer, and returns whether all workers stop after it.

        With `accumulate`, that is after its last batch, and clears the gradients.

        Raises:
            ValueError: The losses are already averaged, without ``mean_loss=True``.
        """
        losses, labels = (list(arrays_in(kwargs[name])) for name in ("loss", "label"))
        samples = sum(label.shape[0] for label in labels)
        averaged = sum(loss.size for loss in losses) == len(losses) < samples
        trainer, self._batches = estimator.trainer, self._batches + 1
        if averaged and not trainer.mean_loss:
            raise ValueError(
                f"the loss must be per sample, got one number for {samples} samples: do not "
                "average it, or pass mean_loss=True to lbbsp_mx.Trainer if it is a mean"
            )
        if self._batches % trainer._steps.draws.parts:
            return False
        trainer.step(samples)
        if trainer._steps.draws.parts > 1:
            for param in trainer._params:
                param.zero_grad()
        return bool(trainer.stopping)


def _leave_out_what_is_done(estimator: Any) -> None:
    """Lowers the numbers of epochs and batches, which the handler that ends the fit reads later."""
    session = estimator.trainer._session
    batches = session.step_of_order(session.step) * estimator.trainer._steps.draws.parts
    for name, done in (("max_epoch", estimator.trainer.epoch), ("max_batch", batches)):
        total = getattr(estimator, name)
        if total is not None and total > done:
            setattr(estimator, name, total - done)
        elif total is not None:
            estimator.max_epoch = 1
            session.skip_epoch()


class EpochEnds(event.EpochEnd):
    """Handler that makes the ends of epochs the same on all workers.

    At the end of a whole epoch it replaces the sums of all metrics by those over the workers, until
    the next epoch begins: handlers then read the same values. If a handler still ends the fit on
    one worker alone, the others end after an epoch without steps. Where a worker has left an epoch
    before its end, nothing is exchanged, because the others may be in a step.
    """

    priority = -999  # between gluon's ValidationHandler and the handlers that read metrics

    def __init__(self) -> None:
        self._has_ended = self._stops = False  # this epoch; the fit, by another worker
        self._shown: list[tuple[EvalMetric, Values, Values]] = []
        self.writers: list[event.CheckpointHandler] = []  # handlers of the fit that write files

    def begin(self, session: PipelinedSession) -> None:
        """Begins a fit; a collective. In folders that are those of worker 0, it alone writes."""
        self._has_ended = self._stops = False
        folders = [str(Path(writer.model_dir).resolve()) for writer in self.writers]
        session.finish_barrier()
        rows = session.collectives.all_gather([crc32(repr(folders).encode())])
        if session.rank and rows[session.rank] == rows[0]:
            for writer in self.writers:
                writer._save_symbol = writer._save_params_and_trainer = lambda *_: None

    def epoch_begin(self, session: PipelinedSession) -> None:
        """Restores this worker's own sums, and skips the epoch if another worker ends the fit."""
        while self._shown:
            metric, local, shown = self._shown.pop()
            if _read(metric) == shown:
                _write(metric, local)
        if self._agrees(session, False):
            self._stops = True
            session.skip_epoch()

    def epoch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        """Sums the metrics over workers; returns whether another worker has ended the fit."""
        session: PipelinedSession = estimator.trainer._session
        # Where the order's epoch has ended, it has on all workers.
        is_end = session.workers > 1 and ends_epoch(session, session.step - 1)
        self._has_ended = is_end and not self._stops
        if self._has_ended:
            metrics = list(_summable([*estimator.train_metrics, *estimator.val_metrics]))
            local = [_read(metric) for metric in metrics]
            flat = sums(session.collectives, [number for values in local for number in values])
            shown = [flat[i : i + len(_PARTS)] for i in range(0, len(flat), len(_PARTS))]
            self._shown = list(zip(metrics, local, shown, strict=True))
            for metric, _, row in self._shown:
                _write(metric, row)
        return self._stops

    def end(self, session: PipelinedSession) -> None:
        """Tells the other workers that the fit ends."""
        self._agrees(session, True)

    def _agrees(self, session: PipelinedSession, ends: bool) -> bool:
        """Tells the others after an epoch whether this worker ends; returns whether any does."""
        has_ended, self._has_ended = self._has_ended, False
        return has_ended and session.any_worker(ends)


@functools.cache
def join_estimators() -> None:
    """Lets estimators run the `ends` of a handler too, at their place among its event handlers."""

    def all_ends(handlers: Sequence[Any]) -> list[Any]:
        ends = [handler.ends for handler in handlers if isinstance(handler, LoadBalancingHandler)]
        for end in ends:
            end.writers = [
                handler for handler in handlers if isinstance(handler, event.CheckpointHandler)
            ]
        return ends

    compat.add_handlers(all_ends)


def _summable(metrics: Iterable[EvalMetric]) -> Iterable[EvalMetric]:
    """Yields each metric that keeps a sum and a number, once."""
    ids: set[int] = set()
    for metric in metrics:
        for part in metric.metrics if isinstance(metric, CompositeEvalMetric) else [metric]:
            computed = isinstance(getattr(type(part), "sum_metric", None), property)
            if id(part) not in ids and not computed and hasattr(part, "sum_metric"):
                ids.add(id(part))
                yield part


def _read(metric: EvalMetric) -> Values:
    return [float(getattr(metric, part, 0)) for part in _PARTS]


def _write(metric: EvalMetric, values: Values) -> None:
    for part, value in zip(_PARTS, values, strict=True):
        setattr(metric, part, int(value) if "num" in part else value)
