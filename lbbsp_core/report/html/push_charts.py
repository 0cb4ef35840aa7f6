"""Charts of an asynchronous run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lbbsp_core.report.charts import (
    BUSY,
    WAITING,
    Chart,
    axes,
    bar,
    bar_layout,
    lines,
    short_name,
    spread,
)
from lbbsp_core.report.html.pushes import PushReport


def push_charts(report: PushReport) -> Iterator[Chart]:
    """Yields the charts of an asynchronous run."""
    ranks = [worker.rank for worker in report.workers]
    busy = [min(worker.busy_share, 1.0) for worker in report.workers]
    bars = [bar(ranks, busy, "busy", BUSY), bar(ranks, [1 - x for x in busy], "other", WAITING)]
    layout = bar_layout(len(ranks))
    caption = "Share of the time for which each worker was busy with an iteration; the rest is "
    caption += "waiting, input and communication."
    yield Chart("shares", "Where the time goes", caption, bars, layout)
    for name, title, values, unit in (
        ("batches", "Batch sizes", report.samples, "samples"),
        ("speeds", "Speeds", report.samples / report.busy, "samples/s"),
        ("staleness", "Staleness", report.staleness.astype(np.float64), "updates by others"),
    ):
        curves = []
        for rank in ranks:
            own = report.worker == rank
            curves += lines(report.push[own], values[own][:, None], [short_name(rank)], first=rank,
                             of=len(ranks))  # fmt: skip
        rows = [["worker", "smallest", "median", "largest"]]
        rows += [[str(rank), *spread(values[report.worker == rank])] for rank in ranks]
        caption = f"{title} of each worker's pushes, in {unit}."
        yield Chart(name, title, caption, curves, axes("push", unit), rows)
