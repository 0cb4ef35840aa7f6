"""How the speed of invented workers changes from iteration to iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lbbsp_core.validate import require_nonnegative, require_positive

Array = npt.NDArray[np.float64]


class Slowdowns(NamedTuple):
    """What happens to the workers, shape ``(steps, workers)`` each.

    Args:
        slowness: Factor on the seconds of an iteration; 1 is undisturbed.
        delay_seconds: Added to them, whatever the batch; None: nothing.
    """

    slowness: Array
    delay_seconds: Array | None = None


class Noise(Protocol):
    """A distribution of disturbances: frozen options, all chance from the generator given."""

    def weather(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Draws the disturbances of a whole run."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """None: every iteration takes its worker as long as the one before."""

    def weather(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Ones."""
        return Slowdowns(np.ones((steps, workers)))


@dataclass(frozen=True, slots=True)
class Lognormal:
    r"""Slowness ``exp(sigma z - sigma^2 / 2)``, z standard normal: its mean is 1.

    Args:
        sigma: Of its logarithm, >= 0.
        memory: Correlation of log slowness from one iteration to the next, in [0, 1).

    Raises:
        ValueError: An option out of range.
    """

    sigma: float = 0.3
    memory: float = 0.0

    def __post_init__(self) -> None:
        require_nonnegative("Lognormal.sigma", self.sigma)
        if not 0 <= self.memory < 1:
            raise ValueError(f"Lognormal.memory must be in [0, 1), got {self.memory!r}")

    def weather(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """A stationary autoregression, independent for every worker."""
        z = rng.standard_normal((steps, workers))
        for step in range(1, steps if self.memory else 0):
            z[step] = self.memory * z[step - 1] + (1 - self.memory**2) ** 0.5 * z[step]
        return Slowdowns(np.exp(self.sigma * z - self.sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class Pareto:
    r"""Slowness >= 1 with ``P(slowness > s) = s^-alpha``: rare and very long iterations.

    Args:
        alpha: Tail index, > 1 (else the mean is infinite).

    Raises:
        ValueError: An option out of range.
    """

    alpha: float = 3.0

    def __post_init__(self) -> None:
        require_positive("Pareto.alpha - 1", self.alpha - 1)

    def weather(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Independent draws."""
        return Slowdowns(1.0 + rng.pareto(self.alpha, (steps, workers)))


@dataclass(frozen=True, slots=True)
class Markov:
    """Every worker is fast or slow, and changes at random.

    Args:
        slow: Slowness while slow, > 0; 1 while fast.
        to_slow: Probability, each iteration, that a fast worker becomes slow, in (0, 1].
        to_fast: That a slow one becomes fast, in (0, 1].

    Raises:
        ValueError: An option out of range.
    """

    slow: float = 3.0
    to_slow: float = 0.02
    to_fast: float = 0.1

    def __post_init__(self) -> None:
        require_positive("Markov.slow", self.slow)
        for name in ("to_slow", "to_fast"):
            _probability(f"Markov.{name}", getattr(self, name))

    def weather(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Begins in the stationary distribution."""
        slow = np.empty((steps, workers), np.bool_)
        now = rng.random(workers) < self.to_slow / (self.to_slow + self.to_fast)
        for step in range(steps):
            slow[step] = now
            now = now ^ (rng.random(workers) < np.where(now, self.to_fast, self.to_slow))
        return Slowdowns(np.where(slow, self.slow, 1.0))


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The disturbance of DBS (Ye et al., arXiv 2007.11831).

    Paper: each epoch a healthy worker becomes slow with probability 0.1, for 4 to 20 epochs, by
    5 to 10 s an epoch. Ours: it loses that time in equal parts in all steps of the epoch,
    whatever its batch; both numbers are drawn uniformly.

    Args:
        probability: Of a healthy worker, each epoch, in (0, 1].
        epochs: Least and most epochs that it lasts, whole numbers.
        seconds: Least and most seconds an epoch.
        steps_per_epoch: Iterations that make an epoch, >= 1.

    Raises:
        ValueError: An option out of range.
    """

    probability: float = 0.1
    epochs: tuple[int, int] = (4, 20)
    seconds: tuple[float, float] = (5.0, 10.0)
    steps_per_epoch: int = 50

    def __post_init__(self) -> None:
        _probability("Disturbance.probability", self.probability)
        for name, least in (("epochs", 1), ("seconds", 0)):
            pair = tuple(getattr(self, name))
            if len(pair) != 2 or not least <= pair[0] <= pair[1] < float("inf"):
                raise ValueError(
                    f"Disturbance.{name} must be [least, most] with {least} <= least <= most, got "
                    f"{getattr(self, name)!r}"
                )
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"Disturbance.steps_per_epoch must be >= 1, got {self.steps_per_epoch!r}"
            )

    def weather(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Independent for every worker."""
        epochs = -(-steps // self.steps_per_epoch)
        lost = np.array(list(self._epochs(rng, epochs, workers))) / self.steps_per_epoch
        delay = np.repeat(lost, self.steps_per_epoch, axis=0)[:steps]
        return Slowdowns(np.ones((steps, workers)), delay)

    def _epochs(self, rng: np.random.Generator, epochs: int, workers: int) -> Iterator[Array]:
        """Seconds lost by every worker, epoch by epoch."""
        left, lost = np.zeros(workers, np.int64), np.zeros(workers)
        for _ in range(epochs):
            falls = (left == 0) & (rng.random(workers) < self.probability)
            least, most = self.epochs
            left = np.where(falls, rng.integers(least, most + 1, workers), left)
            lost = np.where(falls, rng.uniform(*self.seconds, workers), lost)
            yield np.where(left > 0, lost, 0.0)
            left = np.maximum(left - 1, 0)


def _probability(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}")
