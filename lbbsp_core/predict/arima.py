"""ARIMA on the log speed: refitted periodically, filtered in every update."""

from __future__ import annotations

import importlib.util
import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lbbsp_core.installation import extra
from lbbsp_core.types import Floats, Measurement
from lbbsp_core.validate import require_integer


class ArimaState(NamedTuple):
    """State of `Arima`: the filter, and the window for the next fit.

    Args:
        updates: Number of measurements learned from.
        logs: Natural logarithms of the last speeds, oldest first, at most `Arima.window`.
        innovations: Last one-step forecast errors, newest first, shape ``(q,)``.
        phi: Autoregressive coefficients, shape ``(p,)``.
        theta: Moving-average coefficients, shape ``(q,)``.
    """

    updates: int
    logs: Floats
    innovations: tuple[float, ...]
    phi: tuple[float, ...]
    theta: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Arima:
    r"""Forecasts the log speed with an ARIMA(p, d, q) model.

    Paper: one of the baselines of LB-BSP. Orders and refit interval are ours.

    With ``y = log v``, ``w = (1 - B)^d y`` (B the lag operator) and innovations e::

        w_k = sum_(i=1..p) phi_i w_(k-i) + e_k + sum_(j=1..q) theta_j e_(k-j)

    Between fits only the innovations are updated, ``e_k = w_k - w^_k``: the Kalman filter in its
    steady state. Before the first fit phi is 0 and theta is -1/2 at lag one, which with d = 1 is
    an EMA of weight 1/2. Forecasts are clipped to the range of the window.

    A fit takes 50-300 ms in statsmodels, so this predictor is meant for comparisons.

    Args:
        order: p >= 0, d in {0, 1} and q >= 0.
        refit_every: Number of updates between fits, >= 1.
        first_fit: Number of updates before the first fit, >= 1.
        window: Number of last updates that a fit uses, > 2 (p + d + q) + 2.

    Raises:
        ValueError: An option is out of range.
        ModuleNotFoundError: From `init`, if statsmodels is not installed.

    Example:
        >>> arima = Arima((0, 1, 1))
        >>> state = arima.update(arima.init(), Measurement(10, 1.0))
        >>> round(arima.predict(state), 6)
        10.0

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch
        Sizing, arXiv 1806.02508, 2018.
    """

    order: tuple[int, int, int] = (2, 1, 1)
    refit_every: int = 50
    first_fit: int = 40
    window: int = 400

    def __post_init__(self) -> None:
        p, d, q = self.order
        if min(self.order) < 0 or d > 1:
            raise ValueError(f"Arima.order must be (p, 0 or 1, q), got {self.order!r}")
        require_integer("Arima.refit_every", self.refit_every, 1)
        require_integer("Arima.first_fit", self.first_fit, 1)
        if self.window <= 2 * (p + d + q) + 2:
            raise ValueError(
                f"Arima.window must be > 2 (p + d + q) + 2 = {2 * (p + d + q) + 2}, got "
                f"{self.window!r}"
            )

    def init(self) -> ArimaState:
        """Returns the state before the first measurement.

        Raises:
            ModuleNotFoundError: statsmodels is not installed.
        """
        if importlib.util.find_spec("statsmodels") is None:
            raise ModuleNotFoundError(
                "Arima fits with statsmodels, which is not installed: pip install " + extra("arima")
            )
        p, _, q = self.order
        phi = (0.0,) * p
        theta = ((-0.5,) + (0.0,) * (q - 1)) if q else ()
        return ArimaState(0, np.empty(0), (0.0,) * q, phi, theta)

    def update(self, state: ArimaState, measurement: Measurement) -> ArimaState:
        """Updates the filter, and refits every `refit_every` updates.

        Invalid measurements are ignored.
        """
        speed = measurement.speed()
        if speed is None:
            return state
        log = math.log(speed)
        error = log - self._forecast(state, 1) if state.updates else 0.0
        innovations = (error, *state.innovations)[: self.order[2]]
        logs = np.append(state.logs, log)[-self.window :]
        state = ArimaState(state.updates + 1, logs, innovations, state.phi, state.theta)
        since = state.updates - self.first_fit
        return self._fit(state) if since >= 0 and since % self.refit_every == 0 else state

    def predict(
        self, state: ArimaState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """Returns the median forecast `horizon` steps ahead; NaN before the first measurement."""
        return math.exp(self._forecast(state, horizon)) if state.updates else math.nan

    def _forecast(self, state: ArimaState, horizon: int) -> float:
        """Returns the log speed forecast by the recursion with future innovations of zero."""
        p, d, _ = self.order
        recent = state.logs[-(p + d) :] if p + d else state.logs[:0]
        mean = 0.0 if d else float(state.logs.mean())
        w = [float(x) for x in (np.diff(recent) if d else recent - mean)][::-1]
        w += [0.0] * (p - len(w))
        level, errors, change = float(state.logs[-1]), list(state.innovations), 0.0
        for _ in range(horizon):
            change = sum(a * x for a, x in zip(state.phi, w, strict=False))
            change += sum(b * e for b, e in zip(state.theta, errors, strict=True))
            level = level + change if d else mean + change
            w, errors = [change, *w][:p], [0.0, *errors][: len(errors)]
        return float(min(max(level, state.logs.min()), state.logs.max()))

    def _fit(self, state: ArimaState) -> ArimaState:
        """Fits by maximum likelihood on the window; keeps the parameters if the fit fails."""
        from statsmodels.tsa.arima.model import ARIMA  # takes seconds to import

        p, _, q = self.order
        spread = float(state.logs.std())
        if spread < 1e-9:
            return state
        values = (state.logs - state.logs.mean()) / spread
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fitted = ARIMA(values, order=self.order, trend="n").fit()
        except (ValueError, np.linalg.LinAlgError):
            return state
        parameters = [float(x) for x in fitted.params[: p + q]]
        if not all(math.isfinite(x) for x in parameters):
            return state
        errors = [float(e) * spread for e in fitted.resid[len(values) - q :][::-1]]
        phi, theta = tuple(parameters[:p]), tuple(parameters[p:])
        return ArimaState(state.updates, state.logs, tuple(errors), phi, theta)
