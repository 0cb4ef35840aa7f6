"""Efficiency of the plans that follow from forecasts: what an error costs in step time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import Proportional
from lbbsp_core.cost.online import CostShape
from lbbsp_core.policy import LoadBalanced
from lbbsp_core.sim.cluster import ReplayedCluster, replay_trace
from lbbsp_core.sim.config import SimConfig
from lbbsp_core.sim.engine import run_bsp, run_oracle
from lbbsp_core.sim.traces import Trace
from lbbsp_core.types import Measurement

Floats = npt.NDArray[np.float64]


def efficiencies(
    trace: Trace, forecasts: Mapping[str, Sequence[Floats]], horizon: int = 1
) -> dict[str, float]:
    """Replays all workers together, balanced by forecasts that were made before.

    In virtual time, as in ``lbbsp simulate``: every step ends with its slowest worker, and the
    plan of each step is that of `LoadBalanced` for the forecasts of its speeds, with a lag of
    `horizon`. The efficiency is the time of an oracle that knows the speeds of each step, divided
    by the time of these plans. Steps that a worker lacks are left out, and all others count.

    Seconds are proportional to samples in a replay. The overhead of a batch is hence known to be 0,
    and not learned as in ``lbbsp simulate``, whose predictors also learn from fewer steps where
    speeds are outliers: its efficiencies differ by a few thousandths. `forecasts` has an array for
    each series, aligned with its steps: NaN where there is none.

    Example:
        >>> from pathlib import Path
        >>> from lbbsp_core.sim import Series
        >>> steps, speeds = np.arange(5), (np.full(5, 20.0), np.full(5, 10.0))
        >>> measured = [(Measurement(30, 30 / own[0]),) * 5 for own in speeds]
        >>> series = tuple(Series(rank, steps, own) for rank, own in enumerate(measured))
        >>> trace = Trace(Path("steady.csv"), (), series)
        >>> found = efficiencies(trace, {"right": speeds, "swapped": speeds[::-1]})
        >>> found["right"] == 5 * 2 / (3 + 4 * 2)  # equal batches in the first step
        True
        >>> found["swapped"] == 5 * 2 / (3 + 4 * 4)
        True
    """
    recorded = replay_trace(trace)
    config = SimConfig(
        recorded.global_batch_size, horizon, cost=CostShape(Proportional(), max_overhead=0)
    )
    best = run_oracle(recorded, config).total_seconds
    found = {}
    for name, own in forecasts.items():
        cluster = _with_forecasts(recorded, trace, own, horizon)
        found[name] = best / run_bsp(cluster, config, LoadBalanced(), _Known()).total_seconds
    return found


@dataclass(frozen=True)
class _Known:
    """Predictor whose forecast is the only driver: it was made by another one before."""

    def init(self) -> None:
        return None

    def update(self, state: None, measurement: Measurement) -> None:
        return None

    def predict(self, state: None, drivers: tuple[float, ...] = (), horizon: int = 1) -> float:
        return drivers[0]


def _with_forecasts(
    recorded: ReplayedCluster, trace: Trace, forecasts: Sequence[Floats], horizon: int
) -> ReplayedCluster:
    """Returns the cluster of a trace, whose drivers before a step are the forecasts made then."""
    pairs = zip(trace.series, forecasts, strict=True)
    by_step = [dict(zip(own.steps.tolist(), made.tolist(), strict=True)) for own, made in pairs]
    common = sorted(set.intersection(*map(set, by_step)))
    known = [tuple((own[step],) for own in by_step) for step in common[horizon - 1 :]]
    never = ((math.nan,),) * recorded.workers  # of steps after the last one, which have no plan
    return replace(recorded, known=(*known, *[never] * (recorded.steps - len(known))))
