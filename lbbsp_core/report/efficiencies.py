"""Plot of simulated efficiencies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lbbsp_core.report.figure import new_figure
from lbbsp_core.sim.experiment import Row


def plot_efficiencies(rows: Sequence[Row], path: Path) -> None:
    """Plots a bar for each run, in a panel for each trace; the oracle has efficiency 1."""
    panels = [(file, list(own)) for file, own in groupby(rows, key=_panel_title)]
    heights = [len(own) + 3 for _, own in panels]
    figure = new_figure(8, 0.24 * sum(heights))
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for panel, (file, own) in enumerate(panels):
        axes = figure.add_subplot(grid[panel])
        names = [row.title for row in own]
        bars = axes.barh(range(len(own)), [row.efficiency for row in own], color="#1f6fb4")
        axes.bar_label(bars, fmt=" %.3f", fontsize=8)
        axes.set_yticks(range(len(own)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.1 * max(1.0, *(row.efficiency for row in own)))
        axes.axvline(1, color="0.6", linewidth=1)
        axes.set_title(file, fontsize=9, parse_math=False)
    figure.axes[-1].set_xlabel("efficiency: time of the oracle / time")
    figure.savefig(path)


def _panel_title(row: Row) -> str:
    return row.name if row.trace else f"{row.name}, {row.workers} workers"
