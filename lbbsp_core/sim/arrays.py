"""Balancers of all workers at once in arrays, for large clusters.

N balancers in one process compute everything N times. Here the parts that belong to one worker
(outlier filter, cost shape, predictor, rounding to integers) are elementwise arithmetic on arrays
of shape ``(workers,)``, which gives bit for bit the results of the scalar code. The policy is the
same object as in training, updated once per step. A test compares every plan with those of real
balancers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import AffineArray
from lbbsp_core.cost.online import CostShape
from lbbsp_core.measure import OutlierFilter
from lbbsp_core.policy import BatchConstraints, Observation, Policy, Sizes
from lbbsp_core.predict import Predictor
from lbbsp_core.sim.config import SimConfig
from lbbsp_core.types import Measurement

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

State = TypeVar("State", bound=tuple[Floats, ...])


def fits_arrays(config: SimConfig, policy: Policy, predictor: Predictor) -> bool:
    """Returns whether `ArrayPlanner` supports this combination.

    Samples must be equal, and first uses of batch sizes free. It does if the policy uses no costs.
    Otherwise the predictor must be elementwise (class attribute ``elementwise = True``: its
    arithmetic accepts arrays of shape ``(workers,)``), and the cost must be a single straight line,
    the same for all workers.
    """
    if config.work is not None or config.first_use_seconds:
        return False
    if not policy.uses_costs:
        return True
    one_line = (
        not isinstance(config.cost, Sequence) and len(config.shape(0, 1).prior.segments()) == 1
    )
    return one_line and bool(getattr(predictor, "elementwise", False))


class ArrayPlanner:
    """Plans of all workers, with what belongs to one worker in arrays."""

    def __init__(
        self,
        constraints: BatchConstraints,
        config: SimConfig,
        policy: Policy,
        predictor: Predictor,
    ) -> None:
        self._constraints, self._policy = constraints, policy
        self._steps_per_epoch = config.steps_per_epoch
        shape = config.shape(0, constraints.workers)
        self._estimators = _SpeedEstimators(shape, constraints.workers, predictor)
        self._state = policy.init(constraints)
        self._plans = deque([self._state.sizes] * config.lag)

    def sizes(self, step: int) -> Sizes:
        """Returns the samples of each worker in a step, by rank."""
        plan: Sizes = self._plans[0]
        return plan

    def finish(self, step: int, seconds: Floats) -> None:
        """Learns from the busy seconds of a step, and plans."""
        plan = self._plans.popleft()
        costs, excluded = self._estimators.learn(np.array(plan), seconds, self._policy.uses_costs)
        observation = Observation(
            step,
            plan,
            tuple((np.rint(seconds * 1e9) / 1e9).tolist()),
            tuple(np.flatnonzero(excluded).tolist()),
            (None,) * len(plan) if costs is None else costs,
            (step + 1) % self._steps_per_epoch == 0,
        )
        self._state = self._policy.update(self._state, self._constraints, observation)
        self._plans.append(self._state.sizes)


class _ShapeStates(NamedTuple):
    """State of all workers' cost shapes: `lbbsp_core.CostShapeState` in arrays.

    `work` and `seconds` are NaN where there is no previous step to compare with.
    """

    overhead: Floats
    work: Floats
    seconds: Floats
    weight: Floats
    moment: Floats
    noise: Floats


class _SpeedEstimators:
    """Outlier filter, cost shape and predictor of every worker."""

    def __init__(self, shape: CostShape, workers: int, predictor: Predictor) -> None:
        self._shape = shape
        initial = self._shape.init()
        self._work_of_empty_batch = float(self._shape.prior.effective_samples(0))
        nan, zero, one = np.full(workers, np.nan), np.zeros(workers), np.ones(workers)
        overhead = np.full(workers, initial.overhead)
        self._shapes = _ShapeStates(overhead, nan, nan, one, overhead, zero)
        self._predictor, self._state = predictor, predictor.init()
        self._filter = OutlierFilter()
        self._last_speed, self._outliers = nan, np.zeros(workers, np.int64)

    def learn(
        self, sizes: Ints, seconds: Floats, uses_costs: bool
    ) -> tuple[AffineArray | None, Flags]:
        """Learns from a step; returns the predicted costs and the excluded workers."""
        marginal = self._marginal_work(sizes)
        measured = Measurement(marginal + self._shapes.overhead, seconds)
        accepted = self._accept(measured)
        if not uses_costs:
            return None, ~accepted
        updated = self._predictor.update(self._state, measured)
        self._state = _select(accepted, updated, self._state)
        self._shapes = _learn_shapes(self._shape, self._shapes, marginal, seconds, accepted)
        return self._predicted_costs(), ~accepted

    def _marginal_work(self, sizes: Ints) -> Floats:
        """Returns w(x), which `Proportional` and `Affine` compute elementwise."""
        effective_samples = cast(Callable[[Ints], Floats], self._shape.prior.effective_samples)
        return np.asarray(effective_samples(sizes), np.float64) - self._work_of_empty_batch

    def _accept(self, measured: Measurement) -> Flags:
        """Computes `OutlierFilter.accept` elementwise."""
        speed, factor = measured.samples_per_second, self._filter.factor
        with np.errstate(invalid="ignore"):
            ratio = speed / self._last_speed
            near = (1 / factor <= ratio) & (ratio <= factor)
        new_level = self._outliers + 1 >= self._filter.patience
        accepted: Flags = np.isnan(self._last_speed) | near | new_level
        self._last_speed = np.where(accepted, speed, self._last_speed)
        self._outliers = np.where(accepted, 0, self._outliers + 1)
        return accepted

    def _predicted_costs(self) -> AffineArray:
        """Returns the costs as workers exchange them: whole picoseconds and nanoseconds."""
        speed = np.asarray(self._predictor.predict(self._state), np.float64)
        slope = np.maximum(1.0, np.rint(1e12 / speed))
        return AffineArray(np.rint(self._shapes.overhead / speed * 1e9) / 1e9, slope / 1e12)


def _select(accepted: Flags, new: State, old: State) -> State:
    """Returns `new` for accepted workers, else `old`; the first step accepts all workers."""
    if accepted.all():
        return new
    build: Callable[..., State] = type(new)  # a NamedTuple of arrays
    return build(*(np.where(accepted, a, b) for a, b in zip(new, old, strict=True)))


def _learn_shapes(
    shape: CostShape, old: _ShapeStates, w1: Floats, b1: Floats, accepted: Flags
) -> _ShapeStates:
    """Computes `CostShape.learn` or `CostShape.skip` elementwise, with the names used there."""
    w0, b0 = old.work, old.seconds
    comparable = accepted & ~np.isnan(w0)
    work, seconds = (w0 + w1) / 2, (b0 + b1) / 2
    comparable &= work > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        z, a = (w0 - w1) / work, (b0 - b1) / seconds
        c = (w0 * b1 - w1 * b0) / seconds
    small = np.abs(z) < np.maximum(shape.min_change, 3 * old.noise)
    informative = comparable & ~small & (z * a > 0)
    weight = np.where(informative, old.weight + z * a, old.weight)
    moment = np.where(informative, old.moment + z * c, old.moment)
    bounded = np.minimum(np.maximum(moment / weight, 0.0), shape.max_overhead)
    noise = old.noise + 0.1 * (np.abs(a - z) - old.noise)
    return _ShapeStates(
        np.where(informative, bounded, old.overhead),
        np.where(accepted, w1, np.nan),
        np.where(accepted, b1, np.nan),
        weight,
        moment,
        np.where(comparable & small, noise, old.noise),
    )
