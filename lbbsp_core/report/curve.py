"""Plot of a profile: the measured points, and the cost forms fitted to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lbbsp_core.profiler import ProfileResult
from lbbsp_core.report.figure import new_figure
from lbbsp_core.report.labels import plain_ticks

# Fits that nearly agree stay visible: each is narrower than those before it, or broken.
_COLOURS = {"proportional": "#5f6b7a", "affine": "#8fbcdc", "saturating": "#d1495b",
            "profile": "#2a9d8f"}  # fmt: skip
_WIDTHS = {"proportional": 1.5, "affine": 5.0, "saturating": 2.2, "profile": 1.2}
_DASHES = {"saturating": "--", "profile": ":"}


def plot_curve(result: ProfileResult, path: Path) -> None:
    """Plots seconds by batch size, and below it the relative error of each fit; marks the best."""
    figure = new_figure(8, 6)
    curve, errors = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    batches = np.array([point.batch for point in result.points], np.float64)
    seconds = np.array([point.seconds for point in result.points])
    dense = np.unique(np.geomspace(batches[0], batches[-1], 400))
    curve.plot(batches, 1e3 * seconds, "o", color="0.25", markersize=5, label="measured", zorder=3)
    for name, fit in result.fits.items():
        error = "" if fit.cv_error is None else f", {100 * fit.cv_error:.1f} % on unseen batches"
        label = name + error + " (best)" * (name == result.best)
        style = {"color": _COLOURS.get(name), "linewidth": _WIDTHS.get(name, 1.5)}
        curve.plot(dense, 1e3 * fit.cost(dense), _DASHES.get(name, "-"), label=label, **style)
        percent = 100 * (fit.cost(batches) / seconds - 1)
        errors.plot(batches, percent, _DASHES.get(name, "-"), **style)
    if result.out_of_memory_at is not None:
        for axes in (curve, errors):
            axes.axvline(result.out_of_memory_at, color="0.2", linestyle=":", linewidth=1)
        curve.plot([], [], ":", color="0.2", label=f"out of memory at {result.out_of_memory_at}")
    curve.set(xscale="log", yscale="log", ylabel="milliseconds")
    curve.set_title(result.device, fontsize=9, parse_math=False)
    for text in curve.legend(fontsize=8).get_texts():
        text.set_fontweight("bold" if text.get_text().endswith("(best)") else "normal")
    for axis in (curve.xaxis, curve.yaxis, errors.yaxis):
        plain_ticks(axis)
    errors.axhline(0, color="0.7", linewidth=0.8)
    errors.set(xlabel="samples", ylabel="fit / measured - 1, %")
    figure.savefig(path, dpi=120)
