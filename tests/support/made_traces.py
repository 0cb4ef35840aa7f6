"""Traces with given speeds, and drivers that tell worker and step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lbbsp_core import Measurement
from lbbsp_core.sim import Series, Trace


def trace_of(*speeds: Sequence[float], samples: int | None = 6, name: str = "made.csv") -> Trace:
    """Returns a trace with speeds[i] of worker i, whose driver is 100 i + step.

    Steps have these samples, or with None those of one second.
    """
    series = []
    for rank, own in enumerate(speeds):
        facts = [(samples or v, (samples or v) / v, (100.0 * rank + k,)) for k, v in enumerate(own)]
        measured = tuple(Measurement(*each) for each in facts)
        series.append(Series(rank, np.arange(len(own)), measured))
    return Trace(Path(name), ("index",), tuple(series))
