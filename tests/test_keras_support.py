"""Without this docs/keras-support.md claims what no test shows.

``keras_support.json`` names the tests behind each row of the page, by its feature.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waits import HANG_SECONDS

ROOT = Path(__file__).parents[1]
OUTCOMES = ("exact", "supported", "refused", "warned", "passive")


TESTS = json.loads(Path(__file__).with_name("keras_support.json").read_text("utf-8"))


def rows():
    text = (ROOT / "docs" / "keras-support.md").read_text("utf-8").split("## Public scripts")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in ("Feature", "---"):
            yield cells


@pytest.fixture(scope="module")
def collected():
    """The ids of all tests in the files that the page names, with and without parameters."""
    files = sorted({each.split("::")[0] for tests in TESTS.values() for each in tests})
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *files],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    ids = set(found.stdout.splitlines())
    return ids | {each.split("[")[0] for each in ids}


@pytest.mark.slow
def test_the_tests_of_the_features_exist(collected):
    assert [each for tests in TESTS.values() for each in tests if each not in collected] == []


def test_every_row_has_an_outcome_and_a_test():
    features = []
    for feature, outcome in rows():
        features.append(feature)
        assert outcome.startswith(OUTCOMES), feature
        assert TESTS.get(feature), f"name its tests in tests/keras_support.json: {feature}"
    assert len(features) > 30
    assert features == list(TESTS)
