"""Charts of an asynchronous run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lbbsp_core.report.charts import (
    BUSY,
    WAITING,
    Chart,
    Trace,
    axes,
    bar,
    bar_layout,
    lines,
    short_name,
    spread_table,
)
from lbbsp_core.report.html.pushes import PushReport


def push_charts(report: PushReport) -> Iterator[Chart]:
    """Yields the charts of an asynchronous run."""
    ranks = [worker.rank for worker in report.workers]
    names = list(map(short_name, ranks))
    busy = 100 * np.minimum([worker.busy_share for worker in report.workers], 1.0)
    bars = [bar(names, busy, "busy", BUSY), bar(names, 100 - busy, "other", WAITING)]
    caption = "Share of the time for which each worker was busy with an iteration; the rest is "
    caption += "waiting, input and communication."
    yield Chart("shares", "Where the time goes", caption, bars, bar_layout(len(ranks)))
    for name, title, values, unit in (
        ("batches", "Batch sizes", report.samples, "samples"),
        ("speeds", "Speeds", report.samples / report.busy, "samples/s"),
        ("staleness", "Staleness", report.staleness.astype(np.float64), "updates by others"),
    ):
        curves: list[Trace] = []
        for rank in ranks:
            own = report.worker == rank
            curves += lines(report.push[own], values[own][:, None], [names[rank]], first=rank,
                             of=len(ranks))  # fmt: skip
        rows = spread_table("worker", {str(r): values[report.worker == r] for r in ranks})
        caption = f"{title} of each worker's pushes, in {unit}."
        yield Chart(name, title, caption, curves, axes("push", unit), rows)
