"""Charts of an asynchronous run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lbbsp_core.report import charts
from lbbsp_core.report.charts import Chart
from lbbsp_core.report.html.pushes import PushReport


def push_charts(report: PushReport) -> Iterator[Chart]:
    """Yields the charts of an asynchronous run."""
    ranks = [worker.rank for worker in report.workers]
    names = list(map(charts.short_name, ranks))
    busy = 100 * np.minimum([worker.busy_share for worker in report.workers], 1.0)
    parts = (("busy", busy, charts.BUSY), ("other", 100 - busy, charts.WAITING))
    bars = [charts.bar(names, values, what, colour) for what, values, colour in parts]
    caption = "Share of the time for which each worker was busy with an iteration; the rest is "
    caption += "waiting, input and communication."
    yield Chart("shares", "Where the time goes", caption, bars, charts.bar_layout(len(ranks)))
    for name, title, values, unit in (
        ("batches", "Batch sizes", report.samples, "samples"),
        ("speeds", "Speeds", report.samples / report.busy, "samples/s"),
        ("staleness", "Staleness", report.staleness.astype(np.float64), "updates by others"),
    ):
        curves: list[charts.Trace] = []
        for rank in ranks:
            own = report.worker == rank
            curves += charts.lines(
                report.push[own], values[own][:, None], [names[rank]], first=rank, of=len(ranks)
            )
        rows = charts.spread_table("worker", {str(r): values[report.worker == r] for r in ranks})
        caption = f"{title} of each worker's pushes, in {unit}."
        yield Chart(name, title, caption, curves, charts.axes("push", unit), rows)
