"""Writes the pages of the documentation site into a folder: ``site_pages.py FOLDER``.

They are the files of ``docs/``, documents outside it, and the reference of the commands.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path, PurePosixPath

from typer.cli import get_docs_for_click
from typer.main import get_command

from lbbsp_core.cli.app import application

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "traces/README.md": "traces.md",
}
"""Documents outside ``docs/``, and their pages."""

COMMANDS = "<!-- commands -->"
"""Place of the reference of all commands."""

_LINK = re.compile(r"\[(?P<text>[^]]*)\]\((?P<target>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)")


def write_pages(folder: Path) -> None:
    """Writes all pages, with links between documents pointed to their pages."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    inside = (path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
    for source in (*inside, *OUTSIDE):
        page = OUTSIDE.get(source, source.removeprefix("docs/"))
        text = (ROOT / source).read_text("utf-8")
        if COMMANDS in text:
            text = text.replace(COMMANDS, commands())
        text = _LINK.sub(partial(_moved, source=PurePosixPath(source), page=page), text)
        (folder / page).write_text(text, "utf-8")


def commands() -> str:
    """Returns the reference of the command line as Markdown, of what the program itself parses."""
    app = application()
    command = get_command(app)
    command.commands = {name: lazy.loaded for name, lazy in command.commands.items()}
    context = command.make_context("lbbsp", [], resilient_parsing=True)
    text = get_docs_for_click(obj=command, ctx=context, name="lbbsp")
    text = text.split("\n", 1)[1]  # the page has a title of its own
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+", "", text)  # summaries that are cut short
    return re.sub(r" <list\[\w+\]>`", "`", text)


def _moved(link: re.Match[str], source: PurePosixPath, page: str) -> str:
    """Returns a link as its page must write it; of a file that is no page, only the text."""
    target = os.path.normpath(source.parent / link["target"])
    if target not in OUTSIDE and not target.startswith("docs/"):
        return link["text"]
    moved = OUTSIDE.get(target, target.removeprefix("docs/"))
    relative = os.path.relpath(moved, PurePosixPath(page).parent)
    return f"[{link['text']}]({relative}{link['anchor'] or ''})"


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
