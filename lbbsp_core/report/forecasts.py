"""A picture of forecasts against what was measured."""

from __future__ import annotations

from pathlib import Path

from lbbsp_core.report.figure import new_figure
from lbbsp_core.sim.backtest import DEFAULT, Evaluation

SHOWN = 120
"""Iterations drawn: the last ones of each trace's first worker."""


def plot_forecasts(result: Evaluation, path: Path) -> None:
    """Draws speed, the default predictor and EMA 0.5 over the last iterations of each trace.

    Args:
        result: From `lbbsp_core.sim.backtest.evaluate`.
        path: Where to; its ending says which format.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    figure = new_figure(10, 2.4 * len(result.speeds))
    for row, (file, speeds) in enumerate(result.speeds.items(), start=1):
        axes = figure.add_subplot(len(result.speeds), 1, row)
        steps = range(max(0, len(speeds[0]) - SHOWN), len(speeds[0]))
        axes.plot(steps, speeds[0][-SHOWN:], color="0.6", linewidth=3, label="measured")
        for name, style in ((DEFAULT, "-"), ("ema0.5", ":")):
            if name in result.forecasts[file]:
                drawn = result.forecasts[file][name][0][-SHOWN:]
                axes.plot(steps, drawn, style, linewidth=1.2, label=name)
        axes.set_title(f"{file}, {result.horizon} ahead", fontsize=9, parse_math=False)
        axes.set_ylabel("samples/s")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(loc="lower right", fontsize=8, ncols=3)
    figure.axes[-1].set_xlabel("iteration")
    figure.savefig(path)
