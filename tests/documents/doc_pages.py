"""Markdown documents of the repository and their blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
COMMENT = re.compile(r"<!--\s*(set-up|not run):\s*(.*?)\s*-->", re.DOTALL)


def documents() -> list[Path]:
    """Returns all documents: those of the root folder, of ``docs/``, and the READMEs of folders."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[!.]*/README.md")]
    return sorted(set(found))


def name_of(path: Path) -> str:
    """Returns the path as messages and test names show it: relative to the root folder."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        document: Path relative to the root folder.
        line: Number of its first line of code, counted from 1.
        language: First word behind the fence; "" if there is none, also of indented code.
        text: The code.
        set_up: Name in the comment ``<!-- set-up: NAME -->`` before the block, or "".
        reason: Text of the comment ``<!-- not run: REASON -->`` before the block, or "".
    """

    document: str
    line: int
    language: str
    text: str
    set_up: str = ""
    reason: str = ""

    @property
    def place(self) -> str:
        """Document and line, as in messages of compilers."""
        return f"{self.document}:{self.line}"


class Page:
    """A parsed document."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self._tokens = MarkdownIt("commonmark").enable("table").parse(self.text)

    @property
    def blocks(self) -> Iterator[Block]:
        """Blocks of code, in order."""
        previous: Token | None = None
        for token in self._tokens:
            if token.type in ("fence", "code_block"):
                yield self._block(token, previous)
            previous = token

    def _block(self, token: Token, previous: Token | None) -> Block:
        comment = previous.content if previous and previous.type == "html_block" else ""
        notes = dict(COMMENT.findall(comment))
        return Block(
            name_of(self.path),
            (token.map or [0])[0] + 2,
            token.info.split()[0] if token.info else "",
            token.content,
            notes.get("set-up", ""),
            notes.get("not run", ""),
        )
