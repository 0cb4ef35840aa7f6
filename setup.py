"""Long description of the distribution; all else is in pyproject.toml.

The README links to files of the repository, which a package index does not have: there, each of
these links is shown as its text and its file, and the picture is left out.
"""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
RELATIVE = r"\(((?!https?:|mailto:|#)[^)\s]*)\)"
NOTE = (
    "*Files that are named here (`docs/`, `examples/`, `benchmarks/`, `traces/`) are in the source "
    "distribution.*\n\n"
)


def long_description(readme: str) -> str:
    """Returns a README without relative links, which an index cannot resolve.

    Args:
        readme: Markdown whose links may be relative to the repository.

    Returns:
        Markdown with absolute links only; a link to a file becomes its text, with its path.
    """
    readme = re.sub(rf"!\[[^\]]*\]{RELATIVE}\n+(\*[^*]+\*\n+)?", "", readme)
    readme = re.sub(rf"\[([^\]]+)\]{RELATIVE}", _text_and_path, readme)
    title, first, rest = readme.partition("\n\n")
    return title + first + NOTE + rest


def _text_and_path(link: re.Match) -> str:
    path = link[2].partition("#")[0]
    return path if path in link[1] else f"{link[1]}: {path}"


if __name__ == "__main__":
    from setuptools import setup  # tests call `long_description` where there is no setuptools

    setup(
        long_description=long_description((HERE / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
