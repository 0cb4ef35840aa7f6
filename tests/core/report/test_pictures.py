"""Pictures of simulations and profiles: one scale, labels beside lines, plain ticks."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from lbbsp_core.cost.fitting import fit_costs
from lbbsp_core.profiler import Point, ProfileResult
from lbbsp_core.report import curve, timelines
from lbbsp_core.report.figure import new_figure
from lbbsp_core.report.labels import label_lines, plain_ticks
from lbbsp_core.sim import load_scenario
from lbbsp_core.sim.experiment import chosen_runs, experiment_of, run_experiments


@pytest.fixture(scope="module")
def results():
    [scenario] = load_scenario("constant").kinds()
    scenario = replace(scenario.sized(4), steps=40)
    runs = chosen_runs(["bsp", "lbbsp"], ["last"], 1, ["bsp", "ssp:3", "asp"])
    return list(run_experiments([experiment_of(scenario)], runs))


def test_timelines_have_one_scale_and_no_gap_at_its_end(results):
    panels = timelines._timelines(results).axes
    assert len(panels) == len(results) == 6
    [(low, high)] = {axes.get_xlim() for axes in panels}
    assert low == 0
    for axes in panels:
        for rank in range(4):
            ends = [bar.get_x() + bar.get_width() for bar in axes.patches
                    if round(bar.get_y() + 0.4) == rank]  # fmt: skip
            assert max(ends) >= high * (1 - 1e-9)


def test_updates_are_labelled_beside_their_lines(results):
    figure = timelines._updates(results)
    [axes] = figure.axes
    assert axes.get_legend() is None
    labels = {text.get_text(): text for text in axes.texts}
    assert set(labels) == {result.row.title for result in results}
    heights = sorted(text.xyann[1] for text in labels.values())
    gap = 11 / (axes.bbox.height * 72 / figure.dpi)
    assert np.diff(heights).min() >= 0.99 * gap
    assert len({text.get_color() for text in labels.values()}) == 6


def test_ticks_are_plain_numbers():
    axes = new_figure(4, 3).subplots()
    (line,) = axes.plot([0.0012, 0.0013], [123_456.001, 123_456.002], label="a")
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)
    label_lines(axes, [line, *axes.plot([], [], label="empty")])
    assert [text.get_text() for text in axes.texts] == ["a"]
    texts = [label.get_text() for axis in (axes.xaxis, axes.yaxis) for label in
             axis.get_ticklabels()]  # fmt: skip
    assert all("e" not in text and text[:2] != "10" for text in texts)
    assert axes.yaxis.get_offset_text().get_text() == ""


@pytest.mark.parametrize("limits", [(16, 64), (25, 39), (14, 19), (0.3, 900), (1, 10_000)])
def test_a_logarithmic_axis_has_plain_numbers_at_several_ticks(limits):
    axes = new_figure(8, 6).subplots()
    axes.plot(limits, limits)
    axes.set(xscale="log", yscale="log")
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        plain_ticks(axis)
        axes.figure.draw_without_rendering()
        known = {tick.get_loc(): tick.label1.get_text() for tick in axis.get_major_ticks()}
        seen = [text for at, text in known.items() if low <= at <= high]
        assert 2 <= len(seen) <= 15
        ticks = [at for at in known if low <= at <= high]
        assert [float(text) for text in seen] == pytest.approx(ticks, rel=1e-12, abs=0)


def test_the_profile_shows_every_fit_and_names_the_best(tmp_path, monkeypatch):
    points = tuple(Point(x, 0.01 + 0.001 * x, 5) for x in (1, 2, 4, 8, 16))
    result = ProfileResult("an abacus", points, None, fit_costs(points))
    drawn = []
    monkeypatch.setattr(
        curve, "new_figure", lambda *size: drawn.append(new_figure(*size)) or drawn[0]
    )
    curve.plot_curve(result, tmp_path / "curve.png")
    above, below = drawn[0].axes
    texts = above.get_legend().get_texts()
    names = [text.get_text().split(",")[0].removesuffix(" (best)") for text in texts]
    assert names == ["measured", *result.fits]
    [best] = [text for text in texts if text.get_text().endswith("(best)")]
    assert best.get_text().startswith(result.best)
    assert best.get_fontweight() == "bold"
    for axes in (above, below):  # no fit hides another one
        styles = [(line.get_linewidth(), line.get_linestyle()) for line in axes.lines]
        assert len(set(styles)) >= len(result.fits)
