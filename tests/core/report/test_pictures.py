"""Pictures of comparisons, profiles and simulations: properties that Plotly knows, one scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("plotly")

from plotly import graph_objects
from report_runs import Page, line
from test_report import balanced, bsp, run

from lbbsp_core.cost.fitting import fit_costs
from lbbsp_core.profiler import Point, ProfileResult
from lbbsp_core.registry import POLICIES
from lbbsp_core.report import charts as charts_of
from lbbsp_core.report import draw_comparison, pictures, simulations
from lbbsp_core.report.page import write_page
from lbbsp_core.sim import load_scenario
from lbbsp_core.sim.experiment import chosen_runs, experiment_of, run_experiments


@pytest.fixture(scope="module")
def results():
    [scenario] = load_scenario("constant").kinds()
    scenario = replace(scenario.sized(4), steps=40)
    runs = chosen_runs(["bsp", "lbbsp"], ["last"], 1, ["bsp", "ssp:3", "asp"])
    return list(run_experiments([experiment_of(scenario)], runs))


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Returns a function that draws to a file, and returns the charts on its page."""
    pages = []

    def write(content, path):
        pages.append(content)
        write_page(content, path)

    for module in (pictures, simulations):
        monkeypatch.setattr(module, "write_page", write)

    def draw(function, *args, **options):
        function(*args, tmp_path / "new" / "picture.html", **options)
        charts = {chart.name: chart for chart in pages.pop().charts}
        Page((tmp_path / "new" / "picture.html").read_text())  # well-formed
        for chart in charts.values():
            graph_objects.Figure(data=chart.data, layout=chart.layout)  # checks each property
        return charts, (tmp_path / "new" / "picture.html").read_text()

    return draw


def test_a_page_of_simulations(results, drawn):
    charts, text = drawn(simulations.draw_simulation, results)
    assert list(charts) == ["totals-0", "updates-0"]
    rows = [result.row for result in results]
    busy, waiting = charts["totals-0"].data
    assert np.add(busy["x"], waiting["x"]) == pytest.approx(
        [row.total_seconds for row in rows], rel=1e-4
    )
    share = 100 * rows[0].waiting_share
    assert waiting["text"][0] == f"{rows[0].total_seconds:.4g} s, {share:.0f} %"
    updates = charts["updates-0"]
    titles = [row.title for row in rows]
    assert [trace["name"] for trace in updates.data] == titles
    assert len({str(trace["line"]) for trace in updates.data}) == 6
    assert [each["text"].strip() for each in updates.layout["annotations"]] == titles
    assert "<h2>Updates: constant, 4 workers</h2>" in text
    efficiencies, _ = drawn(simulations.draw_efficiencies, rows)
    [bars] = efficiencies["trace-0"].data
    assert bars["x"] == pytest.approx([row.efficiency for row in rows], rel=1e-4)
    lines = [trace["line"]["color"] for trace in updates.data]
    assert bars["marker"]["color"] == busy["marker"]["color"] == lines
    assert dict(zip(lines, (row.policy for row in rows), strict=True)) == {
        charts_of.policy_colour(name): name for name in ("bsp", "lbbsp")
    }


def test_names_beside_curves_do_not_hide_each_other():
    layout = charts_of.axes("x", "y", legend=False)
    ends = [0.0, 1.0, 1.0, 1.01, 5.0, 5.0, 5.0]
    labels = [(str(number), "#000000", end) for number, end in enumerate(ends)]
    charts_of.label_ends(layout, labels, 5.0)
    low, high = layout["yaxis"]["range"]
    places = [each["y"] for each in layout["annotations"]]
    assert low <= min(places) <= max(places) < high
    assert np.diff(places).min() > 0.99 * 16 / 260 * high
    assert places[:2] == [0.0, 1.0], "where there is room"


def test_each_policy_has_a_colour_of_its_own():
    assert set(charts_of.POLICIES) == set(POLICIES)
    assert len({*charts_of.POLICIES.values()}) == len(POLICIES)
    assert charts_of.policy_colour("mine:Policy") in charts_of.COLOURS


def test_the_profile_shows_every_fit_and_names_the_best(drawn):
    points = tuple(Point(x, 0.01 + 0.001 * x, 5) for x in (1, 2, 4, 8, 16))
    result = ProfileResult("an <b>abacus", points, 19, fit_costs(points))
    charts, text = drawn(pictures.draw_profile, result)
    assert "an &lt;b&gt;abacus" in text
    above, below = charts["curve"], charts["errors"]
    names = [trace["name"] for trace in above.data]
    [best] = [name for name in names if name.startswith("<b>")]
    assert best.startswith(f"<b>{result.best},")
    assert len(names) == len(result.fits) + 1
    assert "Out of memory at 19" in above.caption
    for chart in (above, below):  # no fit hides another one
        assert len({str(trace["line"]) for trace in chart.data}) >= len(result.fits)


def test_the_comparison_shows_hidden_communication_where_there_is_some(drawn):
    hiding = run(*(replace(each, hidden_seconds=0.022) for each in balanced().steps))
    _, text = drawn(draw_comparison, bsp(), hiding)
    cells = "<td>0.0\u00a0%</td><td>20.0\u00a0%</td>"
    assert f'<td class="text">hidden communication</td>{cells}' in text
    _, text = drawn(draw_comparison, bsp(), balanced())
    assert "hidden communication" not in text


@pytest.mark.parametrize("speeds", [None, (1.0, 0.33)])
def test_the_comparison_shows_waits_and_batch_sizes(drawn, speeds):
    history = run(
        *bsp(3).steps, *balanced().steps, line(13, [3, 1], [0.03, 0.03], 0.05, short=True)
    )
    charts, text = drawn(draw_comparison, bsp(), history, speeds=speeds, note="$x^2$ <b> & 100 %")
    # 13 steps of 12 samples in 3 * 0.2 + 10 * 0.11 s, and 60 samples/s
    assert "LB-BSP trains 1.5 times as fast as plain BSP" in text
    assert "$x^2$ &lt;b&gt; &amp; 100 %" in text
    busy, waiting, communication = charts["first"].data
    assert (busy["x"], waiting["x"], communication["x"]) == ([60, 180], [120, 0], [20, 20])
    assert busy["y"][1] == ("worker 1" if speeds is None else "worker 1, 0.33 × speed")
    assert charts["second"].data[0]["text"] == ["8.31 samples", "3.69 samples"]
    assert charts["first"].layout["xaxis"] == charts["second"].layout["xaxis"]
    assert np.shape(charts["batches-second"].data[0]["y"]) == (13,)  # without the short step


def test_large_numbers_are_grouped_and_every_column_has_a_name(drawn):
    faster = run(*(line(k, [13_104, 13_104], [1.5, 1.5], 1.6) for k in range(4)))
    charts, text = drawn(draw_comparison, faster, faster)
    assert charts["first"].table[1] == ["0", "13,104", "1,500", "0"]
    assert charts["steps"].table[1][1:] == ["1,600"] * 3
    assert "<td>16,380</td>" in text
    assert all(row[0] for row in Page(text).rows)
