"""Causes of a slow worker, as its driving factors show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

RISE: Final = 10.0
"""Percentage points from which on a factor is a cause, above 1.2 times its usual value."""

HIGH_MEMORY: Final = 90.0
"""Percentage of memory from which on it is a cause, whatever is usual."""

_TEXTS: Final = {
    "throttled_percent": "it is throttled for {:.0f} % of the time",
    "memory_percent": "its memory is at {:.0f} %",
    "steal_percent": "its host takes {:.0f} % of a core from the virtual machine",
    "cgroup_other_percent": "other processes take {:.0f} % of a core from its quota",
    "cpu_other_percent": "other processes take {:.0f} % of a core on its cores",
}


def causes(values: Mapping[str, float], usual: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yields the driving factors that slow a worker down, with a clause about each.

    Args:
        values: Its driving factors while it is slow, by name.
        usual: Those of a worker that is not, or its own from before; 0 where missing.

    Example:
        >>> slow = {"throttled_percent": 48.0, "memory_percent": 95.0, "runnable": 7.0}
        >>> dict(causes(slow, {"memory_percent": 95.0}))["throttled_percent"]
        'it is throttled for 48 % of the time'
    """
    for name, text in _TEXTS.items():
        least = HIGH_MEMORY if name == "memory_percent" else 1.2 * usual.get(name, 0.0) + RISE
        if values.get(name, 0.0) >= least:
            yield name, text.format(values[name])
