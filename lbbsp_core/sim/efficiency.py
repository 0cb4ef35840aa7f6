"""Efficiency of the plans that follow from forecasts: what an error costs in step time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lbbsp_core.cost import Proportional
from lbbsp_core.cost.online import CostShape
from lbbsp_core.policy import LoadBalanced
from lbbsp_core.sim.cluster import replay_trace
from lbbsp_core.sim.config import SimConfig
from lbbsp_core.sim.engine import run_bsp, run_oracle
from lbbsp_core.sim.traces import Series, Trace
from lbbsp_core.types import Floats, Measurement


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
        >>> import numpy as np
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
    labelled = [
        _labelled(series, [made[rank] for made in forecasts.values()])
        for rank, series in enumerate(trace.series)
    ]
    recorded = replay_trace(replace(trace, series=tuple(labelled)))
    config = SimConfig(
        recorded.global_batch_size, horizon, cost=CostShape(Proportional(), max_overhead=0)
    )
    best = run_oracle(recorded, config).total_seconds
    ahead = recorded.known[horizon - 1 :]
    # no plan is made for steps after the last one
    never = (((math.nan,) * len(forecasts),) * recorded.workers,)
    cluster = replace(recorded, known=ahead + never * (recorded.steps - len(ahead)))
    return {
        name: best / run_bsp(cluster, config, LoadBalanced(), _Known(number)).total_seconds
        for number, name in enumerate(forecasts)
    }


@dataclass(frozen=True)
class _Known:
    """Predictor whose forecast is one of the drivers: it was made by another one before."""

    driver: int

    def init(self) -> None:
        return None

    def update(self, state: None, measurement: Measurement) -> None:
        return None

    def predict(self, state: None, drivers: tuple[float, ...] = (), horizon: int = 1) -> float:
        return drivers[self.driver]


def _labelled(series: Series, forecasts: Sequence[Floats]) -> Series:
    """Returns a series whose drivers are the forecasts of the same step, one of each predictor."""
    measurements = tuple(
        replace(measurement, drivers=tuple(float(made[number]) for made in forecasts))
        for number, measurement in enumerate(series.measurements)
    )
    return replace(series, measurements=measurements)
