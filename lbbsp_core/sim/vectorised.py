"""The loop of `lbbsp_core.Balancer` for all workers at once, in arrays: for large clusters.

N balancers in one process do everything N times. Here the parts that belong to one worker
(gate, shape, predictor, rounding to integers) are elementwise arithmetic on arrays of shape
``(workers,)``, which gives the very bits of the scalar code; the policy is asked once a step, and
is the same object. A test compares every plan with those of real balancers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import AffineArray
from lbbsp_core.cost.online import CostShape
from lbbsp_core.measure import OutlierFilter
from lbbsp_core.policy import Observation, Policy
from lbbsp_core.predict import Ema, LastValue, Predictor
from lbbsp_core.sim.cluster import SimulatedCluster
from lbbsp_core.sim.engine import SimConfig, Timeline, facts
from lbbsp_core.types import Measurement

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

ELEMENTWISE = (LastValue, Ema)
"""Predictors whose arithmetic takes arrays of shape ``(workers,)``."""


def fits_vectorised(setting: SimConfig, policy: Policy, predictor: Predictor | None) -> bool:
    """Whether `run_vectorised` can run this: no predictor, or a simple one and a straight cost."""
    if not policy.uses_costs:
        return True
    straight = (
        not isinstance(setting.cost, Sequence) and len(setting.shape(0, 1).prior.segments()) == 1
    )
    return straight and isinstance(predictor or LastValue(), ELEMENTWISE)


def run_vectorised(
    cluster: SimulatedCluster,
    setting: SimConfig,
    policy: Policy,
    predictor: Predictor | None = None,
    progress: Callable[[int], None] | None = None,
) -> Timeline:
    """What `lbbsp_core.sim.run_bsp` returns, sooner.

    Args:
        cluster: As there.
        setting: As there.
        policy: As there.
        predictor: One of `ELEMENTWISE`, if `policy` uses one.
        progress: As there.

    Raises:
        ValueError: Not to be run this way, see `fits_vectorised`, or as in `run_bsp`.
    """
    if not fits_vectorised(setting, policy, predictor):
        raise ValueError(
            f"{predictor!r} and the shape of {setting.cost!r} cannot be run in arrays: use "
            "LastValue or Ema and a straight cost, or run_bsp"
        )
    known = facts(cluster, setting)
    speeds = _Speeds(setting, cluster.workers, predictor or LastValue())
    state = policy.init(known)
    plans = deque([np.array(state.sizes)] * setting.lag)
    sizes = np.zeros((cluster.steps, cluster.workers), np.int64)
    busy = np.zeros(sizes.shape)
    for step in range(cluster.steps):
        sizes[step] = plan = plans.popleft()
        busy[step] = seconds = cluster.seconds(step, plan)
        costs, excluded = speeds.learn(plan, seconds, policy.uses_costs)
        state = policy.update(
            state, known, _observation(setting, step, plan, seconds, excluded, costs)
        )
        plans.append(np.array(state.sizes))
        if progress is not None:
            progress(1)
    return Timeline(sizes, busy, setting.communication_seconds)


def _observation(
    setting: SimConfig,
    step: int,
    plan: npt.NDArray[np.int64],
    seconds: Floats,
    excluded: Flags,
    costs: AffineArray | None,
) -> Observation:
    return Observation(
        step,
        tuple(plan.tolist()),
        tuple((np.rint(seconds * 1e9) / 1e9).tolist()),
        tuple(np.flatnonzero(excluded).tolist()),
        (None,) * len(plan) if costs is None else costs,
        (step + 1) % setting.steps_per_epoch == 0,
    )


class _Known(NamedTuple):
    """What has been learned of the workers' shapes: `lbbsp_core.CostShapeState` in arrays.

    Where nothing can be compared with, `work` and `seconds` are NaN.
    """

    overhead: Floats
    work: Floats
    seconds: Floats
    weight: Floats
    moment: Floats
    noise: Floats


class _Speeds:
    """Gate, shape and predictor of every worker."""

    def __init__(self, setting: SimConfig, workers: int, predictor: Predictor) -> None:
        self._shape = setting.shape(0, workers)
        first = self._shape.init()
        self._least = float(self._shape.prior.effective_samples(0))
        none, zero = np.full(workers, np.nan), np.zeros(workers)
        overhead, one = np.full(workers, first.overhead), np.ones(workers)
        self._known = _Known(overhead, none, none, one, overhead, zero)
        self._predictor, self._state = predictor, predictor.init()
        self._gate = OutlierFilter()
        self._last, self._outliers = none, np.zeros(workers, np.int64)

    def learn(
        self, sizes: npt.NDArray[np.int64], seconds: Floats, uses_costs: bool
    ) -> tuple[AffineArray | None, Flags]:
        """Predicted curves after a step, and who was held."""
        marginal = self._marginal(sizes)
        measured = Measurement(marginal + self._known.overhead, seconds)
        accepted = self._admit(measured)
        if not uses_costs:
            return None, ~accepted
        self._state = _merged(accepted, self._predictor.update(self._state, measured), self._state)
        self._known = _learned(self._shape, self._known, marginal, seconds, accepted)
        return self._lines(), ~accepted

    def _marginal(self, sizes: npt.NDArray[np.int64]) -> Floats:
        """w(x): `Proportional` and `Affine` count it elementwise."""
        work: Any = self._shape.prior.effective_samples
        marginal: Floats = np.asarray(work(sizes), np.float64) - self._least
        return marginal

    def _admit(self, measured: Measurement) -> Flags:
        """`OutlierFilter.accept`, elementwise."""
        speed, gate = measured.samples_per_second, self._gate
        with np.errstate(invalid="ignore"):
            ratio = speed / self._last
            near = (1 / gate.factor <= ratio) & (ratio <= gate.factor)
        new_level = self._outliers + 1 >= gate.patience
        accepted: Flags = np.isnan(self._last) | near | new_level
        self._last = np.where(accepted, speed, self._last)
        self._outliers = np.where(accepted, 0, self._outliers + 1)
        return accepted

    def _lines(self) -> AffineArray:
        """The curves as they are exchanged: whole picoseconds and nanoseconds."""
        speed = np.asarray(self._predictor.predict(self._state), np.float64)
        slope = np.maximum(1.0, np.rint(1e12 / speed))
        return AffineArray(np.rint(self._known.overhead / speed * 1e9) / 1e9, slope / 1e12)


def _merged(accepted: Flags, new: Any, old: Any) -> Any:
    """The state `new` where a worker was admitted, else `old`; the first step admits all."""
    if accepted.all():
        return new
    return type(new)(*(np.where(accepted, a, b) for a, b in zip(new, old, strict=True)))


def _learned(shape: CostShape, old: _Known, w1: Floats, b1: Floats, accepted: Flags) -> _Known:
    """`CostShape.learn` or `skip`, elementwise."""
    w0, b0 = old.work, old.seconds
    known = accepted & ~np.isnan(w0)
    work, seconds = (w0 + w1) / 2, (b0 + b1) / 2
    known &= work > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        z, a = (w0 - w1) / work, (b0 - b1) / seconds
        c = (w0 * b1 - w1 * b0) / seconds
    small = np.abs(z) < np.maximum(shape.min_change, 3 * old.noise)
    tells = known & ~small & (z * a > 0)
    weight = np.where(tells, old.weight + z * a, old.weight)
    moment = np.where(tells, old.moment + z * c, old.moment)
    bounded = np.minimum(np.maximum(moment / weight, 0.0), shape.max_overhead)
    noise = old.noise + 0.1 * (np.abs(a - z) - old.noise)
    return _Known(
        np.where(tells, bounded, old.overhead),
        np.where(accepted, w1, np.nan),
        np.where(accepted, b1, np.nan),
        weight,
        moment,
        np.where(known & small, noise, old.noise),
    )
