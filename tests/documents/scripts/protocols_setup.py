"""Names of the outline of a plugin in docs/design.md."""

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Protocol", "Sequence"]
