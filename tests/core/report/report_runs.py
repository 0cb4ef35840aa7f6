"""Records whose figures are known, for the tests of the report."""

from html.parser import HTMLParser

import numpy as np

from lbbsp_core.runtime.record.record import PushLine, Run, StepLine, run_header
from lbbsp_core.runtime.record.writer import open_record

HOSTILE = "<script>alert(1)</script>"
VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Elements of a page with their attributes, texts, scripts and cells; checks their nesting."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.scripts, self.open = [], [], [], []
        self.rows, self.tiles = [], {}  # cells of tables, and values and notes of tiles
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data
        if self.open[-1:] == ["dt"]:
            self.tiles[data] = []
        if self.open[-1:] == ["dd"]:
            [*self.tiles.values()][-1].append(data)

    def tags(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]


def header(workers, total, **facts):
    names = {"policy": "LoadBalanced()", "predictor": "LastValue()", "lag": 1}
    known = {name: facts.pop(name, value) for name, value in names.items()}
    drivers = facts.pop("drivers", ())
    found = run_header("none", workers=workers, global_batch_size=total, versions={},
                       drivers=drivers, **known)  # fmt: skip
    for name, value in facts.items():
        object.__setattr__(found, name, value)
    return found


def line(step, sizes, busy, wall=None, predicted=None, **rest):
    workers = len(sizes)
    return StepLine(
        step=step,
        sizes=tuple(int(x) for x in sizes),
        busy_seconds=tuple(float(x) for x in busy),
        predicted_seconds=(None,) * workers if predicted is None else tuple(map(float, predicted)),
        wall_seconds=float(max(busy) + 0.02 if wall is None else wall),
        **{"excluded": (), **rest},
    )


def push(number, workers=2, **rest):
    """Returns a push of workers that take turns."""
    known = {"samples": 8, "busy_seconds": 0.1, "seconds": 0.1, "staleness": 0, "lead": 0}
    turn = {"worker": number % workers, "iteration": number // workers}
    return PushLine(push=number, **turn, **{**known, **rest})


def run_of(speeds, shares, *, total=120, overhead=0.0, noise=0.0, forecast=1.0, seed=0, **facts):
    """Returns a run of workers whose speeds and shares are given for each step.

    Args:
        speeds: Samples per second, shape ``(steps, workers)``.
        shares: Relative batch sizes, of the same shape.
        total: Global batch size.
        overhead: Overhead kappa in samples.
        noise: Standard deviation of the logarithm of the speeds.
        forecast: Predicted / true busy time before the noise; None for no forecasts.
        seed: Seed of the noise.
        facts: Fields of the header; ``drivers`` holds values by name, of the same shape.
    """
    rng = np.random.default_rng(seed)
    speeds, shares = np.asarray(speeds, float), np.asarray(shares, float)
    workers = speeds.shape[1]
    drivers = facts.pop("drivers", {})
    lines = []
    for k, (speed, share) in enumerate(zip(speeds, shares, strict=True)):
        sizes = np.floor(total * share / share.sum()).astype(int)
        sizes[0] += total - sizes.sum()
        usual = (sizes + overhead) / speed
        busy = usual * np.exp(rng.normal(0, noise, workers))
        values = {name: tuple(np.asarray(own, float)[k]) for name, own in drivers.items()}
        predicted = None if forecast is None else usual * forecast
        lines.append(line(k, sizes, busy, predicted=predicted, drivers=values))
    return Run(header(workers, total, drivers=tuple(drivers), **facts), lines)


def steady(speeds, shares=None, steps=60, **rest):
    """Returns a run with the same speeds and shares in all steps."""
    shares = speeds if shares is None else shares
    return run_of([speeds] * steps, [shares] * steps, **rest)


def save(folder, run):
    record = open_record(folder, run.header)
    for each in [*run.steps, *run.pushes]:
        record.write(each)
    record.close()
    return folder
