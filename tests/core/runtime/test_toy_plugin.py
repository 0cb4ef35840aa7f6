"""Runs the plugin of docs/adding-a-framework.md: it balances, and learns what one worker learns."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lbbsp_core import Even, read_run
from lbbsp_core.measure import BusyTimer
from lbbsp_core.runtime.planning import running_step

DOCUMENT = Path(__file__).parents[3] / "docs" / "adding-a-framework.md"
X, SECONDS_PER_SAMPLE = 48, (0.001, 0.003)
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(12 * X + 7, 3))
TARGETS = FEATURES @ np.array([1.0, -2.0, 0.5]) + 0.1 * RANDOM.normal(size=len(FEATURES))


class Clock(threading.local):
    """Time of each worker, which is a thread: it passes in sleeps alone, which return at once."""

    now = 0

    def sleep(self, seconds):
        self.now += round(seconds * 1e9)


@pytest.fixture
def run(monkeypatch):
    """The document's function `run`, in virtual time."""
    clock = Clock()
    monkeypatch.setattr(running_step, "BusyTimer", lambda: BusyTimer(lambda: clock.now))
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    plugin: dict = {}
    exec(compile("\n".join(blocks), DOCUMENT.name, "exec"), plugin)
    lines = sum(bool(line.strip()) for line in blocks[0].splitlines())
    assert lines <= 65, f"the plugin should stay small, and has {lines} lines"
    plugin["time"] = SimpleNamespace(sleep=clock.sleep)
    return plugin["run"]


def test_two_unequal_workers_learn_what_one_learns(run):
    """The plan changes while they train; float64 sums differ by rounding alone."""
    (alone, _), *_ = run(FEATURES, TARGETS, seconds_per_sample=(0.0,))
    results = run(FEATURES, TARGETS, seconds_per_sample=SECONDS_PER_SAMPLE)
    assert np.abs(alone).max() > 0.1, "a model that learned nothing would prove nothing"
    for weights, _ in results:
        np.testing.assert_allclose(weights, alone, rtol=0, atol=1e-12)


def test_the_slow_worker_gets_less(run, tmp_path):
    results = run(FEATURES, TARGETS, seconds_per_sample=SECONDS_PER_SAMPLE, record=tmp_path)
    assert results[0][1] == results[1][1]
    first, *_, last = [line for line in read_run(tmp_path).steps if not line.short]
    assert first.sizes == (24, 24)
    assert last.sizes == (36, 12), "three times as fast"


def test_even_batches_stay_even(run):
    (_, sizes), _ = run(
        FEATURES[: 2 * X], TARGETS[: 2 * X], seconds_per_sample=(0.0, 0.0), policy=Even()
    )
    assert sizes == (24, 24)
