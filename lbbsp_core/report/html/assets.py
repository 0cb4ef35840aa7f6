"""Style and script of the report's page, and plotly.js."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2530; --quiet: #5b6673; --line: #dfe4ea;
  --paper: #ffffff; --ground: #f4f6f8; --accent: #1f6fb4; --warn: #b35c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --quiet: #a3adba;
  --line: #333c47; --paper: #1b2129; --ground: #12161c; --accent: #6db3ee; --warn: #f0a555; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main, header, footer { max-width: 1240px; margin: 0 auto; padding: 0 clamp(12px, 3vw, 32px); }
header { padding-top: 28px; }
h1 { font-size: 0.95rem; font-weight: 600; color: var(--quiet); margin: 0 0 6px; }
h2 { font-size: 1.15rem; margin: 0 0 4px; }
.verdict { font-size: clamp(1.25rem, 2.6vw, 1.85rem); font-weight: 650; line-height: 1.3;
  margin: 0 0 18px; max-width: 34em; }
.tiles { display: grid; gap: 12px; margin: 0 0 20px; padding: 0;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.tiles div, section { background: var(--paper); border: 1px solid var(--line);
  border-radius: 10px; }
.tiles div { padding: 12px 16px; }
.tiles dt { font-size: 0.82rem; color: var(--quiet); }
.tiles dd { margin: 0; }
.tiles dd.value { font-size: 1.5rem; font-weight: 650; }
.tiles dd.note { font-size: 0.82rem; color: var(--quiet); }
section { padding: 16px clamp(12px, 2vw, 20px); margin: 0 0 16px; min-width: 0; }
.charts { display: grid; gap: 16px; grid-template-columns: minmax(0, 1fr); margin-bottom: 16px; }
.charts section { margin: 0; }
@media (min-width: 1000px) { .charts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .charts .wide { grid-column: 1 / -1; } }
figure { margin: 0; }
figcaption, .quiet { color: var(--quiet); font-size: 0.9rem; }
.plot { width: 100%; min-width: 0; overflow: hidden; }
.advice { padding-left: 0; list-style: none; margin: 8px 0 0; }
.advice li { border-left: 4px solid var(--warn); padding: 2px 0 2px 12px; margin: 0 0 10px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
.full table { width: 100%; }
th, td { padding: 5px 14px 5px 0; text-align: right; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; }
th:first-child, td:first-child { text-align: left; }
td.text, th.text { text-align: left; min-width: 7em; overflow-wrap: anywhere; }
td:not(.text) { white-space: nowrap; }
th { font-weight: 600; color: var(--quiet); vertical-align: bottom; }
details { margin-top: 8px; font-size: 0.9rem; }
summary { cursor: pointer; color: var(--accent); }
dl.facts { display: grid; grid-template-columns: minmax(6em, max-content) minmax(0, 1fr);
  gap: 2px 16px; margin: 8px 0 0; font-size: 0.9rem; }
dl.facts dt { color: var(--quiet); }
dl.facts dd { margin: 0; }
footer { color: var(--quiet); font-size: 0.85rem; padding-bottom: 32px; }
"""

SCRIPT: Final = """
"use strict";
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const paper = style.getPropertyValue("--paper").trim();
    const copy = JSON.parse(JSON.stringify(layout));
    copy.font = {color: ink, size: 12, family: getComputedStyle(document.body).fontFamily};
    copy.paper_bgcolor = "rgba(0,0,0,0)";
    copy.plot_bgcolor = "rgba(0,0,0,0)";
    copy.hoverlabel = {bgcolor: paper, bordercolor: line, font: {color: ink}};
    for (const name of Object.keys(copy)) {
      if (/^[xy]axis/.test(name)) {
        copy[name] = Object.assign({gridcolor: line, zerolinecolor: line, linecolor: line},
                                   copy[name]);
      }
    }
    return copy;
  }
  function draw() {
    for (const chart of charts) {
      Plotly.react(chart.id, chart.data, themed(chart.layout),
                   {responsive: true, displaylogo: false, displayModeBar: false});
    }
  }
  draw();
  dark.addEventListener("change", draw);
})();
"""


def plotly_script() -> str:
    """Returns the source of plotly.js."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a report needs plotly, which is not installed: run pip install 'lbbsp[report]'"
        ) from error
    return str(get_plotlyjs())
