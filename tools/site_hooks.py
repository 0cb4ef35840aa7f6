"""Hooks of the documentation site: pages outside ``docs/``, and the reference of the commands.

MkDocs calls the functions by name (https://www.mkdocs.org/dev-guide/plugins/#events).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents outside ``docs/``."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links between documents to their pages, and writes the reference of the commands."""
    name = page.file.src_uri
    sources = {target: source for source, target in OUTSIDE.items()}
    source = PurePosixPath(sources.get(name, f"docs/{name}"))
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    return _LINK.sub(lambda link: _moved(link, source, name), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Writes the colon of reStructuredText before a block of code as a plain one."""
    return html.replace("::</p>", ":</p>")


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
