"""Plot of forecasts against measured speeds."""

from __future__ import annotations

from pathlib import Path

from lbbsp_core.report.figure import new_figure
from lbbsp_core.sim.backtest import DEFAULT, Evaluation

SHOWN = 120
"""Number of iterations shown: the last ones of the first worker of each trace."""


def plot_forecasts(result: Evaluation, path: Path) -> None:
    """Plots speeds, the default predictor and EMA 0.5 over each trace's last iterations."""
    figure = new_figure(10, 2.4 * len(result.speeds))
    for row, (file, speeds) in enumerate(result.speeds.items(), start=1):
        axes = figure.add_subplot(len(result.speeds), 1, row)
        steps = range(max(0, len(speeds[0]) - SHOWN), len(speeds[0]))
        axes.plot(steps, speeds[0][-SHOWN:], color="0.6", linewidth=3, label="measured")
        for name, style in ((DEFAULT, "-"), ("ema0.5", ":")):
            if name in result.forecasts[file]:
                forecast = result.forecasts[file][name][0][-SHOWN:]
                axes.plot(steps, forecast, style, linewidth=1.2, label=name)
        axes.set_title(f"{file}, horizon {result.horizon}", fontsize=9, parse_math=False)
        axes.set_ylabel("samples/s")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(loc="lower right", fontsize=8, ncols=3)
    figure.axes[-1].set_xlabel("iteration")
    figure.savefig(path)
