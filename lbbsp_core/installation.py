"""How this lbbsp was installed, for errors that say how to install what is missing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def extra(name: str) -> str:
    """Returns what to pass to ``pip install`` for an extra of this lbbsp ("": for lbbsp alone).

    It is the folder, file or repository that lbbsp was installed from (PEP 610), or else the folder
    that it is run in: by its name alone, pip would install whatever has this name on an index.

    Example:
        >>> extra("report").endswith("[report]'") or "@" in extra("report")
        True
    """
    origin = _origin()
    editable: bool = origin.get("dir_info", {}).get("editable", False)
    return "-e " * editable + shlex.quote(_requirement(origin, name))


def reinstall(error: ImportError, name: str) -> str:
    """Returns the command that installs an extra again, because of a package in it."""
    is_broken = not isinstance(error, ModuleNotFoundError)
    return f"pip install {'--force-reinstall ' * is_broken}{extra(name)}"


def _origin() -> dict[str, Any]:
    """Returns what pip has noted of the installation; an empty dictionary for an index."""
    from importlib import metadata

    # In a clone there may be metadata of a build, too, which say nothing of it.
    for distribution in metadata.distributions(name="lbbsp"):
        if noted := distribution.read_text("direct_url.json"):
            return dict(json.loads(noted))
    clone = Path(__file__).parents[1]
    return {"url": clone.as_uri(), "dir_info": {}} if (clone / "pyproject.toml").exists() else {}


def _requirement(origin: dict[str, Any], name: str) -> str:
    url, extras = origin.get("url", ""), f"[{name}]" if name else ""
    if "dir_info" in origin:
        return unquote(urlsplit(url).path) + extras
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"lbbsp{extras}" + (f" @ {url}" if url else "")
