"""What this process does now, for its heartbeat."""

from __future__ import annotations

import functools

from lbbsp_core.runtime.reliability.activity import CurrentActivity


@functools.cache
def current_activity() -> CurrentActivity:
    """Returns what this process does now."""
    return CurrentActivity()
