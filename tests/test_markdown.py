"""Holds the form of the documents: lines of at most 120 characters, links that resolve offline."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from doc_pages import ROOT, Page, documents, name_of, slug

MAX_LENGTH = 120
EXEMPT = re.compile(r"\s*\|.*|#+ .*|\S+|[-*]? *\[[^]]*\]\(\S+\)[.,;]?")
"""Rows of tables, headings, and lines that are one word or one link: these cannot be broken."""
DOCUMENTS = documents()
ANCHORED = (".md",)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_lines_are_short(path):
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    long = [
        f"{name_of(path)}:{number}: {len(line)} characters"
        for number, line in lines
        if len(line) > MAX_LENGTH and not EXEMPT.fullmatch(line.strip())
    ]
    assert not long, "break these lines:\n" + "\n".join(long)


def broken(page: Page) -> list[str]:
    """Returns the relative links of a page whose file, or whose heading, does not exist."""
    return [link for link in page.links if not _is_external(link) and not _exists(page, link)]


def _is_external(link: str) -> bool:
    return link.startswith(("http://", "https://", "mailto:"))


def _exists(page: Page, link: str) -> bool:
    name, _, anchor = unquote(link).partition("#")
    target = (page.path.parent / name).resolve() if name else page.path
    if not target.exists():
        return False
    is_page = target.suffix in ANCHORED
    return not anchor or (is_page and anchor in Page(target).anchors)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_resolve(path):
    assert not broken(Page(path))


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# One *heading*, `here`\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    good = "other.md other.md#one-heading-here other.md#twice-1 #own-heading https://x.test/y"
    bad = "none.md other.md#twice-2 #none other"
    links = "".join(f"[a]({link})\n" for link in (good + " " + bad).split())
    page.write_text("# Own heading\n\n" + links)
    assert broken(Page(page)) == bad.split()


def test_anchors_are_those_of_github():
    assert slug("What `launch -n 2` does: A/B, 50 %") == "what-launch--n-2-does-ab-50-"


def test_documents_are_found():
    names = {name_of(path) for path in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "docs/design.md", "traces/README.md"} <= names
    assert all(Path(ROOT / name).is_file() for name in names)
