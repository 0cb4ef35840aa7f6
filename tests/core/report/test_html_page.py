"""The page of a report: structure, escaping, size; in a browser: charts, requests, width."""

import json
import re
import shutil
import subprocess
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

pytest.importorskip("jinja2")

from report_runs import HOSTILE, Page, header, line, push, run_of, save, steady
from waits import HANG_SECONDS

from lbbsp_core.report.html.write import describe, write_report
from lbbsp_core.report.page import page
from lbbsp_core.runtime.record.record import Run, StepLine

BREAKS_OUT = "</script><img src=x onerror=alert(1)>'\"&%{x}"


def asynchronous(workers=3, **facts):
    lines = [
        push(k, workers, samples=8 + k % 3, seconds=0.05 * k, staleness=k % 4) for k in range(120)
    ]
    return Run(header(workers, 24, sync="SSP(3)", **facts), [], lines)


def hostile(**facts):
    """A run whose names try to leave their places in the page."""
    driver = HOSTILE
    run = steady(
        [300, 100], hosts=(HOSTILE, BREAKS_OUT), devices=(BREAKS_OUT, "<b>GPU"), policy=HOSTILE,
        predictor=BREAKS_OUT, versions={HOSTILE: BREAKS_OUT}, framework=BREAKS_OUT, started=1.7e9,
        drivers={driver: np.ones((60, 2)), "memory_percent": np.full((60, 2), 97.0)}, **facts,
    )  # fmt: skip
    return replace(run, steps=[replace(s, values={BREAKS_OUT: (1.0, None)}) for s in run.steps])


def page_of(run, name="runs/a", plotly="/* plotly.js */"):
    return page(describe(run, name)[0], plotly)


RUNS = {
    "balanced": lambda: steady([300, 100], hosts=("a", "b")),
    "plain": lambda: steady([300, 100], [1, 1], forecast=None, policy="Even()"),
    "one step": lambda: steady([300, 100], steps=1, forecast=None),
    "one worker": lambda: steady([300], [1]),
    "many workers": lambda: steady(list(range(100, 140)), total=4000),
    "asynchronous": asynchronous,
    "hostile": hostile,
    "hostile, asynchronous": lambda: asynchronous(2, hosts=(HOSTILE, BREAKS_OUT), policy=HOSTILE),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_page_is_complete_and_asks_for_nothing(name):
    text = page_of(RUNS[name]())
    found = Page(text)
    assert found.tags("html") == [{"lang": "en"}]
    assert "".join(found.texts).count("lbbsp report: runs/a") == 2  # title and heading
    headings = [tag for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == "h1"
    assert set(headings[1:]) == {"h2"}
    plots = [each for each in found.tags("div") if each.get("class") == "plot"]
    assert len(plots) == len(found.tags("figure")) == len(found.tags("figcaption")) >= 4
    assert all(each["role"] == "img" and len(each["aria-label"]) > 20 for each in plots)
    assert len({each["id"] for each in plots}) == len(plots)
    assert not {"src", "href", "srcset"} & {key for _, each in found.elements for key in each}
    charts = json.loads(found.scripts[0])
    assert [chart["id"] for chart in charts] == [each["id"] for each in plots]


@pytest.mark.parametrize("name", RUNS)
def test_plotly_knows_all_that_the_charts_say(name):
    objects = pytest.importorskip("plotly.graph_objects")
    for chart in describe(RUNS[name](), "a")[0].charts:
        objects.Figure(data=chart.data, layout=chart.layout)  # checks each property


@pytest.mark.parametrize("name", ["hostile", "hostile, asynchronous"])
def test_nothing_of_the_record_is_code(name):
    text = page_of(RUNS[name](), name=f"{HOSTILE}{BREAKS_OUT}")
    found = Page(text)
    assert len(found.scripts) == 3  # charts, plotly.js, our own
    assert not found.tags("img")
    assert not found.tags("b")
    assert not [key for _, each in found.elements for key in each if key.startswith("on")]
    for shown in (HOSTILE, BREAKS_OUT):
        assert shown in "".join(found.texts)
    assert "<" not in found.scripts[0]
    for label in _labels(json.loads(found.scripts[0])):
        assert "<" not in label.replace("<extra></extra>", "")


def _labels(value):
    if isinstance(value, str):
        yield value
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _labels(inner)


def test_the_policy_admits_the_two_scripts_of_the_page_only():
    found = Page(page_of(hostile()))
    [policy] = [each["content"] for each in found.tags("meta") if "http-equiv" in each]
    allowed = re.search("script-src ([^;]*);", policy)[1].split()
    code = found.scripts[1:]
    assert allowed == [f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in code]
    assert policy.startswith("default-src 'none';")


def test_long_runs_have_few_points():
    run = run_of(np.tile(np.linspace(100, 400, 4), (4000, 1)), np.ones((4000, 4)), noise=0.2)
    text = page_of(run)
    charts = json.loads(Page(text).scripts[0])
    assert max(len(trace["x"]) for chart in charts for trace in chart["data"]) <= 1500
    assert len(text) < 800_000


def test_what_extensions_record_is_on_the_page():
    run = steady([300, 100])
    lines = [replace(each, values={"queue": (float(each.step), None)}) for each in run.steps]
    content, _ = describe(replace(run, steps=lines), "a")
    chart = content.charts[-1]
    assert chart.title == "Values of extensions: queue"
    assert chart.data[0]["y"] == list(range(60))
    assert chart.table[1:] == [["0", "0", "29.5", "59"], ["1", "-", "-", "-"]]
    assert not any("extension" in chart.title for chart in describe(run, "a")[0].charts)


def test_the_events_and_hosts_are_on_the_page():
    run = steady([300, 100, 100], hosts=("a", "b", "b"))
    lines = [line(0, [60, 60], [0.1, 0.1]), *run.steps[1:]]
    rows = Page(page_of(replace(run, steps=lines, restarts=(1,), starts=2))).rows
    assert ["figures and charts are of the steps since", "", "1"] in rows
    assert ["changes of the number of workers", "1", "1 (to 3 workers)"] in rows
    assert {("host", "workers"), ("a", "1"), ("b", "2")} <= {tuple(row[:2]) for row in rows}


def test_errors_name_the_run(tmp_path):
    pytest.importorskip("plotly")
    save(tmp_path / "a", steady([300, 100]))
    save(tmp_path / "empty", Run(header(2, 12), []))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.jsonl").write_bytes(b'{"schema": 2, "fra')
    for folder, words in (
        (".", "no run record .*name one of the runs in it: a, empty, torn"),
        ("none", "no run record .*name the --run-dir"),
        ("empty", "empty: the run must have at least one step"),
        ("torn", "torn/run.jsonl line 1 is not JSON"),
    ):
        with pytest.raises(ValueError, match=words):
            write_report(tmp_path / folder, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


# In a browser

WIDTH = 360
PROBE = """
const plots = inside => [...document.querySelectorAll(".plot")].map(
  plot => plot.querySelectorAll(inside).length);
addEventListener("load", () => setTimeout(() => parent.postMessage(JSON.stringify({
  width: innerWidth, scroll: document.documentElement.scrollWidth,
  drawn: plots("svg.main-svg"), marks: plots("path.js-line, .points path, .hm image"),
  links: [...document.querySelectorAll("[src],[href]")].map(
    e => e.getAttribute("src") || e.getAttribute("href")),
  requests: performance.getEntriesByType("resource").map(e => e.name),
  text: document.body.innerText.includes("<script>alert(1)</" + "script>")}), "*"), 200));
"""
FRAME = """<!DOCTYPE html><html><body><iframe src="page.html" width="360" height="4000"></iframe>
<script>addEventListener("message", e => document.body.append("FOUND", e.data, "END"))</script>
</body></html>"""


def browser():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no chromium, chromium-browser or google-chrome on PATH")


def shown(folder, text):
    """Opens a page in a frame as wide as a telephone; returns what its probe found."""
    digest = b64encode(sha256(PROBE.encode()).digest()).decode()
    copy = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    probe = f"<script>{PROBE}</script></body>"
    (folder / "page.html").write_text(probe.join(copy.rsplit("</body>", 1)))
    (folder / "frame.html").write_text(FRAME)
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
               "--virtual-time-budget=20000", f"--user-data-dir={folder / 'profile'}",
               "--dump-dom", (folder / "frame.html").as_uri()]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    messages = [entry for entry in done.stderr.splitlines() if "CONSOLE" in entry]
    found = re.search("FOUND({.*})END", done.stdout)
    assert found, done.stderr[-2000:]
    unescaped = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(unescaped), messages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hostile", "hostile, asynchronous"])
def test_a_browser_draws_all_charts_without_a_request_in_360_pixels(tmp_path, name):
    browser()
    pytest.importorskip("plotly")
    run = RUNS[name]()
    write_report(save(tmp_path / "run", run), tmp_path / "report.html")
    found, messages = shown(tmp_path, (tmp_path / "report.html").read_text())
    assert messages == []
    assert found["width"] == WIDTH
    assert found["scroll"] <= WIDTH
    assert all(found["drawn"])
    assert all(found["marks"])
    assert len(found["drawn"]) >= 4
    assert found["links"] == []
    assert found["requests"] == []
    assert found["text"]


NUMBERS = (0.0, 1e-300, 1e-13, 1e-9, 0.1, 0.3, 1.0, 1e9, 1e11, 1e15)


def odd_run(seed):
    """Returns a run that the reader of records accepts, with numbers of all sizes."""
    rng = np.random.default_rng(seed)
    workers, ordinary = int(rng.integers(1, 4)), rng.random() < 0.5
    numbers = NUMBERS[4:7] if ordinary else NUMBERS

    def column(values, count=workers):
        return tuple(values[k] for k in rng.integers(0, len(values), count))

    lines = [
        StepLine(
            step=step,
            sizes=column((0, 1, 6, 10**6, 10**15)),
            busy_seconds=column(numbers),
            predicted_seconds=column((None, *numbers)),
            wall_seconds=column(numbers)[0],
            excluded=column(((), (), (), (0,), (0, 7)))[0],
            short=bool(rng.random() < 0.2),
            work=column(numbers) if rng.random() < 0.3 else (),
            drivers={"memory_percent": column((None, *numbers))},
        )
        for step in range(int(rng.integers(1, 60)))
    ]
    return Run(header(workers, column((1, 12, 10**15))[0], lag=int(rng.integers(-1, 40))), lines)


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 200), marks=pytest.mark.campaign)]
)
def test_a_legal_record_has_a_page_or_an_error(seeds):
    outcomes = []
    for seed in seeds:
        try:
            content, figures = describe(odd_run(seed), "a")
        except ValueError as error:
            outcomes.append("train for longer" in str(error))
            continue
        Page(page(content, ""))
        json.dumps(figures, allow_nan=False)
    assert all(outcomes)
    assert len(outcomes) < len(seeds) / 2
