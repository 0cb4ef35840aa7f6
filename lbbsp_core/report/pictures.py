"""Picture of the demo: waiting times before and after, and the batch sizes of the balancer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lbbsp_core.report.figure import new_figure
from lbbsp_core.report.summary import Comparison, RunSummary, summarise
from lbbsp_core.runtime.record.record import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORKERS = ("#1f6fb4", "#2a9d8f", "#d1495b", "#8f5fbf", "#e08e2b", "#5f6b7a")
WAITING = "#d9dde2"
INK = "#20262d"
QUIET = "#6b7480"


def draw_comparison(
    bsp: Run,
    lbbsp: Run,
    path: Path,
    *,
    speeds: Sequence[float] | None = None,
    note: str = "",
) -> None:
    """Draws two runs of one training, plain and balanced, as a PNG.

    The upper panels show one bar per worker, busy time followed by waiting time, for both runs on
    one scale. The lower panel shows the batch sizes of the balanced run, step by step.

    Args:
        bsp: Record of the plain run.
        lbbsp: Record of the balanced run.
        path: File to write; its folder must exist.
        speeds: Relative speed of each worker, shown beside its name.
        note: Line under the title, such as the accuracies.
    """
    figure = new_figure(11, 7.4, dpi=130, constrained=False)
    figure.set_facecolor("white")
    comparison = Comparison(summarise(bsp), summarise(lbbsp))
    names = _names(comparison.lbbsp.workers, speeds)
    before, after, history = _axes(figure)
    scale = max(comparison.bsp.step_seconds, comparison.lbbsp.step_seconds)
    _bars(before, comparison.bsp, _usual_sizes(bsp), names, "Plain BSP: equal batches", scale)
    _bars(after, comparison.lbbsp, _usual_sizes(lbbsp), names, "LB-BSP: balanced batches", scale)
    after.tick_params(axis="y", labelleft=False)
    _batch_sizes(history, lbbsp, names)
    _title(figure, comparison, note)
    figure.savefig(path, format="png")


def _names(workers: int, speeds: Sequence[float] | None) -> list[str]:
    if speeds is None or len(speeds) != workers:
        return [f"worker {rank}" for rank in range(workers)]
    fastest = max(speeds)
    return [
        f"worker {rank}" + (f"\n{speed / fastest:.2g} × speed" if speed < fastest else "")
        for rank, speed in enumerate(speeds)
    ]


def _axes(figure: Figure) -> tuple[Axes, Axes, Axes]:
    grid = figure.add_gridspec(
        2, 2, left=0.105, right=0.965, top=0.775, bottom=0.085, hspace=0.42, wspace=0.06,
        height_ratios=(1.15, 1),
    )  # fmt: skip
    before = figure.add_subplot(grid[0, 0])
    after = figure.add_subplot(grid[0, 1], sharey=before)
    history = figure.add_subplot(grid[1, :])
    for axes in (before, after, history):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(WAITING)
        axes.tick_params(length=0, colors=QUIET, labelsize=11)
    return before, after, history


def _title(figure: Figure, comparison: Comparison, note: str) -> None:
    figure.text(
        0.03, 0.965, f"LB-BSP trains {comparison.speedup:.2f}× as fast as plain BSP",
        size=27, weight="bold", color=INK, va="top",
    )  # fmt: skip
    figure.text(0.03, 0.895, note, size=13, color=QUIET, va="top", parse_math=False)


def _usual_sizes(run: Run) -> list[int]:
    """Returns the median batch size of each worker in the steady steps."""
    plans = (line.sizes for line in run.last_half())
    return [round(median(own)) for own in zip(*plans, strict=True)]


def _bars(
    axes: Axes,
    summary: RunSummary,
    sizes: Sequence[int],
    names: Sequence[str],
    title: str,
    scale: float,
) -> None:
    """Draws the busy and waiting milliseconds of a step as a bar per worker, rank 0 on top."""
    step = summary.step_seconds
    ranks = list(range(summary.workers))
    busy = [min(seconds, step) for seconds in summary.busy_seconds]
    waiting = [step - seconds for seconds in busy]
    axes.barh(ranks, busy, height=0.62, color=[_colour(rank) for rank in ranks])
    axes.barh(ranks, waiting, left=busy, height=0.62, color=WAITING)
    for rank in ranks:
        _label(axes, rank, 0, busy[rank], f"{sizes[rank]} samples", scale, "white")
        _label(axes, rank, busy[rank], waiting[rank], "waiting", scale, INK)
    axes.axvline(step, color=INK, linewidth=1.6)
    axes.text(
        step + 0.012 * scale, -0.5, f"{step * 1e3:.0f} ms\na step",
        color=INK, size=12, weight="bold", va="top",
    )  # fmt: skip
    axes.set_title(title, loc="left", size=14, weight="bold", color=INK, pad=10)
    axes.set_xlim(0, 1.17 * scale)
    axes.set_ylim(summary.workers - 0.45, -0.55)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(ranks, names, color=INK)


def _label(
    axes: Axes, rank: int, left: float, width: float, label: str, scale: float, colour: str
) -> None:
    """Writes a label and the milliseconds into a bar that is wide enough."""
    if width < 0.2 * scale:
        return
    text = f"{label}\n{width * 1e3:.0f} ms"
    axes.text(left + width / 2, rank, text, color=colour, size=11, ha="center", va="center")


def _batch_sizes(axes: Axes, run: Run, names: Sequence[str]) -> None:
    """Draws the batch size of each worker, step by step, with its name at the end of the line."""
    recent = run.with_same_workers()
    full = [line for line in recent if not line.short] or recent
    steps, sizes = [line.step for line in full], [line.sizes for line in full]
    end = steps[-1] + 0.01 * (steps[-1] - steps[0] + 1)
    heights = spread_labels([float(size) for size in sizes[-1]], 0.11 * max(map(max, sizes)))
    for rank, name in enumerate(names):
        own = [plan[rank] for plan in sizes]
        axes.step(steps, own, where="post", color=_colour(rank), linewidth=2.2)
        axes.text(
            end, heights[rank], name.split("\n")[0], color=_colour(rank), size=11.5,
            weight="bold", va="center",
        )  # fmt: skip
    axes.set_title(
        "Batch size of each worker, step by step (LB-BSP)",
        loc="left", size=14, weight="bold", color=INK, pad=10,
    )  # fmt: skip
    axes.set_xlim(steps[0], steps[-1] + 0.1 * (steps[-1] - steps[0] + 1))
    axes.set_xticks([tick for tick in axes.get_xticks() if steps[0] <= tick <= steps[-1] + 1])
    axes.set_ylim(0, 1.12 * max(map(max, sizes)))
    axes.set_xlabel("step", color=QUIET, size=11)
    axes.grid(axis="y", color=WAITING, linewidth=0.7)
    axes.set_axisbelow(True)


def spread_labels(heights: Sequence[float], gap: float) -> list[float]:
    """Moves overlapping labels apart, upwards from the lowest one."""
    placed = list(heights)
    ascending = sorted(range(len(placed)), key=placed.__getitem__)
    for lower, upper in pairwise(ascending):
        placed[upper] = max(placed[upper], placed[lower] + gap)
    return placed


def _colour(rank: int) -> str:
    return WORKERS[rank % len(WORKERS)]
