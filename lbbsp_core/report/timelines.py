"""Plots of simulated runs: timelines, updates, accuracy and scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.report.figure import new_figure
from lbbsp_core.report.labels import label_lines, plain_ticks
from lbbsp_core.sim import AsyncRun, Timeline
from lbbsp_core.sim.experiment import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Floats = npt.NDArray[np.float64]

ITERATIONS, WORKERS = 12, 8
"""Numbers of iterations and workers that a timeline shows."""

_LABEL_INCHES = 0.18
"""Height of a panel for each of many labels beside it."""

_MOST_SPANS = 40 * ITERATIONS
_COLOURS = (
    "#1f6fb4", "#e08e2b", "#2a9d8f", "#d1495b", "#8f5fbf", "#8c6d31", "#c2549a", "#6b7f2a",
    "#1592b8", "#5f6b7a",
)  # fmt: skip

_BUSY, _WAIT = "#1f6fb4", "#f2c38f"


def draw_all(results: Sequence[Result], folder: Path) -> Iterator[Path]:
    """Draws timelines, updates, and accuracy and scaling if there are any; yields each path."""
    plots = {"timeline": _timelines, "updates": _updates}
    if any(result.curve is not None for result in results):
        plots["accuracy"] = _accuracy
    if len({result.row.workers for result in results}) > 1:
        plots["scaling"] = _scaling
    for name, plot in plots.items():
        path = folder / f"{name}.png"
        plot(results).savefig(path)
        yield path


def spans(
    run: Timeline | AsyncRun, iterations: int = ITERATIONS
) -> Iterator[tuple[int, Floats, Floats, Floats]]:
    """Yields the rank, start, push and release times of the first iterations of some workers."""
    if isinstance(run, AsyncRun):
        schedule = run.schedule
        for rank in range(min(WORKERS, run.workers)):
            own = np.flatnonzero(schedule.worker == rank)[:iterations]
            push, release = schedule.push[own], schedule.release[own]
            yield rank, schedule.start[own], push, np.where(np.isfinite(release), release, push)
        return
    ends = np.cumsum(run.wall_seconds[:iterations])
    starts = np.concatenate([[0.0], ends[:-1]])
    for rank in range(min(WORKERS, run.sizes.shape[1])):
        yield rank, starts, starts + run.push_seconds[:iterations, rank], ends


def update_times(run: Timeline | AsyncRun) -> Floats:
    """Returns the times at which updates enter the model, ascending."""
    if isinstance(run, Timeline):
        return np.cumsum(run.wall_seconds)
    entered = run.schedule.update >= 0
    times = np.zeros(run.schedule.updates)
    np.maximum.at(times, run.schedule.update[entered], run.schedule.push[entered])
    return times


def _timelines(results: Sequence[Result]) -> Figure:
    """Plots all runs over the same time, in which the fastest one ends its first iterations."""
    figure = new_figure(9, 1.5 * len(results) + 0.4)
    panels = figure.subplots(len(results), 1, squeeze=False, sharex=True)[:, 0]
    until = min(_end(spans(result.run)) for result in results)
    for axes, result in zip(panels, results, strict=True):
        for rank, start, push, release in spans(result.run, _MOST_SPANS):
            shown = start < until
            start, push, release = start[shown], push[shown], release[shown]
            axes.barh(rank, push - start, left=start, color=_BUSY, edgecolor="white", height=0.8)
            axes.barh(rank, release - push, left=push, color=_WAIT, height=0.8)
        axes.set_ylim(rank + 0.6, -0.6)
        axes.set_yticks(range(rank + 1))
        axes.tick_params(labelsize=8)
        axes.set_ylabel("worker", fontsize=8)
        shown_of = f" (0 to {rank} shown)" * (rank + 1 < result.row.workers)
        title = f"{result.row.name}, {result.row.workers} workers{shown_of}: {result.row.title}"
        axes.set_title(title, fontsize=9, parse_math=False)
    panels[-1].set_xlim(0, until)
    plain_ticks(panels[-1].xaxis)
    panels[-1].set_xlabel("virtual seconds: busy (blue), waiting and communication (orange)")
    return figure


def _end(shown: Iterator[tuple[int, Floats, Floats, Floats]]) -> float:
    """Returns the last release; a worker that was preempted at once has none."""
    return max((float(release.max()) for *_, release in shown if release.size), default=1.0)


def _updates(results: Sequence[Result]) -> Figure:
    """Plots the mean seconds between updates, over consecutive windows."""
    figure, panels = _panels(results)
    for axes, (_, own) in zip(panels, _groups(results), strict=True):
        lines = []
        for number, result in enumerate(own):
            times = update_times(result.run)
            per = max(1, len(times) // 40)
            marks = np.concatenate([[0.0], times[per - 1 :: per]])
            lines += axes.step(
                marks[1:], np.diff(marks) / per, where="pre", label=result.row.title, lw=1.2,
                **_style(number),
            )  # fmt: skip
        _finish(axes, "virtual seconds", "seconds per update", lines)
    return figure


def _accuracy(results: Sequence[Result]) -> Figure:
    figure, panels = _panels(results)
    for axes, (_, own) in zip(panels, _groups(results), strict=True):
        lines = []
        for number, result in enumerate(own):
            if result.curve is not None:
                title = result.row.title
                lines += axes.plot(*result.curve, label=title, lw=1.2, **_style(number))
        _finish(axes, "virtual seconds", "accuracy", lines)
    return figure


def _scaling(results: Sequence[Result]) -> Figure:
    """Plots efficiency by number of workers, a line for each scheme of each scenario."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    rows = sorted((result.row for result in results), key=lambda row: (row.name, row.title))
    lines: list[Line2D] = []
    for (name, title), own in groupby(rows, key=lambda row: (row.name, row.title)):
        points = sorted((row.workers, row.efficiency) for row in own)
        label, style = f"{name}: {title}", _style(len(lines))
        lines += axes.plot(*zip(*points, strict=True), marker="o", label=label, **style)
    axes.set_xscale("log")
    axes.set_xticks(sorted({row.workers for row in rows}))
    _finish(axes, "workers", "efficiency", lines)
    return figure


def _groups(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    def name(result: Result) -> str:
        return f"{result.row.name}, {result.row.workers} workers"

    return [(title, list(own)) for title, own in groupby(results, key=name)]


def _panels(results: Sequence[Result]) -> tuple[Figure, list[Axes]]:
    groups = _groups(results)
    height = max(3.2, _LABEL_INCHES * max(len(own) for _, own in groups))
    figure = new_figure(9, height * len(groups))
    panels = list(figure.subplots(len(groups), 1, squeeze=False)[:, 0])
    for axes, (title, _) in zip(panels, groups, strict=True):
        axes.set_title(title, fontsize=9, parse_math=False)
    return figure, panels


def _finish(axes: Axes, x: str, y: str, lines: Sequence[Line2D]) -> None:
    """Names the axes, and labels the lines beside their ends."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)
    label_lines(axes, lines)


def _style(number: int) -> dict[str, Any]:
    """Returns the colour of a line; where colours are repeated, the line is dashed."""
    repeats, place = divmod(number, len(_COLOURS))
    return {"color": _COLOURS[place], "linestyle": ("-", "--", ":", "-.")[repeats % 4]}
