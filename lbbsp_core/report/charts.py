"""Charts, and the Plotly traces and layouts that they are made of, as plain dicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from lbbsp_core.report.html.reduce import MAX_POINTS, kept_points, rounded
from lbbsp_core.report.html.table import Floats, Integers

COLOURS = (
    "#2f7fc1", "#e08e2b", "#2a9d8f", "#d1495b", "#8f5fbf", "#8c6d31", "#d36ba6", "#6b7f2a",
    "#1aa3c9", "#a0522d", "#5f6fd1", "#7a8793",
)  # fmt: skip
BUSY, WAITING, COMMUNICATION = "#2f7fc1", "#e9a13b", "#9aa5b1"
_ALL_POINTS = 24_000

Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """Chart of the report.

    Args:
        name: Identifier in the page.
        title: Heading above the chart.
        caption: What the chart shows, for readers with and without eyesight.
        data: Traces of Plotly.
        layout: Layout of Plotly.
        table: Text alternative: a row of headers, and rows of cells; empty if the page has a table
            of the same numbers elsewhere.
    """

    name: str
    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any]
    table: list[list[str]]


def lines(
    x: Integers,
    values: Floats,
    names: Sequence[str],
    *,
    colour: str | None = None,
    shape: str = "linear",
    first: int = 0,
    of: int | None = None,
) -> list[Trace]:
    """Returns curves of columns of values; of more than twelve, their least, median and most."""
    if len(names) > len(COLOURS):
        rows = values if not np.isnan(values).all(axis=1).any() else np.nan_to_num(values)
        columns = (np.nanmin(rows, axis=1), np.nanmedian(rows, axis=1), np.nanmax(rows, axis=1))
        values, names = np.column_stack(columns), ("smallest", "median", "largest")
    limit = max(min(MAX_POINTS, _ALL_POINTS // max(of or len(names), 1)), 100)
    traces = []
    for column, name in enumerate(names):
        kept = kept_points(values[:, column], limit)
        number = first + column
        traces.append(
            {
                "type": "scatter",
                "mode": "lines" if len(kept) > 1 else "markers",
                "name": escape(name, quote=False),
                "x": x[kept].tolist(),
                "y": rounded(values[kept, column]),
                "line": {"color": colour or COLOURS[number % len(COLOURS)], "width": 1.6,
                         "shape": shape, "dash": ("solid", "dot", "dash")[number // 12 % 3]},
            }
        )  # fmt: skip
    return traces


def bar(ranks: Sequence[int], values: Sequence[float], name: str, colour: str) -> Trace:
    """Returns horizontal bars of shares in [0, 1], one for each rank."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [short_name(rank) for rank in ranks],
        "x": rounded(100 * np.array(values)),
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}} {name}: %{{x:.1f}} %<extra></extra>",
    }


def bar_layout(workers: int) -> dict[str, Any]:
    """Returns the layout of stacked bars in percent, with rank 0 on top."""
    layout = axes("", "", height=rows_height(workers, 30))
    layout |= {"barmode": "stack", "bargap": 0.25, "hovermode": "closest"}
    layout["xaxis"] = {"ticksuffix": " %", "range": [0, 100], "automargin": True}
    layout["legend"]["traceorder"] = "normal"
    layout["yaxis"] = {"autorange": "reversed", "automargin": True, "showgrid": False}
    return layout


def axes(x: str, y: str, *, height: int = 320, legend: bool = True) -> dict[str, Any]:
    """Returns a layout with titles of both axes, and a height in pixels."""
    return {
        "height": height,
        "margin": {"l": 10, "r": 10, "t": 36 if legend else 10, "b": 10},
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom",
                   "itemwidth": 30},
        "hovermode": "x unified" if legend else "closest",
        "xaxis": {"title": {"text": x}, "automargin": True, "exponentformat": "none"},
        "yaxis": {"title": {"text": y}, "automargin": True, "rangemode": "tozero",
                  "exponentformat": "SI"},
    }  # fmt: skip


def rows_height(workers: int, each: int) -> int:
    """Returns the height, in pixels, of a chart with a row for each worker."""
    return 110 + max(each * min(workers, 40), 12 * workers)


def panel_title(text: str, top: float) -> dict[str, Any]:
    """Returns a text above a panel that ends at `top`, in parts of the height of the chart."""
    return {
        "text": text, "x": 0, "xanchor": "left", "xref": "paper", "y": top, "yanchor": "top",
        "yref": "paper", "showarrow": False, "font": {"size": 11},
    }  # fmt: skip


def short_name(rank: int) -> str:
    """Returns the name of a worker in charts."""
    return f"worker {rank}"


def spread(values: Floats) -> list[str]:
    """Returns the smallest, the median and the largest value as texts, without NaN."""
    known = values[np.isfinite(values)]
    if not known.size:
        return ["-"] * 3
    return [f"{x:.4g}" for x in (known.min(), np.median(known), known.max())]
