"""Figures that need no display."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(
    width: float, height: float, *, dpi: float | None = None, constrained: bool = True
) -> Figure:
    """Creates an empty matplotlib figure without touching matplotlib's global state.

    Args:
        width: Width in inches.
        height: Height in inches.
        dpi: Dots per inch; None for matplotlib's default.
        constrained: Whether matplotlib places the axes so that labels do not overlap.

    Raises:
        ModuleNotFoundError: matplotlib is missing; says how to install it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a plot needs matplotlib, which is not installed: run pip install 'lbbsp[report]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained" if constrained else None)
    FigureCanvasAgg(figure)
    return figure
