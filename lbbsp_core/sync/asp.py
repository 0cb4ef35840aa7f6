"""ASP: no worker waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lbbsp_core.sync.ssp import SSP


@dataclass(frozen=True, slots=True)
class ASP(SSP):
    """Asynchronous parallel: each push enters the model on arrival, and its worker proceeds.

    The same as ``SSP(inf)``.

    Example:
        >>> asp = ASP()
        >>> asp.push(asp.init(2), 0, now=1.0)[1]
        SyncDecision(aggregate=(0,), release=(0,))
    """

    staleness: float = field(default=math.inf, init=False, repr=False)
