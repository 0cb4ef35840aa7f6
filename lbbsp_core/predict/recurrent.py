"""Recurrent networks on the speed alone, in NumPy, trained online."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lbbsp_core.types import Floats, Measurement
from lbbsp_core.validate import require_integer, require_positive


class RecurrentState(NamedTuple):
    """State of `Recurrent`: the training window, the weights, Adam's moments, the forecast.

    Args:
        updates: Number of measurements learned from; also seeds the draws of the next update.
        logs: Natural logarithms of the last speeds, oldest first, at most `Recurrent.window`.
        weights: All parameters, flat; empty before the first training step.
        mean: Adam's first moment, of the shape of `weights`.
        square: Adam's second moment, of the shape of `weights`.
        log_speed: Natural logarithm of the forecast; NaN before the first measurement.
    """

    updates: int
    logs: Floats
    weights: Floats
    mean: Floats
    square: Floats
    log_speed: float


@dataclass(frozen=True, slots=True)
class Recurrent:
    r"""Forecasts log speed with a simple recurrent network or an LSTM over past speeds.

    Paper: two of the baselines of LB-BSP; it states no sizes. Ours: the input is
    ``x_k = (y_k - m, y_k - y_(k-1)) / s`` with y the log speed, m its mean over the window and s
    the deviation of its changes; one layer, ``h_k = tanh(W x_k + U h_(k-1) + b)`` or an LSTM
    cell; the output is the *change* of log speed over the next `horizon` steps::

        y^_(k+horizon) = y_k + s (a . h_k + c . x_k + d)

    clipped to the range of the window. Each update makes `steps` Adam steps on `batch`
    subsequences of `sequence_length` inputs, one of them the latest (back-propagation through
    time truncated at `sequence_length`), under a Huber loss.

    Args:
        kind: "rnn" or "lstm".
        horizon: Number of steps ahead that it is trained for, >= 1; all horizons get the same
            forecast.
        hidden: Number of units, >= 1.
        sequence_length: Number of inputs in a subsequence, >= 2.
        batch: Number of subsequences in a training step, >= 1.
        steps: Number of training steps in an update, >= 1.
        learning_rate: Step size of Adam, finite and > 0.
        decay: Weight decay of a step, relative to `learning_rate`.
        window: Number of last speeds trained on, > sequence_length + horizon.
        seed: Seed of the initial weights and of the draws.

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> rnn = Recurrent("rnn", sequence_length=4)
        >>> state = rnn.init()
        >>> for _ in range(20):
        ...     state = rnn.update(state, Measurement(10, 1.0))
        >>> round(rnn.predict(state), 3)
        10.0

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch
        Sizing, arXiv 1806.02508, 2018.
    """

    kind: str = "lstm"
    horizon: int = 1
    hidden: int = 8
    sequence_length: int = 16
    batch: int = 16
    steps: int = 1
    learning_rate: float = 0.003
    decay: float = 1.0
    window: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("rnn", "lstm"):
            raise ValueError(f"Recurrent.kind must be 'rnn' or 'lstm', got {self.kind!r}")
        for name in ("horizon", "hidden", "batch", "steps"):
            require_integer(f"Recurrent.{name}", getattr(self, name), 1)
        require_integer("Recurrent.sequence_length", self.sequence_length, 2)
        require_positive("Recurrent.learning_rate", self.learning_rate)
        if self.window <= self.sequence_length + self.horizon:
            raise ValueError(
                "Recurrent.window must be > sequence_length + horizon = "
                f"{self.sequence_length + self.horizon}, got {self.window!r}"
            )

    def init(self) -> RecurrentState:
        """Returns the state before the first measurement."""
        empty = np.empty(0)
        return RecurrentState(0, empty, empty, empty, empty, math.nan)

    def update(self, state: RecurrentState, measurement: Measurement) -> RecurrentState:
        """Trains `steps` steps and stores the next forecast; ignores invalid measurements."""
        speed = measurement.speed()
        if speed is None:
            return state
        logs = np.append(state.logs, math.log(speed))[-self.window :]
        if len(logs) <= self.sequence_length + self.horizon + 1:
            return state._replace(
                updates=state.updates + 1, logs=logs, log_speed=float(logs[-3:].mean())
            )
        changes = np.diff(logs)
        unit = max(float(np.sqrt(np.mean(np.minimum(changes**2, 9 * np.median(changes**2))))), 1e-6)
        inputs = np.stack([logs[1:] - logs.mean(), changes], axis=1) / unit
        targets = logs[1 + self.horizon :] - logs[1 : -self.horizon]
        random = np.random.default_rng((self.seed, state.updates))
        weights, mean, square = state.weights, state.mean, state.square
        if not len(weights):
            weights = self._initial(random)
            mean, square = np.zeros_like(weights), np.zeros_like(weights)
        for step in range(self.steps):
            first = random.integers(0, len(targets) - self.sequence_length + 1, self.batch)
            first[0] = len(targets) - self.sequence_length
            index = first[:, None] + np.arange(self.sequence_length)
            gradient = self._gradient(weights, inputs[index], targets[index] / unit)
            count = state.updates * self.steps + step + 1
            mean = mean + 0.1 * (gradient - mean)
            square = square + 0.01 * (gradient**2 - square)
            size = mean / (1 - 0.9**count) / (np.sqrt(square / (1 - 0.99**count)) + 1e-8)
            weights = weights - self.learning_rate * (size + self.decay * weights)
        output = self._forward(weights, inputs[None, -self.sequence_length :])[0][0, -1]
        log = float(np.clip(logs[-1] + unit * output, logs.min(), logs.max()))
        return RecurrentState(state.updates + 1, logs, weights, mean, square, log)

    def predict(
        self, state: RecurrentState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """Returns the forecast for `Recurrent.horizon`; NaN before the first measurement."""
        return math.exp(state.log_speed)

    @property
    def _gates(self) -> int:
        """Number of weight columns per unit: 4 for an LSTM (3 gates and the candidate), else 1."""
        return 4 if self.kind == "lstm" else 1

    def _split(self, weights: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Splits the flat vector into W, U, b, ``(2 + hidden + 1, gates * hidden)``, a, c, d."""
        rows, columns = 3 + self.hidden, self._gates * self.hidden
        cell = weights[: rows * columns].reshape(rows, columns)
        output = weights[rows * columns :]
        return cell, output[: self.hidden], output[self.hidden : -1], output[-1:]

    def _initial(self, random: np.random.Generator) -> Floats:
        """Returns initial weights: a random cell, and zero output."""
        rows, columns = 3 + self.hidden, self._gates * self.hidden
        cell = random.normal(0, 0.5 / math.sqrt(rows), (rows, columns))
        cell[-1] = 0
        if self.kind == "lstm":
            cell[-1, self.hidden : 2 * self.hidden] = 1  # forget gates start open
        return np.concatenate([cell.ravel(), np.zeros(self.hidden + 3)])

    def _forward(self, weights: Floats, x: Floats) -> tuple[Floats, list[Floats], list[Floats]]:
        """Returns the outputs, ``(batch, sequence_length)``, the hidden states and the tape.

        The tape holds for step k of an LSTM the three gates, the candidate, the memory before
        the step and the squashed memory, each of `hidden` columns.
        """
        cell, a, c, d = self._split(weights)
        from_input = x @ cell[:2] + cell[-1]
        units = self.hidden
        h = memory = np.zeros((len(x), units))
        hidden, tape = [h], []
        for k in range(x.shape[1]):
            raw = from_input[:, k] + h @ cell[2:-1]
            if self.kind == "rnn":
                h = np.tanh(raw)
            else:
                raw[:, : 3 * units] *= 0.5
                gates = np.tanh(raw)
                gates[:, : 3 * units] = 0.5 + 0.5 * gates[:, : 3 * units]
                before = memory
                memory = gates[:, units : 2 * units] * before
                memory += gates[:, :units] * gates[:, 3 * units :]
                squashed = np.tanh(memory)
                h = gates[:, 2 * units : 3 * units] * squashed
                tape.append(np.concatenate([gates, before, squashed], axis=1))
            hidden.append(h)
        outputs = np.stack(hidden[1:], axis=1) @ a + x @ c + d
        return outputs, hidden, tape

    def _gradient(self, weights: Floats, x: Floats, targets: Floats) -> Floats:
        """Returns the gradient of the mean Huber loss (threshold 2), flat.

        The loss covers the second half of each subsequence.
        """
        units = self.hidden
        outputs, hidden, tape = self._forward(weights, x)
        cell, a, _, _ = self._split(weights)
        error = np.clip(outputs - targets, -2, 2)
        error[:, : self.sequence_length // 2] = 0  # the hidden state warms up
        error /= error.size / 2
        recurrent = cell[2:-1].T
        d_raw = np.empty((*x.shape[:2], cell.shape[1]))
        d_hidden = error[:, :, None] * a
        d_h = d_memory = np.zeros((len(x), self.hidden))
        for k in range(self.sequence_length - 1, -1, -1):
            d_h = d_h + d_hidden[:, k]
            if self.kind == "rnn":
                d_raw[:, k] = d_h * (1 - hidden[k + 1] ** 2)
            else:
                i, f, o, candidate, before, squashed = (
                    tape[k][:, u * units : (u + 1) * units] for u in range(6)
                )
                d_memory = d_memory + d_h * o * (1 - squashed**2)
                d_raw[:, k] = np.concatenate(
                    [
                        d_memory * candidate * i * (1 - i),
                        d_memory * before * f * (1 - f),
                        d_h * squashed * o * (1 - o),
                        d_memory * i * (1 - candidate**2),
                    ],
                    axis=1,
                )
                d_memory = d_memory * f
            d_h = d_raw[:, k] @ recurrent
        states = np.stack(hidden, axis=1)
        before_each = np.concatenate([x, states[:, :-1], np.ones((*x.shape[:2], 1))], axis=2)
        d_cell = np.tensordot(before_each, d_raw, axes=((0, 1), (0, 1)))
        d_a = np.tensordot(states[:, 1:], error, axes=((0, 1), (0, 1)))
        d_c = np.tensordot(x, error, axes=((0, 1), (0, 1)))
        return np.concatenate([d_cell.ravel(), d_a, d_c, [error.sum()]])
