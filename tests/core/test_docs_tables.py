"""Without this the figures of docs/ differ from those that the recorded traces give.

Cheap rows are computed again. The others take minutes: ``python benchmarks/tables.py all --update``
computes them.
"""

from __future__ import annotations

import re

import pytest
import tables

DOCUMENTS = ("predictors.md", "resources.md", "policies.md")
LISTS = {"name"}
"""First columns of tables without figures."""

FORECASTS = ("last", "ema0.2", "ema0.5")
CHEAP = [
    *((name, row) for name in ("predictors", "predictors-2", "predictors-3") for row in FORECASTS),
    *(("jobs", row) for row in FORECASTS),
    ("jobs-efficiency", "last"),
    *(("drivers", row) for row in tables.DRIVERS),
    ("policies-jobs", "bsp: `Even`"),
    ("policies-jobs", "proportional: `ProportionalControl`"),
    ("policies", "bsp: `Even`"),
    ("policies", "fixed: `FixedShares`, profiled"),
    ("policies", "dbs: `EpochBalanced`"),
    ("policies", "proportional: `ProportionalControl`"),
    ("policies", "leader-straggler: `LeaderStraggler`"),
]


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "row"), CHEAP)
def test_documents_state_what_is_computed(name, row):
    table = tables.TABLES[name]
    assert table.measure(row) == table.read()[row]


@pytest.mark.campaign
def test_narx_on_short_traces():
    table, traces = tables.TABLES["predictors"], ("pai_job_1", "pai_job_2")
    stated = table.read()["narx"]
    assert table.measure("narx", traces) == {trace: stated[trace] for trace in traces}


@pytest.mark.parametrize("name", tables.TABLES)
def test_documents_have_the_form_that_the_tool_writes(name):
    table = tables.TABLES[name]
    rows = table.read()
    assert tuple(rows) == table.rows
    assert table.markdown(rows) in table.document.read_text(encoding="utf-8")


def test_an_update_keeps_the_other_rows(tmp_path):
    table = tables.TABLES["predictors-3"]
    text = table.document.read_text(encoding="utf-8")
    copy = tables.replace(table, document=tmp_path / "copy.md")
    copy.document.write_text(text, encoding="utf-8")
    copy.update({})
    assert copy.document.read_text(encoding="utf-8") == text
    copy.update({"last": dict.fromkeys(table.columns, ".0001")})
    after = copy.document.read_text(encoding="utf-8").splitlines()
    changed = [(old, new) for old, new in zip(text.splitlines(), after, strict=True) if old != new]
    cells = ".0001 | .0001 | .0001 | .0001 | .0001 | **.0001** | .0001"
    assert changed[0][1] == f"| last | {cells} |"
    assert [new for _, new in changed[1:]] == [old.replace("**", "") for old, _ in changed[1:]]
    assert len(changed) == 2  # the row, and the one that had the best mean


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_table_names_the_command_that_prints_it(document):
    text = (tables.ROOT / "docs" / document).read_text(encoding="utf-8")
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        corners = re.findall(r"(?m)^\| ([^|]*) \|.*\n\|---", section)
        commands = re.findall(r"`python benchmarks/(\w+\.py)(?: ([\w-]+))?`", section)
        if set(corners) <= LISTS:
            continue
        assert commands, f"{document}: no command for the tables {corners}"
        for script, name in commands:
            assert (tables.ROOT / "benchmarks" / script).is_file()
            assert script != "tables.py" or tables.TABLES[name].corner in corners
