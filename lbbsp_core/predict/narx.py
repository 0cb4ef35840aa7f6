"""NARX: a small network on past speeds and on past and current driving factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lbbsp_core.types import Floats, Measurement
from lbbsp_core.validate import require_integer, require_positive, require_share

SCALES = (0.3, 0.1, 0.03, 0.01)
"""Weights of the newest speed in the moving averages, which represent long lags."""

LAGS = 2 + len(SCALES)
"""Number of inputs computed from speeds; the inputs from drivers follow them."""

_ONE_THREAD = 1 << 17
"""Multiplications in a product that BLAS does not share between threads (OpenBLAS: 2^18)."""


class NarxState(NamedTuple):
    """State of `Narx`: the training window, the weights and the running inputs.

    Args:
        updates: Number of measurements learned from.
        averages: Moving averages of the speed, one for each of `SCALES`.
        drivers: Drivers of the last measurement, missing values filled in.
        inputs: Raw inputs of the window's iterations, oldest first, ``(iterations, inputs)``.
        speeds: Measured samples per second of the window, ``(iterations + 1,)``: the first one
            has no input.
        weights: All parameters, flat; empty before the first training step.
        center: Offset subtracted from the raw inputs, shape ``(inputs,)``.
        scale: Divisor of the centred inputs, shape ``(inputs,)``.
        unit: Unit of the network's output, in samples per second.
        damping: Damping of the next Levenberg-Marquardt step.
        min_speed: Smallest of `speeds`.
        mean_speed: Mean of `speeds`.
        max_speed: Largest of `speeds`.
        untrained_seconds: Busy seconds since the last training step.
        is_due: Whether the next one is due.
    """

    updates: int
    averages: tuple[float, ...]
    drivers: tuple[float, ...]
    inputs: Floats
    speeds: Floats
    weights: Floats
    center: Floats
    scale: Floats
    unit: float
    damping: float
    min_speed: float
    mean_speed: float
    max_speed: float
    untrained_seconds: float = 0.0
    is_due: bool = False


@dataclass(frozen=True, slots=True)
class Narx:
    r"""Forecasts speed with NARX, LB-BSP's predictor: from past speeds and driving factors.

    Paper: a recurrent network on past speeds and on past and *current* CPU and memory usage. We
    found no orders, sizes, loss or training interval in it. Ours::

        v^_(k+h) = v_k + u (s . z + sum_j a_j (tanh(w_j . z + b_j) - tanh(b_j)))

    with v_k the last measured speed and z the standardised inputs: ``v_(k-1)``, four moving
    averages of v and its mean over the window, each minus v_k (short and long lags in few
    inputs), then the drivers known now and those of one step before; u is the mean absolute
    change of speed in the window. A steady worker with average drivers is thus forecast to keep
    its speed. The forecast is clipped to the range of the window; a speed more than ten times
    outside that range is learned as ten times the bound.

    Training is series-parallel: measured speeds are inputs, so there is nothing to unroll. Every
    `train_interval` updates (in the first hundred: every update), and not again within
    `train_seconds` of busy time, *one* Levenberg-Marquardt step, which the next forecast does not
    wait for, starts from the last weights,
    ``delta = (J'WJ + D + damping I)^-1 (J'W r - D theta)``, with J the analytic Jacobian, r the
    residuals, W the forgetting factors times the Huber weights and D the weight decay; it is
    kept if it lowers the weighted loss. `window`, `hidden` and the number of drivers bound the
    work of an update.

    We predict the *change* of speed and decay towards no change, because then the untrained
    network equals the last value. We use speed rather than log speed because it measures
    slightly better.

    Args:
        horizon: Number of steps ahead that it is trained for, >= 1; all horizons get the same
            forecast.
        use_exogenous: Whether the driving factors (the X of NARX) are inputs.
        hidden: Number of tanh units, >= 0; 0 leaves only the linear path.
        window: Number of iterations trained on, >= 20.
        train_interval: Number of updates between training steps, >= 1.
        train_seconds: Busy seconds between training steps, > 0, of several short steps that are one
            measurement those of one; each takes 1 to 4 ms of a core, and all workers wait for the
            one that trains.
        forgetting_factor: Weight of an iteration relative to the next one, in (0, 1].
        huber: Multiple of the mean absolute residual, > 0, beyond which residuals weigh less.
        decay: Weight decay of the linear path from speeds and from earlier drivers, > 0.
        driver_decay: Weight decay of the linear path from the drivers known now, > 0.
        hidden_decay: Weight decay of the hidden layer, > 0.
        seed: Seed of the initial hidden weights.

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> narx = Narx()
        >>> state = narx.init()
        >>> for k in range(60):                         # the driver determines the next speed
        ...     busy = float(k % 7 < 3)
        ...     state = narx.update(state, Measurement(10 - 5 * busy, 1.0, (busy,)))
        >>> [round(narx.predict(state, (busy,))) for busy in (0.0, 1.0)]
        [10, 5]

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch
        Sizing, arXiv 1806.02508, 2018.
    """

    horizon: int = 1
    use_exogenous: bool = True
    hidden: int = 3
    window: int = 300
    train_interval: int = 2
    train_seconds: float = 0.2
    forgetting_factor: float = 0.998
    huber: float = 2.0
    decay: float = 20.0
    driver_decay: float = 3.0
    hidden_decay: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        import scipy.linalg.lapack  # noqa: F401  slow to import: here rather than in a step

        for name, minimum in (("horizon", 1), ("hidden", 0), ("window", 20), ("train_interval", 1)):
            require_integer(f"Narx.{name}", getattr(self, name), minimum)
        for name in (
            "train_seconds", "forgetting_factor", "huber", "decay", "driver_decay", "hidden_decay",
        ):  # fmt: skip
            require_positive(f"Narx.{name}", getattr(self, name))
        require_share("Narx.forgetting_factor", self.forgetting_factor)

    def init(self) -> NarxState:
        """Returns the state before the first measurement."""
        empty, nan = np.empty(0), math.nan
        return NarxState(0, (), (), empty, empty, empty, empty, empty, 1.0, 1.0, nan, nan, nan)

    def update(self, state: NarxState, measurement: Measurement) -> NarxState:
        """Appends one iteration to the window, after the training step that is due, if any.

        Invalid measurements are ignored.
        """
        speed = measurement.speed()
        if speed is None:
            return state
        state = self.train(state)
        if not state.updates:
            drivers = tuple(x if math.isfinite(x) else 0.0 for x in measurement.drivers)
            return state._replace(
                updates=1,
                averages=(speed,) * len(SCALES),
                drivers=drivers,
                speeds=np.array([speed]),
                min_speed=speed,
                mean_speed=speed,
                max_speed=speed,
            )
        # An outlier widens the range of forecasts step by step, not at once.
        speed = min(max(speed, state.min_speed / 10), state.max_speed * 10)
        drivers = _filled(measurement.drivers, state.drivers)
        row = self._row(state, drivers)[None]
        kept = self.window + self.horizon - 1
        inputs = np.concatenate([state.inputs[-kept + 1 :], row]) if len(state.inputs) else row
        speeds = np.concatenate([state.speeds[-kept:], [speed]])
        averages = tuple(
            old + alpha * (speed - old) for old, alpha in zip(state.averages, SCALES, strict=True)
        )
        state = state._replace(
            updates=state.updates + 1,
            averages=averages,
            drivers=drivers,
            inputs=inputs,
            speeds=speeds,
            min_speed=float(speeds.min()),
            mean_speed=float(speeds.mean()),
            max_speed=float(speeds.max()),
        )
        seconds = state.untrained_seconds + float(measurement.busy_seconds)
        due = state.updates <= 100 or state.updates % self.train_interval == 0
        due = due and seconds >= self.train_seconds and len(inputs) >= self.horizon + 6
        return state._replace(untrained_seconds=seconds, is_due=due)

    def predict(self, state: NarxState, drivers: tuple[float, ...] = (), horizon: int = 1) -> float:
        """Returns the forecast for `Narx.horizon`; NaN before the first measurement.

        Missing or non-finite drivers are replaced by those of the last measurement.
        """
        if not state.updates:
            return math.nan
        if not len(state.weights):
            return state.averages[0]
        row = self._row(state, _filled(drivers, state.drivers))
        z = _standardised(row, state.center, state.scale)[None]
        change = float(self._forward(state.weights, z)[0][0])
        speed = float(state.speeds[-1]) + state.unit * change
        return min(max(speed, state.min_speed), state.max_speed)

    def _row(self, state: NarxState, drivers: tuple[float, ...]) -> Floats:
        """Returns the raw input of the next iteration, shape ``(inputs,)``."""
        last = float(state.speeds[-1])
        previous = float(state.speeds[-2]) if len(state.speeds) > 1 else last
        lags = [previous, state.mean_speed, *state.averages]
        lags = [speed - last for speed in lags]
        return np.array([*lags, *drivers, *state.drivers] if self.use_exogenous else lags)

    def train(self, state: NarxState) -> NarxState:
        """Makes the Levenberg-Marquardt step on the window that is due, if any."""
        if not state.is_due:
            return state
        from scipy.linalg.lapack import dposv

        count = len(state.inputs) - self.horizon + 1
        inputs = state.inputs[:count]
        changes = state.speeds[self.horizon :] - state.speeds[: -self.horizon]
        center, scale, unit = _standard(inputs, changes, state.speeds)
        z = _standardised(inputs, center, scale)
        target = changes / unit
        decay = self._decay(inputs.shape[1])
        weights = state.weights if len(state.weights) else self._initial(inputs.shape[1])
        output, tanh, tanh0 = self._forward(weights, z)
        residual = target - output
        size = np.abs(residual)
        limit = self.huber * max(1.25 * float(size.mean()), 0.1)
        trust = self.forgetting_factor ** np.arange(count - 1, -1, -1.0) * (
            limit / np.maximum(size, limit)
        )
        equations = np.column_stack([self._jacobian(weights, z, tanh, tanh0), residual])
        equations *= np.sqrt(trust)[:, None]
        products = _gram(equations)
        normal, slope = products[:-1, :-1], products[:-1, -1] - decay * weights
        np.fill_diagonal(normal, normal.diagonal() + decay + state.damping)
        new = weights + dposv(normal, slope)[1]
        error = target - self._forward(new, z)[0]
        loss = trust @ residual**2 + decay @ weights**2
        better = bool(trust @ error**2 + decay @ new**2 <= loss)  # also False for NaN
        return state._replace(
            weights=new if better else weights,
            center=center,
            scale=scale,
            unit=unit,
            damping=max(state.damping / 3, 1e-3) if better else min(state.damping * 4, 1e6),
            untrained_seconds=0.0,
            is_due=False,
        )

    def _decay(self, inputs: int) -> Floats:
        """Returns D, the weight decay of each parameter."""
        drivers = (inputs - LAGS) // 2
        linear = [self.decay] * LAGS + [self.driver_decay] * drivers + [self.decay] * drivers
        return np.array(linear + [self.hidden_decay] * (self.hidden * (inputs + 2)))

    def _initial(self, inputs: int) -> Floats:
        """Returns initial weights: random in the hidden layer, zero in the linear paths.

        In a unit, all drivers known now start with the same weight, and so do those of one step
        before: forecasts do not depend on the order of the drivers. Training separates them.
        """
        random, drivers = np.random.default_rng(self.seed), (inputs - LAGS) // 2
        copies = [1] * LAGS + [drivers, drivers] * (drivers > 0)
        size = (self.hidden, len(copies))
        hidden = random.normal(0, 0.5 / math.sqrt(inputs), size).repeat(copies, axis=1)
        bias = random.normal(0, 0.5, self.hidden)
        linear, out = np.zeros(inputs), np.zeros(self.hidden)
        return np.concatenate([linear, hidden.ravel(), bias, out])

    def _forward(self, weights: Floats, z: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns the outputs, ``(iterations,)``, and tanh of the units and of their biases."""
        inputs, units = z.shape[1], self.hidden
        bias, out = weights[inputs * (units + 1) :].reshape(2, units)
        paths = z @ weights[: inputs * (units + 1)].reshape(units + 1, inputs).T
        tanh, tanh0 = np.tanh(paths[:, 1:] + bias), np.tanh(bias)
        return paths[:, 0] + (tanh - tanh0) @ out, tanh, tanh0

    def _jacobian(self, weights: Floats, z: Floats, tanh: Floats, tanh0: Floats) -> Floats:
        """Returns the derivatives of the outputs, shape ``(iterations, len(weights))``."""
        count, inputs = z.shape
        units, size = self.hidden, len(weights)
        slope = (1 - tanh**2) * weights[size - units :]
        jacobian = np.empty((count, size))
        jacobian[:, :inputs] = z
        for unit in range(units):
            first = inputs * (unit + 1)
            np.multiply(z, slope[:, unit, None], out=jacobian[:, first : first + inputs])
        jacobian[:, size - 2 * units : size - units] = (
            slope - (1 - tanh0**2) * weights[size - units :]
        )
        jacobian[:, size - units :] = tanh - tanh0
        return jacobian


def _standard(inputs: Floats, changes: Floats, speeds: Floats) -> tuple[Floats, Floats, float]:
    """Returns centre and scale of the inputs, and the unit of the output."""
    unit = max(1.25 * float(np.abs(changes).mean()), 1e-4 * float(speeds[-1]))
    center, scale = inputs.mean(axis=0), inputs.std(axis=0)
    scale[scale <= 1e-9 * (1 + np.abs(center))] = math.inf  # ignores constants
    scale = np.maximum(scale, 0.1 * np.abs(center))  # does not amplify slow drifts
    center[:LAGS], scale[:LAGS] = 0.0, unit
    return center, scale, unit


def _gram(rows: Floats) -> Floats:
    """Returns ``rows.T @ rows``, of blocks so small that BLAS computes each on this thread alone.

    It would share a larger product with a thread on every core, and those of OpenBLAS then spin for
    0.1 s (OpenMathLib/OpenBLAS#5171): longer than a short step takes, on cores that training needs.
    """
    height = max(1, _ONE_THREAD // rows.shape[1] ** 2)
    products = np.zeros((rows.shape[1],) * 2)
    for first in range(0, len(rows), height):
        block = rows[first : first + height]
        products += block.T @ block
    return products


def _standardised(inputs: Floats, center: Floats, scale: Floats) -> Floats:
    """Returns the inputs in units of their deviation, drivers clipped to two of them.

    An unprecedented value of a driver (memory of a neighbour, a burst of runnable tasks) shows
    that something is unusual, not that its effect grows in proportion.
    """
    bounds = np.full(len(center), 2.0)
    bounds[:LAGS] = 20.0
    z: Floats = np.minimum(np.maximum((inputs - center) / scale, -bounds), bounds)
    return z


def _filled(drivers: tuple[float, ...], latest: tuple[float, ...]) -> tuple[float, ...]:
    """Returns as many drivers as `latest` has, which replaces missing and non-finite ones."""
    if len(drivers) != len(latest):
        drivers = (*drivers, *latest[len(drivers) :])[: len(latest)]
    return tuple(x if math.isfinite(x) else old for x, old in zip(drivers, latest, strict=True))
