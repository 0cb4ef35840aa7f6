"""ARIMA on log speed: fitted now and then, filtered in between."""

from __future__ import annotations

import importlib.util
import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.types import Measurement


class ArimaState(NamedTuple):
    """What the filter needs, and the window for the next fit.

    Args:
        updates: Measurements learned from.
        logs: Natural logs of the last speeds, oldest first.
        innovations: The last one-step errors, newest first, shape ``(q,)``.
        phi: Autoregressive coefficients, shape ``(p,)``.
        theta: Moving-average coefficients, shape ``(q,)``.
    """

    updates: int
    logs: npt.NDArray[np.float64]
    innovations: tuple[float, ...]
    phi: tuple[float, ...]
    theta: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Arima:
    r"""ARIMA(p, d, q), a baseline of arXiv 1806.02508 (orders: ours).

    With ``y = log v``, ``w = (1 - B)^d y`` and innovations e:
    ``w_k = sum_i phi_i w_(k-i) + e_k + sum_j theta_j e_(k-j)``. Between fits only e is updated,
    ``e_k = w_k - w^_k``: the Kalman filter in its steady state. Before the first fit phi and theta
    are those of an EMA, ARIMA(0, 1, 1) with theta = -1/2.

    A fit takes 50-300 ms in statsmodels: use this predictor for comparison.

    Args:
        order: p, d and q; d is 0 or 1.
        refit_every: Updates between fits; the first fit is after `first_fit`.
        first_fit: Updates before the first fit.
        window: Latest updates that a fit sees, > p + d + q.

    Raises:
        ValueError: An order or a window out of range.
        ModuleNotFoundError: From `init`, if statsmodels is missing.

    Example:
        >>> arima = Arima((0, 1, 1))
        >>> state = arima.update(arima.init(), Measurement(10, 1.0))
        >>> round(arima.predict(state), 6)
        10.0
    """

    order: tuple[int, int, int] = (2, 1, 1)
    refit_every: int = 50
    first_fit: int = 40
    window: int = 400

    def __post_init__(self) -> None:
        p, d, q = self.order
        if min(self.order) < 0 or d > 1:
            raise ValueError(f"Arima.order must be (p, 0 or 1, q), got {self.order!r}")
        if self.refit_every < 1 or self.first_fit < 1:
            raise ValueError(
                f"Arima.refit_every and first_fit must be >= 1, got {self.refit_every!r} and "
                f"{self.first_fit!r}"
            )
        if self.window <= 2 * (p + d + q) + 2:
            raise ValueError(f"Arima.window must be > 2 (p + d + q) + 2, got {self.window!r}")

    def init(self) -> ArimaState:
        """Nothing measured.

        Raises:
            ModuleNotFoundError: statsmodels is missing.
        """
        if importlib.util.find_spec("statsmodels") is None:
            raise ModuleNotFoundError(
                "Arima fits with statsmodels, which is not installed: pip install 'lbbsp[arima]'"
            )
        p, _, q = self.order
        phi = (0.0,) * p
        theta = ((-0.5,) + (0.0,) * (q - 1)) if q else ()
        return ArimaState(0, np.empty(0), (0.0,) * q, phi, theta)

    def update(self, state: ArimaState, measurement: Measurement) -> ArimaState:
        """Filters; fits once in `refit_every` updates. What is not usable changes nothing."""
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
        """The median `horizon` steps ahead."""
        return math.exp(self._forecast(state, horizon)) if state.updates else math.nan

    def _forecast(self, state: ArimaState, horizon: int) -> float:
        """Runs the recursion with future innovations at zero; returns a log speed."""
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
        seen = state.logs
        return float(min(max(level, seen.min()), seen.max()))

    def _fit(self, state: ArimaState) -> ArimaState:
        """Maximum likelihood on the window; keeps the old parameters where there is none."""
        from statsmodels.tsa.arima.model import ARIMA

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
