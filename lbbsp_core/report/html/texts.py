"""Figures of a run as texts: tiles, tables and facts."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Final

import numpy as np

from lbbsp_core.report.html.figures import RunReport
from lbbsp_core.report.html.pushes import PushReport
from lbbsp_core.report.html.words import duration, percent, rate
from lbbsp_core.report.page import Tile
from lbbsp_core.runtime.record.record import RunHeader

_SHOWN_STEPS: Final = 12


def step_tiles(report: RunReport) -> list[Tile]:
    """Returns the most important figures of a run."""
    tiles = []
    if report.plain is not None:
        plain = report.plain
        note = f"estimate; {plain.low:.2f} to {plain.high:.2f}"
        tiles.append(Tile("Speed-up against plain BSP", f"{plain.speedup:.2f}×", note))
    communication = percent(report.communication_share)
    waits = f"{percent(report.imbalance)} for workers, {communication} communication"
    errors = [w.forecast_rmse for w in report.workers if w.forecast_rmse is not None]
    since = f" with {report.table.workers} workers" * bool(report.events.worker_changes)
    return [
        *tiles,
        Tile("Waiting", percent(report.waiting_share), waits),
        Tile("Step", duration(report.step_seconds), "median"),
        Tile("Throughput", rate(report.samples_per_second), "samples/s"),
        Tile(
            "Steps", f"{len(report.table.steps):,}", f"in {duration(report.total_seconds)}{since}"
        ),
        *(
            [Tile("Forecast error", percent(float(np.mean(errors))), "mean over workers")]
            if errors
            else []
        ),
    ]


def step_tables(report: RunReport) -> dict[str, list[list[str]]]:
    """Returns the tables of workers, hosts and events."""
    header = ["worker", "host", "device", "mean batch", "samples/s", "busy", "waiting for workers",
              "forecast error"]  # fmt: skip
    rows = [
        [str(w.rank), w.host, w.device, f"{w.batch:.1f}", f"{w.samples_per_second:.4g}",
         percent(w.busy_share, 1), percent(w.waiting_share, 1), _share(w.forecast_rmse)]
        for w in report.workers
    ]  # fmt: skip
    tables = {"Workers": _without_empty([header, *rows])}
    if len({w.host for w in report.workers}) > 1:
        tables["Hosts"] = _hosts(report)
    return tables | {"Events": _events(report)}


def _hosts(report: RunReport) -> list[list[str]]:
    """Returns the rows of the table of hosts: means over the workers of each."""
    rows = [["host", "workers", "samples/s", "busy", "waiting for workers"]]
    for host in dict.fromkeys(worker.host for worker in report.workers):
        own = [worker for worker in report.workers if worker.host == host]
        busy = float(np.mean([worker.busy_share for worker in own]))
        waits = float(np.mean([worker.waiting_share for worker in own]))
        speed = sum(worker.samples_per_second for worker in own)
        rows.append([host, str(len(own)), f"{speed:.4g}", percent(busy, 1), percent(waits, 1)])
    return rows


def _events(report: RunReport) -> list[list[str]]:
    events, table = report.events, report.table
    changes = [f"{step} (to {workers} workers)" for step, workers in events.worker_changes]
    plan = ["changes of the plan", str(events.plan_changes), ""]
    stops = [f"{step} ({reason})" if reason else str(step) for step, reason in events.stops]
    rows = [
        ["event", "number", "steps"],
        *([] if events.plan_changes is None else [plan]),
        ["steps with an excluded measurement", str(events.excluded_steps), ""],
        ["short steps", str(events.short_steps), ""],
        ["stops", str(len(stops)), _shown(stops)],
        ["restarts", str(events.starts - 1), _shown([str(step) for step in events.restarts])],
        ["changes of the number of workers", str(len(changes)), _shown(changes)],
    ]
    if changes:
        rows.append(["figures and charts are of the steps since", "", str(table.steps[0])])
    return rows


def _shown(texts: list[str]) -> str:
    rest = f" and {len(texts) - _SHOWN_STEPS} more" * (len(texts) > _SHOWN_STEPS)
    return ", ".join(texts[:_SHOWN_STEPS]) + rest


def push_tiles(report: PushReport) -> list[Tile]:
    """Returns the most important figures of an asynchronous run."""
    stale = report.staleness
    starts = "of the run; figures are of the last one" if report.starts > 1 else "of the run"
    return [
        Tile("Throughput", rate(report.samples_per_second), "samples/s"),
        Tile("Pushes", f"{len(report.push):,}", f"in {duration(report.total_seconds)}"),
        Tile("Staleness", f"{stale.mean():.1f}", f"updates, at most {stale.max()}"),
        Tile("Starts", str(report.starts), starts),
    ]


def push_tables(report: PushReport) -> dict[str, list[list[str]]]:
    """Returns the tables of an asynchronous run."""
    header = ["worker", "host", "device", "pushes", "samples", "samples/s", "busy",
              "mean staleness", "largest staleness"]  # fmt: skip
    rows = [
        [str(w.rank), w.host, w.device, f"{w.pushes:,}", f"{w.samples:,}",
         f"{w.samples_per_second:.4g}", percent(min(w.busy_share, 1.0), 1),
         f"{w.mean_staleness:.2f}", str(w.max_staleness)]
        for w in report.workers
    ]  # fmt: skip
    return {"Workers": _without_empty([header, *rows])}


def run_facts(header: RunHeader) -> dict[str, str]:
    """Returns what the header says, by name, without what is unknown."""
    given = {
        "Framework": header.framework,
        "Workers": str(header.workers),
        "Global batch size": str(header.global_batch_size),
        "Started": "" if header.started is None else _moment(header.started),
        "Policy": header.policy,
        "Predictor": header.predictor,
        "Cost": header.cost,
        "Synchroniser": header.sync,
        "Parameter servers": None if header.servers is None else str(header.servers),
        "Lag": None if header.lag is None else str(header.lag),
        "Driving factors": ", ".join(header.drivers),
        "Versions": ", ".join(f"{name} {version}" for name, version in header.versions.items()),
    }
    return {name: text for name, text in given.items() if text}


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a clock that is far off
        return f"{seconds:g} s since 1970"


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value, 1)


def _without_empty(rows: list[list[str]]) -> list[list[str]]:
    """Returns a table without the columns that have no text in any row."""
    kept = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    return [[row[column] for column in kept] for row in rows]
