"""Balancers of all workers at once in arrays, for large clusters.

N balancers in one process compute everything N times. Here the parts that belong to one worker
(outlier filter, cost shape, predictor, rounding to integers) are elementwise arithmetic on arrays
of shape ``(workers,)``, which gives bit for bit the results of the scalar code. The policy is the
same object as in training, updated once per step. A test compares every plan with those of real
balancers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from lbbsp_core.cost import AffineArray
from lbbsp_core.measure import OutlierFilter
from lbbsp_core.policy import BatchConstraints, Observation, Policy, PolicyState, Sizes
from lbbsp_core.policy.base import first_state, next_state
from lbbsp_core.predict import Predictor
from lbbsp_core.sim.config import SimConfig
from lbbsp_core.types import Flags, Floats, Measurement

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
    if isinstance(config.cost, tuple) or len(config.shape(0, 1).prior.segments()) > 1:
        return False
    return bool(getattr(predictor, "elementwise", False))


class ArrayPlanner:
    """Plans of all workers, with what belongs to one worker in arrays."""

    def __init__(
        self, constraints: BatchConstraints, config: SimConfig, policy: Policy, predictor: Predictor
    ) -> None:
        workers = constraints.workers
        self._constraints, self._policy = constraints, policy
        self._steps_per_epoch = config.steps_per_epoch
        self.policy_state: PolicyState = first_state(policy, constraints)
        self._plans: deque[Sizes] = deque([self.policy_state.sizes] * config.lag)
        self._predictor, self._predicted = predictor, predictor.init()
        self._filter = OutlierFilter()
        self._last_speed, self._outliers = np.full(workers, np.nan), np.zeros(workers, np.int64)
        # `lbbsp_core.CostShapeState` in arrays; NaN where no previous step can be compared
        self._shape = config.shape(0, workers)
        self._overhead = np.full(workers, self._shape.init().overhead)
        self._last_work, self._last_seconds = np.full((2, workers), np.nan)
        self._weight, self._moment = np.ones(workers), self._overhead.copy()
        self._noise = np.zeros(workers)

    def sizes(self, step: int) -> Sizes:
        """Returns the samples of each worker in a step, by rank."""
        return self._plans[0]

    def finish(self, step: int, seconds: Floats) -> None:
        """Learns from the busy seconds of a step, and plans."""
        plan = self._plans.popleft()
        prior, costs = self._shape.prior, None
        # w(x), which `Proportional` and `Affine` compute elementwise
        work = prior.effective_samples(np.array(plan)) - prior.effective_samples(0)  # type: ignore[arg-type]
        measured = Measurement(work + self._overhead, seconds)
        accepted = self._accept(measured)
        if self._policy.uses_costs:
            updated = self._predictor.update(self._predicted, measured)
            self._predicted = _select(accepted, updated, self._predicted)
            self._learn_shapes(np.asarray(work, np.float64), seconds, accepted)
            costs = self._predicted_costs()
        observation = Observation(
            step,
            plan,
            tuple((np.rint(seconds * 1e9) / 1e9).tolist()),
            tuple(np.flatnonzero(~accepted).tolist()),
            (None,) * len(plan) if costs is None else costs,
            (step + 1) % self._steps_per_epoch == 0,
            lag=len(self._plans) + 1,
        )
        self.policy_state = next_state(
            self._policy, self.policy_state, self._constraints, observation
        )
        self._plans.append(self.policy_state.sizes)

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

    def _learn_shapes(self, w1: Floats, b1: Floats, accepted: Flags) -> None:
        """Computes `CostShape.learn` or `CostShape.skip` elementwise, with the names used there."""
        w0, b0 = self._last_work, self._last_seconds
        self._last_work, self._last_seconds = np.where(accepted, (w1, b1), np.nan)
        work, seconds = (w0 + w1) / 2, (b0 + b1) / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            z, a, c = (w0 - w1) / work, (b0 - b1) / seconds, (w0 * b1 - w1 * b0) / seconds
            comparable = accepted & (work > 0)
            small = np.abs(z) < np.maximum(self._shape.min_change, 3 * self._noise)
            informative = comparable & ~small & (z * a > 0)
        self._weight += np.where(informative, z * a, 0.0)
        self._moment += np.where(informative, z * c, 0.0)
        bounded = np.clip(self._moment / self._weight, 0.0, self._shape.max_overhead)
        self._overhead = np.where(informative, bounded, self._overhead)
        jump = np.abs(a - z) - self._noise
        self._noise += np.where(comparable & small, 0.1 * jump, 0.0)

    def _predicted_costs(self) -> AffineArray:
        """Returns the costs as workers exchange them: whole picoseconds and nanoseconds."""
        speed = np.asarray(self._predictor.predict(self._predicted), np.float64)
        slope = np.maximum(1.0, np.rint(1e12 / speed))
        return AffineArray(np.rint(self._overhead / speed * 1e9) / 1e9, slope / 1e12)


def _select(accepted: Flags, new: State, old: State) -> State:
    """Returns `new` for accepted workers, else `old`; the first step accepts all workers."""
    if accepted.all():
        return new
    build: Callable[..., State] = type(new)  # a NamedTuple of arrays
    return build(*(np.where(accepted, a, b) for a, b in zip(new, old, strict=True)))
