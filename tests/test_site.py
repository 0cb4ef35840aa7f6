"""Without this a public name can lack documentation, and a page can load from other servers.

Zensical checks links and anchors (`make docs`).
"""

from __future__ import annotations

import ast
import re

import pytest
from check_site import external_resources
from doc_pages import ROOT
from site_pages import OUTSIDE

import lbbsp_core

PLUGINS = ("lbbsp_tf", "lbbsp_mx")


def public_names(init):
    """Returns `__all__` of a package by full names, without importing it."""
    package = ".".join(init.parent.relative_to(ROOT).parts)
    found = [
        ast.literal_eval(node.value)
        for node in ast.parse(init.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [f"{package}.{name}" for names in found for name in names]


def test_each_public_name_is_in_the_reference_once():
    pages = [path.read_text("utf-8") for path in ROOT.glob("docs/reference/*.md")]
    found = re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE)
    # Of a function and its module of the same name, the path must name both.
    documented = [name.replace(".sync.zipline.zipline", ".zipline") for name in found]
    tops = [f"lbbsp_core.{name}" for name in lbbsp_core.__all__]
    tops += [name for plugin in PLUGINS for name in public_names(ROOT / plugin / "__init__.py")]
    stages = [
        name
        for init in (ROOT / "lbbsp_core").rglob("*/__init__.py")
        for name in public_names(init)
        if f"lbbsp_core.{name.rpartition('.')[2]}" not in tops
    ]
    assert "lbbsp_core.sim.run_bsp" in stages
    assert sorted(documented) == sorted(tops + stages)


def test_each_page_has_one_place_in_the_navigation():
    _, navigation = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    found = re.findall(r"(\S+\.md)(?: #.*)?$", navigation, re.MULTILINE)
    assert sorted(found) == sorted([*pages, *OUTSIDE.values()])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.html", '<script src="https://x.test/a.js"></script>'),
        ("page.html", '<link rel="stylesheet" href="//x.test/a.css">'),
        ("page.html", '<img alt="" src=http://x.test/a.png>'),
        ("style.css", "@font-face { src: url('https://x.test/a.woff') }"),
        ("style.css", '@import "https://x.test/a.css";'),
    ],
)
def test_resources_of_other_servers_are_found(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    [found] = external_resources(tmp_path)
    assert found.startswith(f"{name}: ")


def test_links_and_own_resources_are_no_such_resources(tmp_path):
    text = '<a href="https://x.test/">x</a><img src="a.png"><link rel="canonical" href="https://x">'
    (tmp_path / "page.html").write_text(text)
    (tmp_path / "a.css").write_text("a { background: url(data:image/svg+xml;base64,aaaa) }")
    assert external_resources(tmp_path) == []
