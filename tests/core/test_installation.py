"""What errors say of the installation of extras."""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

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
        (None, "'lbbsp[tf]'"),  # from an index
    ],
)
def test_an_extra_comes_from_where_lbbsp_was_installed_from(monkeypatch, noted, expected):
    text = None if noted is None else json.dumps(noted)
    found = SimpleNamespace(read_text={"direct_url.json": text}.__getitem__)
    monkeypatch.setattr(metadata, "distribution", {"lbbsp": found}.__getitem__)
    assert extra("tf") == expected


def test_an_extra_of_a_clone_that_is_not_installed_comes_from_it(monkeypatch):
    def distribution(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert extra("mx") == f"'{ROOT}[mx]'"
