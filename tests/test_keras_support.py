"""Without this docs/keras-support.md claims what no test shows.

``keras_support.json`` names the tests behind each row of the page, by its feature.
"""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTCOMES = ("exact", "supported", "refused", "warned", "passive")
TESTS = json.loads(Path(__file__).with_name("keras_support.json").read_text("utf-8"))


def rows():
    text = (ROOT / "docs" / "keras-support.md").read_text("utf-8").split("## Public scripts")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in ("Feature", "---"):
            yield cells


class Collector:
    """Plugin that keeps the ids of all tests that are collected, with and without parameters."""

    def __init__(self):
        self.ids = set()

    def pytest_itemcollected(self, item):
        self.ids |= {item.nodeid, item.nodeid.partition("[")[0]}


@pytest.mark.slow
def test_the_tests_of_the_features_exist(monkeypatch):
    """Files that this process has collected already are not imported once more."""
    named = {each for tests in TESTS.values() for each in tests}
    files = sorted({each.partition("::")[0] for each in named})
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    collector = Collector()
    status = pytest.main(["--collect-only", "-q", "-p", "no:xdist", *files], plugins=[collector])
    assert status == pytest.ExitCode.OK
    assert named - collector.ids == set()


def test_every_row_has_an_outcome_and_a_test():
    features = []
    for feature, outcome in rows():
        features.append(feature)
        assert outcome.startswith(OUTCOMES), feature
        assert TESTS.get(feature), f"name its tests in tests/keras_support.json: {feature}"
    assert len(features) > 30
    assert features == list(TESTS)
