"""Charts, and the Plotly traces and layouts that they are made of, as plain dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from lbbsp_core.report.wording import grouped

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# A colour means one thing throughout: a worker (or policy), what workers do, a measured or
# estimated series, a run.
COLOURS = (
    "#2a9d8f", "#d1495b", "#7b5cc4", "#7f8f1f", "#a0522d", "#0f6f8c", "#c77dd6", "#4a7c2f",
    "#7a1f3d", "#5f6fd1", "#00b39b", "#b56576",
)  # fmt: skip
BUSY, WAITING, COMMUNICATION = "#2f7fc1", "#e9a13b", "#b4bec9"
MEASURED, ESTIMATED = "#6b7684", "#e0218a"
RUNS = "#8c6d31", "#12a150"
WORKERS_AXIS = {"autorange": "reversed", "automargin": True, "showgrid": False}
POLICIES = {
    "bsp": "#7a8793",
    "observe": "#4c566a",
    "fixed": "#a0522d",
    "dbs": "#2a9d8f",
    "proportional": "#8f5fbf",
    "leader-straggler": "#8c6d31",
    "lbbsp": "#0b7285",
    "lbbsp-every": "#d1495b",
}
"""Colour of each policy in all pictures, by its name in `lbbsp_core.registry`."""
DASHES = ("solid", "dot", "dash")
MAX_POINTS, _ALL_POINTS = 1500, 24_000  # of a curve, and of all curves of a chart

_LABEL_PIXELS, _FRAME_PIXELS = 16, 60  # heights of a name, and of all around the curves

Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """Chart of a page."""

    name: str  # identifier in the page
    title: str  # heading above the chart
    caption: str  # what the chart shows, for readers with and without eyesight
    data: list[Trace]  # traces of Plotly
    layout: dict[str, Any]  # layout of Plotly
    # text alternative: a row of headers, and rows of cells; empty if the page has a table of the
    # same numbers elsewhere
    table: list[list[str]] = field(default_factory=list)
    wide: bool = False  # whether it needs the whole width of the page


def curve(x: npt.ArrayLike, y: Floats, name: str, mode: str = "lines", **line: Any) -> Trace:
    """Returns a curve; a single point is a marker."""
    return {
        "type": "scatter",
        "mode": mode if len(y) > 1 else "markers",
        "name": escape(name, quote=False),
        "x": np.asarray(x).tolist(),
        "y": rounded(y),
        "line": {"width": 1.6, **line},
    }


def line_style(number: int) -> dict[str, str]:
    """Returns the colour of a line; where colours are repeated, the line is broken."""
    repeats, place = divmod(number, len(COLOURS))
    return {"color": COLOURS[place], "dash": DASHES[repeats % 3]}


def policy_colour(name: str) -> str:
    """Returns the colour of a policy by its name, with options or without.

    Example:
        >>> policy_colour("lbbsp:interval=5") == policy_colour("lbbsp")
        True
    """
    kind = name.partition(":")[0]
    return POLICIES.get(kind) or COLOURS[crc32(name.encode()) % len(COLOURS)]


def label_ends(
    layout: dict[str, Any], labels: Sequence[tuple[str, str, float]], highest: float
) -> None:
    """Writes names beside the ends of curves, each with its colour and the height of its end.

    Names that would hide each other are moved apart. `highest` is the top of all curves.
    """
    top = 1.08 * (highest or 1.0)
    gap = top * _LABEL_PIXELS / (layout["height"] - _FRAME_PIXELS)
    places, free = {}, 0.0
    ordered = sorted(labels, key=lambda label: label[2])
    for number, (name, _, end) in enumerate(ordered):
        room = top - gap * (len(ordered) - number - 0.5)  # that those above leave
        places[name] = max(free, min(end, room))
        free = places[name] + gap
    layout["yaxis"] |= {"range": [0, top]}
    layout["margin"] |= {"r": 20 + 7 * max(len(name) for name, *_ in labels)}
    layout["annotations"] = [
        {"x": 1, "xref": "paper", "xanchor": "left", "y": places[name], "text": f"  {name}",
         "showarrow": False, "font": {"color": colour}}
        for name, colour, _ in labels
    ]  # fmt: skip


def lines(
    x: Integers,
    values: Floats,
    names: Sequence[str],
    *,
    shape: str = "linear",
    first: int = 0,
    of: int | None = None,
    **style: Any,
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
        line: dict[str, Any] = {"shape": shape, **line_style(first + column), **style}
        traces.append(curve(x[kept], values[kept, column], name, **line))
    return traces


def bar(
    names: Sequence[str],
    values: npt.ArrayLike,
    what: str,
    colour: str,
    unit: str = "%",
    **more: Any,
) -> Trace:
    """Returns horizontal bars, one for each name."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": what,
        "y": list(names),
        "x": rounded(np.asarray(values)),
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}} {what}: %{{x:.4g}} {unit}<extra></extra>",
        **more,
    }


def timeline(
    names: Sequence[str], parts: Sequence[tuple[str, str, Floats, Floats]], unit: str
) -> list[Trace]:
    """Returns bars from their starts to their ends; a part is its name, colour, starts and ends."""
    traces = []
    for name, colour, *ends in parts:
        start, end = (values.T.ravel() for values in np.broadcast_arrays(*ends))
        marker = {"color": colour, "line": {"width": 1, "color": "rgba(255,255,255,0.6)"}}
        length, base = end - start, rounded(start)
        traces.append(bar(names, length, name, colour, unit, base=base, marker=marker))
    return traces


def bar_layout(rows: int, **x: Any) -> dict[str, Any]:
    """Returns the layout of stacked bars, with the first on top, by default in percent."""
    layout = axes("", "", height=rows_height(rows, 30))
    layout |= {"barmode": "stack", "bargap": 0.25, "hovermode": "closest"}
    layout["margin"]["r"] = 24  # half of the last label, which is left out where it has no room
    layout["xaxis"] = {"automargin": True, **(x or {"ticksuffix": " %", "range": [0, 100]})}
    layout["legend"]["traceorder"] = "normal"
    layout["yaxis"] = WORKERS_AXIS
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


def short_name(rank: int) -> str:
    """Returns the name of a worker in charts."""
    return f"worker {rank}"


def spread_table(head: str, columns: Mapping[str, Floats]) -> list[list[str]]:
    """Returns the smallest, the median and the largest value of each column, without NaN."""
    rows = [[head, "smallest", "median", "largest"]]
    for name, values in columns.items():
        numbers = values[np.isfinite(values)]
        spread = (numbers.min(), np.median(numbers), numbers.max()) if numbers.size else ()
        rows.append([name, *([grouped(x, 4) for x in spread] or ["-"] * 3)])
    return rows


def kept_points(values: Floats, limit: int = MAX_POINTS) -> Integers:
    """Selects the smallest and the largest value of each of equally long parts of a curve.

    Indices are ascending; both ends are kept, and all of a short curve. NaN is selected only where
    a part has nothing else.

    Example:
        >>> kept_points(np.array([0.0, 1, 9, 1, 0, 0, -5, 0, 0, 0, 0, 0]), limit=6).tolist()
        [0, 2, 6, 7, 11]
    """
    n = len(values)
    if n <= limit:
        return np.arange(n, dtype=np.int64)
    parts = limit // 2 - 1
    width = -(-n // parts)
    starts = np.arange(0, n, width)
    padded = np.full(len(starts) * width, np.nan)
    padded[:n] = values
    table = padded.reshape(-1, width)
    least = np.where(np.isnan(table), np.inf, table).argmin(axis=1)
    most = np.where(np.isnan(table), -np.inf, table).argmax(axis=1)
    kept = np.concatenate([[0], starts + least, starts + most, [n - 1]])
    return np.asarray(np.unique(kept.clip(0, n - 1)), np.int64)


def rounded(values: npt.NDArray[np.generic]) -> list[float | None]:
    """Returns numbers with five significant digits, as JSON can hold them; None for NaN."""
    return [float(f"{x:.5g}") if np.isfinite(x) else None for x in values.tolist()]
