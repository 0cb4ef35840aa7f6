"""Page of a report: one HTML file that needs no network and runs no code from the record.

All texts are escaped here, and numbers of the charts are data, not code. The page's own policy
(Content-Security-Policy) admits its two scripts, by their digests, and no request at all.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from typing import Final

from lbbsp_core.report.charts import Chart
from lbbsp_core.report.html.advice import Advice
from lbbsp_core.report.html.assets import SCRIPT, STYLE

_LONG: Final = 240
"""Longer texts are folded."""


@dataclass(frozen=True)
class Tile:
    """Figure at the top of the page: its name, its value, and a note below it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Content:
    """Content of the page, as plain texts.

    Args:
        title: Title of the page.
        verdict: Verdict in one sentence.
        tiles: Most important figures.
        advice: Advice; may be empty.
        charts: Charts in order.
        tables: Tables by title: a row of headers, then rows of cells.
        facts: Facts of the run by name.
        definitions: Definitions of the figures by name.
        wide: Names of charts that need the whole width.
        text_columns: Headers of columns that hold texts.
    """

    title: str
    verdict: str
    tiles: Sequence[Tile]
    advice: Sequence[Advice]
    charts: Sequence[Chart]
    tables: Mapping[str, Sequence[Sequence[str]]]
    facts: Mapping[str, str]
    definitions: Mapping[str, str]
    wide: frozenset[str] = field(default=frozenset())
    text_columns: frozenset[str] = field(default=frozenset())


def page(content: Content, plotly: str) -> str:
    """Builds the page."""
    scripts = [plotly, SCRIPT]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    charts = [{"id": _id(c), "data": c.data, "layout": c.layout} for c in content.charts]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(content.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            f"<header>\n<h1>{escape(content.title)}</h1>",
            f'<p class="verdict">{_prose(content.verdict)}</p>\n</header>\n<main>',
            _tiles(content.tiles),
            _advice(content.advice),
            '<div class="charts">',
            *(_chart(chart, content) for chart in content.charts),
            "</div>",
            *(
                f"<section><h2>{escape(title)}</h2>{_table(rows, content.text_columns)}</section>"
                for title, rows in content.tables.items()
            ),
            f"<section><h2>The run</h2>{_facts(content.facts)}</section>",
            "<section><details><summary>How the figures are defined</summary>"
            f"{_facts(content.definitions, fold=False)}</details></section>",
            "</main>\n<footer>Written by <code>lbbsp report</code>.</footer>",
            f'<script type="application/json" id="charts">{inert_json(charts)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def inert_json(value: object) -> str:
    r"""Returns JSON that cannot end or start an element of a page that contains it.

    Example:
        >>> inert_json({"name": "</script>"})
        '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def _id(chart: Chart) -> str:
    return f"chart-{chart.name}"


def _tiles(tiles: Iterable[Tile]) -> str:
    parts = [
        f'<div><dt>{escape(tile.name)}</dt><dd class="value">{_prose(tile.value)}</dd>'
        f'<dd class="note">{_prose(tile.note)}</dd></div>'
        for tile in tiles
    ]
    return f'<dl class="tiles">{"".join(parts)}</dl>'


def _prose(text: str) -> str:
    """Escapes a text, whose numbers stay on one line with the percent signs behind them."""
    return escape(text).replace(" %", "&nbsp;%")


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        items = '<p class="quiet">Nothing to improve was found.</p>'
    else:
        listed = "".join(f"<li>{_prose(each.text)}</li>" for each in advice)
        items = f'<ul class="advice">{listed}</ul>'
    return f'<section id="advice"><h2>Advice</h2>{items}</section>'


def _chart(chart: Chart, content: Content) -> str:
    wide = ' class="wide"' * (chart.name in content.wide)
    caption = escape(chart.caption)
    table = ""
    if chart.table:
        inner = _table(chart.table, content.text_columns)
        table = f"<details><summary>Figures as a table</summary>{inner}</details>"
    return (
        f"<section{wide}><h2>{escape(chart.title)}</h2><figure><figcaption>{caption}</figcaption>"
        f'<div class="plot" id="{_id(chart)}" role="img" aria-label="{caption}"></div>'
        f"</figure>{table}</section>"
    )


def _table(rows: Sequence[Sequence[str]], text_columns: frozenset[str]) -> str:
    kinds = [' class="text"' * (name in text_columns) for name in rows[0]]
    head = "".join(
        f'<th scope="col"{kind}>{escape(cell)}</th>'
        for kind, cell in zip(kinds, rows[0], strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows[1:]
    )
    return (
        '<div class="scroll full" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _facts(facts: Mapping[str, str], *, fold: bool = True) -> str:
    shown = _folded if fold else escape
    pairs = (f"<dt>{escape(name)}</dt><dd>{shown(text)}</dd>" for name, text in facts.items())
    return f'<dl class="facts">{"".join(pairs)}</dl>'


def _folded(text: str) -> str:
    """Returns an escaped text, of which only the start is shown at first if it is very long."""
    if len(text) <= _LONG:
        return escape(text)
    start = escape(text[:60])
    return f"<details><summary>{start} ...</summary>{escape(text)}</details>"
