"""docs/design.md names the files through which a step leads."""

import re
from pathlib import Path

import pytest
from jobs import needs_mxnet, run

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
ROOMS = ("cost", "policy", "predict", "reserve", "resources")
"""Rooms of lbbsp_core of which the files in a step follow from options and measurements."""


def expanded(text):
    """Names of files, such as ``["a/b.py", "a/c.py"]`` for ``"a/{b,c}.py"``."""
    head, _, rest = text.partition("{")
    inner, _, tail = rest.partition("}")
    return [head + name + tail for name in inner.split(",")]


def documented(plugin):
    """What the tables of the design name in the columns of lbbsp_core and of a plugin."""
    named = set()
    for table in DESIGN.read_text("utf-8").split("A step leads through")[1].split("\n\n"):
        if not table.startswith("| in a step |"):
            continue
        header, _, *rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
        for place, title in enumerate(header):
            folder = title.strip("`")
            if folder in ("lbbsp_core/", f"{plugin}/"):
                texts = re.findall("`(.*?)`", " ".join(row[place] for row in rows))
                names = [name for text in texts for name in expanded(text)]
                named |= {name if name.startswith("lbbsp") else folder + name for name in names}
    return named


@pytest.mark.parametrize(
    ("plugin", "framework"),
    [("lbbsp_tf", "tensorflow"), pytest.param("lbbsp_mx", "mxnet", marks=needs_mxnet)],
)
def test_a_step_leads_through_the_files_that_the_design_names(plugin, framework, tmp_path):
    job = run("step_files", framework, str(tmp_path), workers=2, framework=framework)
    assert job.status == 0
    files = {
        next((f"lbbsp_core/{room}/" for room in ROOMS if f"lbbsp_core/{room}/" in name), name)
        for name in job.results(0)["files"]
    }
    assert sorted(documented(plugin)) == sorted(files)
