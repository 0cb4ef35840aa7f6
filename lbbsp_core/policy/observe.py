"""Record first, decide later: even batches, whose drivers and forecasts are recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lbbsp_core.policy.even import Even


@dataclass(frozen=True, slots=True)
class Observe(Even):
    """Even batches as with `Even`, while each worker samples driving factors and forecasts.

    The run record then holds what predictors and policies read, and its speeds are those of even
    batches: ``lbbsp report``, ``lbbsp simulate --from-run`` and ``lbbsp evaluate --from-run`` tell
    what balancing would gain, and whether the forecasts are right.

    Example:
        >>> from lbbsp_core import BatchConstraints, Limits
        >>> policy, constraints = Observe(), BatchConstraints(8, (Limits(), Limits()))
        >>> policy.init(constraints).sizes, policy.uses_costs, Even().uses_costs
        ((4, 4), True, False)
    """

    uses_costs: ClassVar[bool] = True
