"""Figures that need no display."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


def new_figure(
    width: float, height: float, *, dpi: float | None = None, constrained: bool = True
) -> Figure:
    """Creates an empty matplotlib figure without touching matplotlib's global state."""
    canvas = _canvas()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained" if constrained else None)
    canvas(figure)
    return figure


def picture_formats() -> list[str]:
    """Returns the formats that a picture can have, which are the suffixes of its file."""
    return sorted(_canvas().get_supported_filetypes())


def _canvas() -> type[FigureCanvasAgg]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a plot needs matplotlib, which is not installed: run pip install 'lbbsp[report]'"
        ) from error
    return FigureCanvasAgg
