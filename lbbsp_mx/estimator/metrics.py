"""Metrics of ``gluon.contrib.estimator`` over all workers, and an end of the fit on all of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from mxnet.gluon.contrib.estimator import CheckpointHandler, EpochEnd
from mxnet.metric import CompositeEvalMetric, EvalMetric

from lbbsp_core.runtime.exchange.collectives import sums
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx import compat
from lbbsp_mx.reliability.agreement import ends_epoch

logger = logging.getLogger("lbbsp.mx")

_AFTER_VALIDATION: Final = -999
"""Priority between gluon's ValidationHandler and the handlers that read metrics."""

_PARTS: Final = ("sum_metric", "num_inst", "global_sum_metric", "global_num_inst")
Values = list[float]


class EpochEnds(EpochEnd):
    """Handler that makes the ends of epochs the same on all workers.

    At the end of a whole epoch it replaces the sums of all metrics by those over the workers, until
    the next epoch begins: handlers then read the same values. If a handler still ends the fit on
    one worker alone, the others end after an epoch without steps. Where a worker has left an epoch
    before its end, nothing is exchanged, because the others may be in a step.
    """

    priority = _AFTER_VALIDATION

    def __init__(self) -> None:
        self._session: PipelinedSession | None = None
        self._has_ended = False
        self._shown: list[tuple[EvalMetric, Values, Values]] = []
        self.stops = False
        """Whether another worker has ended the fit."""
        self.writers: list[CheckpointHandler] = []
        """Handlers of the fit that write files."""

    def begin(self, session: PipelinedSession) -> None:
        """Begins a fit; a collective. In folders that are those of worker 0, it alone writes."""
        self._session, self._has_ended, self.stops = session, False, False
        folders = [str(Path(each.model_dir).resolve()) for each in self.writers]
        session.finish_barrier()
        rows = session.collectives.all_gather([crc32(repr(folders).encode())])
        if session.collectives.rank and rows[session.collectives.rank] == rows[0]:
            for each in self.writers:
                each._save_symbol = each._save_params_and_trainer = lambda *_: None

    def epoch_begin(self) -> None:
        """Restores this worker's own sums, and skips the epoch if another worker ends the fit."""
        for metric, local, shown in self._shown:
            if _read(metric) == shown:
                _write(metric, local)
        self._shown = []
        if self._takes_end() and self._session.any_worker(False):
            self.stops = True
            self._session.skip_epoch()

    def epoch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        """Sums the metrics over workers; returns whether another worker has ended the fit."""
        self._has_ended = not self.stops and _is_at_epoch_end(self._session)
        if self._has_ended:
            metrics = list(_summable([*estimator.train_metrics, *estimator.val_metrics]))
            local = [_read(metric) for metric in metrics]
            flat = sums(self._session.collectives, [each for values in local for each in values])
            rows = [flat[i : i + len(_PARTS)] for i in range(0, len(flat), len(_PARTS))]
            for metric, row in zip(metrics, rows, strict=True):
                _write(metric, row)
            self._shown = list(zip(metrics, local, rows, strict=True))
        return self.stops

    def end(self) -> None:
        """Tells the other workers that the fit ends."""
        if self._takes_end():
            self._session.any_worker(True)

    def _takes_end(self) -> bool:
        has_ended, self._has_ended = self._has_ended, False
        return has_ended


@functools.cache
def join_estimators() -> None:
    """Lets estimators run the `ends` of a handler too, at their place among its event handlers."""
    if not compat.add_handlers(_all_ends):
        logger.warning(
            "this version of MXNet sorts the handlers of estimators otherwise than 1.9.1: metrics "
            "stay those of each worker, so let no handler end a fit by them; use MXNet 1.9.1"
        )


def _all_ends(handlers: Sequence[Any]) -> list[Any]:
    ends = [each.ends for each in handlers if isinstance(_ends_of(each), EpochEnds)]
    for each in ends:
        each.writers = [one for one in handlers if isinstance(one, CheckpointHandler)]
    return ends


def _ends_of(handler: Any) -> Any:
    return getattr(handler, "ends", None)


def _is_at_epoch_end(session: PipelinedSession | None) -> bool:
    """Returns whether the order's epoch has ended, which is then so on all workers."""
    return session is not None and session.workers > 1 and ends_epoch(session, session.step - 1)


def _summable(metrics: Iterable[EvalMetric]) -> Iterable[EvalMetric]:
    """Yields each metric that keeps a sum and a number, once."""
    seen: set[int] = set()
    for metric in metrics:
        parts = metric.metrics if isinstance(metric, CompositeEvalMetric) else [metric]
        for part in parts:
            computed = isinstance(getattr(type(part), "sum_metric", None), property)
            if id(part) not in seen and not computed and hasattr(part, "sum_metric"):
                seen.add(id(part))
                yield part


def _read(metric: EvalMetric) -> Values:
    return [float(getattr(metric, part, 0)) for part in _PARTS]


def _write(metric: EvalMetric, values: Values) -> None:
    for part, value in zip(_PARTS, values, strict=True):
        setattr(metric, part, int(value) if "num" in part else value)
