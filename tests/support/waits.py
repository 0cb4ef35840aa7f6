"""Waits of tests: for an event or a state, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_SECONDS = 300.0
"""Limit of every wait of a test. It only ends what hangs: no outcome depends on it."""


def until(condition: Callable[[], T]) -> T:
    """Waits until a condition is true, and returns its value."""
    deadline = time.monotonic() + HANG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.01)
    return found
