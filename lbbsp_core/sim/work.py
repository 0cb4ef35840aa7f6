"""Samples of different work in simulations, cut by their number or by their work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lbbsp_core.order import GlobalOrder
from lbbsp_core.validate import require_integer, require_nonnegative
from lbbsp_core.work import UNITS, Work

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LognormalWork:
    r"""Lognormal work ``exp(sigma z)`` of each sample, with z standard normal.

    Costs count mean samples, whatever sigma is.

    Args:
        sigma: Standard deviation of the logarithm of work, >= 0.
        known: Whether steps are cut by the work, and not by the number of their samples; None
            for runs of both kinds.
        seed: Seed of the work and of the order of the samples, >= 0.

    Raises:
        ValueError: An option is out of range.
    """

    sigma: float = 1.0
    known: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_nonnegative("work.sigma", self.sigma)
        require_integer("work.seed", self.seed, 0)
        if self.known not in (True, False, None):
            raise ValueError(f"work.known must be true or false, got {self.known!r}")


class SimulatedSamples:
    """Samples of the steps of a simulation, and their work.

    Args:
        global_batch_size: X, in samples.
        steps_per_epoch: Steps in an epoch.
        work: Distribution of the work; None: all samples are equal.
    """

    def __init__(
        self, global_batch_size: int, steps_per_epoch: int, work: LognormalWork | None
    ) -> None:
        count, seed = global_batch_size * steps_per_epoch, work.seed if work else 0
        self.order = GlobalOrder(count, global_batch_size, seed=seed, shuffle=work is not None)
        self._work: Work | None = None
        if work is not None:
            normal = np.random.default_rng(seed).standard_normal(count)
            self._work = Work(np.exp(work.sigma * normal), count)
            self.order.work = None if work.known is False else self._work

    def amounts(self, step: int, sizes: npt.NDArray[np.int64]) -> Floats:
        """Returns the work of each worker in a step, in mean samples, by rank."""
        if self._work is None:
            return np.asarray(sizes, np.float64)
        work = self._work.units[self.order.indices(step)]
        ends = np.concatenate([[0], np.cumsum(work)])[np.cumsum([0, *sizes])]
        return np.asarray(np.diff(ends) / UNITS, np.float64)

    def mean_amount(self, step: int) -> float:
        """Returns the mean work of a sample in a step, in mean samples."""
        size = self.order.size(step)
        return float(self.amounts(step, np.array([size]))[0]) / size
