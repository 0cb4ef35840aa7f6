"""Page with charts: one HTML file that needs no network and runs no code from its data.

The template escapes all texts, and numbers of the charts are data, not code. The page's own policy
(Content-Security-Policy) admits its two scripts, by their digests, and no request at all.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Final

from lbbsp_core.files import write_whole
from lbbsp_core.installation import extra
from lbbsp_core.report.charts import Chart

SAME: Final = 0.03
"""Speed-ups this close to 1 count as none."""


@dataclass(frozen=True)
class Content:
    """Content of the page."""

    command: str  # command that writes the page
    title: str  # title of the page
    verdict: str  # verdict in one sentence
    charts: Sequence[Chart]  # charts in order
    note: str = ""  # line below the verdict
    template: str = "page.html"
    values: Mapping[str, object] = field(default_factory=dict)  # what else the template shows


def page(content: Content, plotly: str) -> str:
    """Builds the page; `plotly` is the source of plotly.js."""
    import jinja2
    from markupsafe import Markup

    folder = Path(__file__).parent / "templates"
    style, script = ((folder / name).read_text("utf-8") for name in ("style.css", "script.js"))
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader(folder),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "digest": lambda text: b64encode(sha256(text.encode()).digest()).decode(),
        **{word.__name__: word for word in (duration, moment, percent, rate)},
    }
    return environment.get_template(content.template).render(
        content.values,
        content=content,
        charts=[
            {"id": f"chart-{chart.name}", "data": chart.data, "layout": chart.layout}
            for chart in content.charts
        ],
        scripts=[Markup(plotly), Markup(script)],
        style=Markup(style),
    )


def plotly_script() -> str:
    """Returns the source of plotly.js, if all that a page needs is installed."""
    try:
        import jinja2  # noqa: F401
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise ModuleNotFoundError(
            f"a report or plot needs {missing}, which is not installed: run pip install "
            f"{extra('report')}"
        ) from error
    return str(get_plotlyjs())


def write_page(content: Content, path: Path) -> None:
    """Writes the page to a file, whose folder is created."""
    text = page(content, plotly_script())
    write_whole(path, text.encode(errors="replace"))


def percent(share: float, digits: int = 0) -> str:
    """Returns a share as a percentage.

    Example:
        >>> percent(0.125), percent(0.125, 1)
        ('12 %', '12.5 %')
    """
    return f"{100 * share:.{digits}f} %"


def rate(value: float) -> str:
    """Returns a number with at least three significant digits.

    Example:
        >>> rate(12345.6), rate(12.34), rate(0.04321)
        ('12,346', '12.3', '0.0432')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    """Returns a speed-up, with as many digits as tell it from 1.

    Example:
        >>> times(1.04), times(2.345)
        ('1.04', '2.3')
    """
    return f"{ratio:.1f}" if ratio >= 1.1 else f"{ratio:.2f}"


def compared(speedup: float, other: str) -> str:
    """Returns how fast something is beside another thing; 3 % count as nothing.

    Example:
        >>> compared(1.5, "plain BSP"), compared(1.01, "plain BSP")
        ('1.5 times as fast as plain BSP', 'about as fast as plain BSP')
        >>> compared(0.8, "plain BSP")
        'slower than plain BSP (0.80 times as fast)'
    """
    if abs(speedup - 1) <= SAME:
        return f"about as fast as {other}"
    if speedup < 1:
        return f"slower than {other} ({times(speedup)} times as fast)"
    return f"{times(speedup)} times as fast as {other}"


def duration(seconds: float) -> str:
    """Returns a time in a unit that suits it.

    Example:
        >>> duration(0.0123), duration(42), duration(75), duration(7500)
        ('12.3 ms', '42 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def moment(seconds: float) -> str:
    """Returns a time in seconds since 1970 as a date.

    Example:
        >>> moment(1.7e9), moment(1e300)
        ('2023-11-14 22:13:20 UTC', '1e+300 s since 1970')
    """
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a clock that is far off
        return f"{seconds:g} s since 1970"
