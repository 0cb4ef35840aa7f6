"""Without this a user searches docs/troubleshooting.md in vain for a message that has changed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doc_pages import ROOT

PACKAGES = ("lbbsp_core", "lbbsp_tf", "lbbsp_mx")
VALUE = "…"
"""Stands for a value, in the document and in the texts of the sources."""


def messages() -> list[str]:
    """Returns the messages of the document: the code at the start of each item of its lists."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    return [" ".join(found.split()) for found in re.findall(r"^- `([^`]+)`", text, re.MULTILINE)]


def texts(source: str) -> Iterator[str]:
    """Yields all strings of a module; values of f-strings are written as `VALUE`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[.\d]*[sdrgf]", VALUE, node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (
                each.value if isinstance(each, ast.Constant) else VALUE for each in node.values
            )
            yield "".join(map(str, parts))


def occurs(message: str, sources: str) -> bool:
    """Says whether a string of the sources has all fragments of a message, in their order."""
    fragments = [re.escape(each.strip()) for each in message.split(VALUE) if each.strip()]
    return re.search(".*".join(fragments), sources) is not None


def test_the_messages_of_the_document_are_those_of_the_sources():
    sources = "\n".join(
        text.replace("\n", " ")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for text in texts(path.read_text("utf-8"))
    )
    missing = [message for message in messages() if not occurs(message, sources)]
    assert not missing, "these messages have changed: change docs/troubleshooting.md, too"


def test_the_most_frequent_messages_are_explained():
    assert len(messages()) >= 40


def test_fragments_must_be_of_one_string_and_in_order():
    sources = "\n".join(texts("a = f'one {x} two' 'three'\nb = 'four %d five'"))
    assert occurs("one … two", sources)
    assert occurs("one … twothree", sources)
    assert occurs("four … five", sources)
    assert not occurs("two … one", sources)
    assert not occurs("one … four", sources)
