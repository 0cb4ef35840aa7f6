"""Labels beside the curves that they name, and ticks as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lbbsp_core.report.pictures import spread_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.lines import Line2D


def plain_ticks(axis: Axis) -> None:
    """Writes the ticks of an axis as plain numbers: no offset, no power of ten.

    A logarithmic axis gets ticks within decades, too, and within parts of one.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # linear ticks if none of them is seen
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_formatter(NullFormatter())


def label_lines(axes: Axes, lines: Sequence[Line2D]) -> None:
    """Writes the label of each line at the right of the axes, in its colour.

    Labels are moved apart, and connected to the ends of their lines. The limits of the axes must
    not change afterwards.
    """
    lines = [line for line in lines if len(line.get_xydata())]  # type: ignore[arg-type]
    if not lines:
        return
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # places the axes
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform(line.get_xydata()[-1]) for line in lines]  # type: ignore[index]
    gap = 11 / (axes.bbox.height * 72 / axes.figure.dpi)  # height of a label
    heights = spread_labels([float(end[1]) for end in ends], gap)
    shift = max(max(heights) - 1 - gap / 2, 0.0)
    for line, end, height in zip(lines, ends, heights, strict=True):
        axes.annotate(
            str(line.get_label()), xy=tuple(end), xycoords="axes fraction",
            xytext=(1.02, height - shift), textcoords="axes fraction", va="center", fontsize=8,
            color=line.get_color(), annotation_clip=False, parse_math=False,
            arrowprops={
                "arrowstyle": "-", "color": line.get_color(), "lw": 0.5, "alpha": 0.6,
                "relpos": (0, 0.5),  # from the left of the text: not through those of other lines
            },
        )  # fmt: skip
