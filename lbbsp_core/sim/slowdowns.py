"""Random slowdowns of synthetic workers from iteration to iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lbbsp_core.types import Floats
from lbbsp_core.validate import (
    require_fraction,
    require_nonnegative,
    require_positive,
    require_share,
    require_whole,
)


class Slowdowns(NamedTuple):
    """Slowdowns of all workers in a run.

    Args:
        slowness: Factor on the seconds of an iteration, shape ``(steps, workers)``; 1 is
            undisturbed.
        delay_seconds: Seconds added to an iteration, whatever its batch, of the same shape, or
            the same for all.
    """

    slowness: Floats
    delay_seconds: Floats | float = 0.0


class Noise(Protocol):
    """Distribution of slowdowns: frozen options; all randomness comes from the given generator."""

    def draw(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Draws the slowdowns of a whole run."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Constant speeds: equal batches take a worker equally long in every iteration."""

    def draw(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Returns slowness 1 throughout."""
        return Slowdowns(np.ones((steps, workers)))


@dataclass(frozen=True, slots=True)
class Lognormal:
    r"""Lognormal slowness ``exp(sigma z - sigma^2 / 2)`` of mean 1, with z standard normal.

    Args:
        sigma: Standard deviation of the logarithm of slowness, >= 0.
        memory: Correlation of log slowness from one iteration to the next, in [0, 1).

    Raises:
        ValueError: An option is out of range.
    """

    sigma: float = 0.3
    memory: float = 0.0

    def __post_init__(self) -> None:
        require_nonnegative("Lognormal.sigma", self.sigma)
        require_fraction("Lognormal.memory", self.memory)

    def draw(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Draws a stationary autoregression, independently for every worker."""
        z = rng.standard_normal((steps, workers))
        for step in range(1, steps if self.memory else 0):
            z[step] = self.memory * z[step - 1] + (1 - self.memory**2) ** 0.5 * z[step]
        return Slowdowns(np.exp(self.sigma * z - self.sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class Pareto:
    r"""Pareto slowness, ``P(slowness > s) = s^-alpha`` for s >= 1: rare, very long iterations.

    Args:
        alpha: Tail index, > 1 (else the mean is infinite).

    Raises:
        ValueError: An option is out of range.
    """

    alpha: float = 3.0

    def __post_init__(self) -> None:
        require_positive("Pareto.alpha - 1", self.alpha - 1)

    def draw(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Draws every iteration of every worker independently."""
        return Slowdowns(1.0 + rng.pareto(self.alpha, (steps, workers)))


@dataclass(frozen=True, slots=True)
class Markov:
    """Two-state Markov chain per worker: it is fast or slow, and changes at random.

    Args:
        slow: Slowness in the slow state, > 0; it is 1 in the fast state.
        to_slow: Probability per iteration that a fast worker becomes slow, in (0, 1].
        to_fast: Probability per iteration that a slow worker becomes fast, in (0, 1].

    Raises:
        ValueError: An option is out of range.
    """

    slow: float = 3.0
    to_slow: float = 0.02
    to_fast: float = 0.1

    def __post_init__(self) -> None:
        require_positive("Markov.slow", self.slow)
        for name in ("to_slow", "to_fast"):
            require_share(f"Markov.{name}", getattr(self, name))

    def draw(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Draws the chains, which start in their stationary distribution."""
        slow = np.empty((steps, workers), np.bool_)
        is_slow = rng.random(workers) < self.to_slow / (self.to_slow + self.to_fast)
        for step in range(steps):
            slow[step] = is_slow
            changes = rng.random(workers) < np.where(is_slow, self.to_fast, self.to_slow)
            is_slow = is_slow ^ changes
        return Slowdowns(np.where(slow, self.slow, 1.0))


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Disturbance of the DBS paper (Ye et al., arXiv 2007.11831).

    Paper: in each epoch a healthy worker becomes slow with probability 0.1, for 4 to 20 epochs,
    by 5 to 10 s per epoch. Ours: the worker loses this time in equal parts in all steps of the
    epoch, whatever its batch; both numbers are drawn uniformly.

    Args:
        probability: Probability per epoch that a healthy worker becomes slow, in (0, 1].
        epochs: Minimum and maximum duration in epochs, integers >= 1.
        seconds: Minimum and maximum seconds lost per epoch, >= 0.
        steps_per_epoch: Iterations per epoch, >= 1.

    Raises:
        ValueError: An option is out of range.
    """

    probability: float = 0.1
    epochs: tuple[int, int] = (4, 20)
    seconds: tuple[float, float] = (5.0, 10.0)
    steps_per_epoch: int = 50

    def __post_init__(self) -> None:
        require_share("Disturbance.probability", self.probability)
        for name, bound in (("epochs", 1), ("seconds", 0)):
            pair = tuple(getattr(self, name))
            if len(pair) != 2 or not bound <= pair[0] <= pair[1] < float("inf"):
                raise ValueError(
                    f"Disturbance.{name} must be [minimum, maximum] with {bound} <= minimum <= "
                    f"maximum, got {getattr(self, name)!r}"
                )
        require_whole("Disturbance.steps_per_epoch", self.steps_per_epoch, 1)

    def draw(self, rng: np.random.Generator, steps: int, workers: int) -> Slowdowns:
        """Draws the disturbances, independently for every worker."""
        epochs = -(-steps // self.steps_per_epoch)
        lost = np.array(list(self.lost_seconds(rng, epochs, workers))) / self.steps_per_epoch
        delay = np.repeat(lost, self.steps_per_epoch, axis=0)[:steps]
        return Slowdowns(np.ones((steps, workers)), delay)

    def lost_seconds(self, rng: np.random.Generator, epochs: int, workers: int) -> Iterator[Floats]:
        """Yields the seconds that every worker loses, epoch by epoch."""
        remaining, lost = np.zeros(workers, np.int64), np.zeros(workers)
        min_epochs, max_epochs = self.epochs
        for _ in range(epochs):
            starts = (remaining == 0) & (rng.random(workers) < self.probability)
            remaining = np.where(
                starts, rng.integers(min_epochs, max_epochs + 1, workers), remaining
            )
            lost = np.where(starts, rng.uniform(*self.seconds, workers), lost)
            yield np.where(remaining > 0, lost, 0.0)
            remaining = np.maximum(remaining - 1, 0)
