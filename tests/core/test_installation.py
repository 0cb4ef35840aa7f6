"""What errors say of the installation of extras."""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from lbbsp_core import installation
from lbbsp_core.installation import extra

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        ({"url": "file:///a%20b/lbbsp", "dir_info": {}}, "'/a b/lbbsp[tf]'"),
        ({"url": "file:///lbbsp", "dir_info": {"editable": True}}, "-e '/lbbsp[tf]'"),
        ({"url": "https://x/l.whl", "archive_info": {}}, "'lbbsp[tf] @ https://x/l.whl'"),
        (
            {"url": "https://x/l", "vcs_info": {"vcs": "git", "commit_id": "ab"}},
            "'lbbsp[tf] @ git+https://x/l@ab'",
        ),
    ],
)
def test_an_extra_comes_from_where_lbbsp_was_installed_from(monkeypatch, noted, expected):
    built, found = ({"direct_url.json": each} for each in (None, json.dumps(noted)))
    both = [SimpleNamespace(read_text=each.__getitem__) for each in (built, found)]
    monkeypatch.setattr(metadata, "distributions", lambda name: both)
    assert extra("tf") == expected


def test_an_extra_of_a_clone_that_is_not_installed_comes_from_it(monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "distributions", lambda name: [])
    assert extra("mx") == f"'{ROOT}[mx]'"
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "lbbsp_core" / "installation.py"))
    assert extra("mx") == "'lbbsp[mx]'", "of an index, which leaves no note"
