"""Griffe extension of the documentation site: reads our docstrings as its Google style does."""

from __future__ import annotations

import re

from griffe import Extension, Object
from latex2mathml.converter import convert

_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_CODE = re.compile(r"::$", re.MULTILINE)
_FORMULA = re.compile(r"^( *)\.\. math:: (.*(?:\n\1 +\S.*)*)", re.MULTILINE)


class DocstringSections(Extension):
    """Makes doctests blocks of code, and formulas MathML, which browsers show without a script.

    The colon of reStructuredText before a block of code becomes a plain one.
    """

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Rewrites the docstring of an object."""
        if obj.docstring is not None:
            renamed = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = _CODE.sub(":", _FORMULA.sub(_formula, renamed))


def _formula(directive: re.Match[str]) -> str:
    return f"{directive[1]}<div>{convert(directive[2], display='block')}</div>"
