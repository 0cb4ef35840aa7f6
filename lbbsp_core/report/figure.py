"""An empty figure that needs no display."""

from __future__ import annotations

from typing import Any


def new_figure(width: float, height: float, **options: Any) -> Any:
    """A matplotlib figure of so many inches, to be drawn on and saved; no global state.

    Args:
        width: In inches.
        height: In inches.
        options: More of `matplotlib.figure.Figure`; the layout is "constrained" without them.

    Raises:
        ModuleNotFoundError: matplotlib is missing; says how to install it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a plot needs matplotlib, which is not installed: pip install 'lbbsp[report]'"
        ) from error
    figure = Figure(figsize=(width, height), **(options or {"layout": "constrained"}))
    FigureCanvasAgg(figure)
    return figure
