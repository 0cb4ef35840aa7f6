"""Plot of a profile: the measured points, and the cost forms fitted to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lbbsp_core.profiler import ProfileResult
from lbbsp_core.report.figure import new_figure


def plot_curve(result: ProfileResult, path: Path) -> None:
    """Plots seconds by batch size, and below it the relative error of each fit.

    Args:
        result: Result of `lbbsp_core.profiler.profile_step`.
        path: File to write; its suffix selects the format.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    figure = new_figure(8, 6)
    curve, errors = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    batches = np.array([point.batch for point in result.points], np.float64)
    seconds = np.array([point.seconds for point in result.points])
    dense = np.unique(np.geomspace(batches[0], batches[-1], 400))
    curve.plot(batches, 1e3 * seconds, "o", color="0.4", markersize=5, label="measured")
    for name, fit in result.fits.items():
        if name == "profile":  # passes through all points
            continue
        error = "" if fit.cv_error is None else f", {fit.cv_error:.1%} on unseen batches"
        (line,) = curve.plot(dense, 1e3 * fit.cost(dense), linewidth=1.2, label=name + error)
        percent = 100 * (fit.cost(batches) / seconds - 1)
        errors.plot(batches, percent, ".-", linewidth=0.8, color=line.get_color())
    if result.out_of_memory_at is not None:
        for axes in (curve, errors):
            axes.axvline(result.out_of_memory_at, color="0.2", linestyle=":", linewidth=1)
        curve.plot([], [], ":", color="0.2", label=f"out of memory at {result.out_of_memory_at}")
    curve.set(xscale="log", yscale="log", ylabel="milliseconds")
    curve.set_title(result.device, fontsize=9, parse_math=False)
    curve.legend(fontsize=8)
    errors.axhline(0, color="0.7", linewidth=0.8)
    errors.set(xlabel="samples", ylabel="fit / measured - 1, %")
    figure.savefig(path, dpi=120)
