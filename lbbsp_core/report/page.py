"""Page with charts: one HTML file that needs no network and runs no code from its data.

The template escapes all texts, and numbers of the charts are data, not code. The page's own policy
(Content-Security-Policy) admits its two scripts, by their digests, and no request at all.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from lbbsp_core.files import write_whole
from lbbsp_core.installation import extra
from lbbsp_core.report.charts import Chart
from lbbsp_core.report.wording import between, duration, grouped, moment, percent


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
        **{word.__name__: word for word in (between, duration, grouped, moment, percent)},
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
    write_whole(path, page(content, plotly_script()).encode(errors="replace"))
