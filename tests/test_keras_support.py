"""Without this docs/keras-support.md claims what no test shows: each row names one that exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTCOMES = ("exact", "supported", "refused", "warned", "passive")


def rows():
    text = (ROOT / "docs" / "keras-support.md").read_text().split("## Public scripts")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0] not in ("Feature", "---"):
            yield cells


@pytest.fixture(scope="module")
def collected():
    """The ids of all tests in the files that the page names, with and without parameters."""
    files = sorted({each.split("::")[0] for *_, tests in rows() for each in _ids(tests)})
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *files],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    ids = set(found.stdout.splitlines())
    return ids | {each.split("[")[0] for each in ids}


def _ids(tests):
    return [each.strip() for each in re.split(r",\s+(?=tests/)", tests) if each.strip()]


@pytest.mark.slow
def test_the_page_names_existing_tests(collected):
    named = [each for *_, tests in rows() for each in _ids(tests)]
    assert len(named) > 30
    assert [each for each in named if each not in collected] == []


def test_every_row_has_an_outcome_and_a_test():
    for feature, outcome, tests in rows():
        assert outcome.startswith(OUTCOMES), feature
        assert tests, feature
