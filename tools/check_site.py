"""Checks that the built site loads nothing from other servers: ``check_site.py FOLDER``."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

EXTERNAL = re.compile(r"(?:https?:)?//", re.IGNORECASE)
LOADED = {"src", "srcset", "data", "poster"}
"""Attributes whose address a browser loads without a click."""

LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "manifest"}
"""Values of ``<link rel=...>`` whose address a browser loads, or to which it connects."""


class _Resources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.external: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        names = LOADED & set(values)
        if tag == "link" and LOADED_LINKS & set(values.get("rel", "").split()):
            names.add("href")
        found = (values[name] for name in names)
        self.external += [address for address in found if EXTERNAL.match(address)]


def external_resources(folder: Path) -> list[str]:
    """Returns what pages and style sheets load from elsewhere, as ``FILE: ADDRESS``."""
    found = []
    for path in sorted(folder.rglob("*.html")):
        parser = _Resources()
        parser.feed(path.read_text("utf-8"))
        found += [f"{path.relative_to(folder)}: {address}" for address in parser.external]
    for path in sorted(folder.rglob("*.css")):
        loaded = re.findall(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)", path.read_text())
        addresses = (address for pair in loaded for address in pair if EXTERNAL.match(address))
        found += [f"{path.relative_to(folder)}: {address}" for address in addresses]
    return found


def main(folder: Path) -> int:
    """Prints what a browser would load from elsewhere; returns 1 if there is any, or no page."""
    if not (folder / "index.html").is_file():
        print(f"{folder} contains no site: run make docs")
        return 1
    found = external_resources(folder)
    print("\n".join(found) or f"{folder}: nothing is loaded from other servers")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
