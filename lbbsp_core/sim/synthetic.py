"""Synthetic clusters: cost curves of workers, slowed down at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lbbsp_core.cost import Affine, AffineArray, Cost, PiecewiseCost
from lbbsp_core.sim.cluster import SimulatedCluster
from lbbsp_core.sim.events import Change
from lbbsp_core.sim.slowdowns import Constant, Noise, Slowdowns
from lbbsp_core.types import Floats
from lbbsp_core.validate import require_fraction, require_nonnegative, require_positive


@dataclass(frozen=True, eq=False)
class SyntheticCluster(SimulatedCluster):
    r"""Cluster whose workers have a cost curve each, slowed down from iteration to iteration.

    In step k, x samples take worker i ``slowness[k, i] * Gamma_i(x) + delay[k, i]`` seconds.

    Args:
        curves: Undisturbed curves Gamma by rank, of any form, also `lbbsp_core.Profile.load`.
        slowdowns: Slowness and delays, ``(steps, workers)``; see `synthetic_cluster`.

    Example:
        >>> cluster = SyntheticCluster([Affine(0.5, 0.25)], Slowdowns(np.array([[1.0], [2.0]])))
        >>> cluster.cost(0, 0)(2), cluster.cost(0, 1)(2)
        (1.0, 2.0)
    """

    curves: Sequence[Cost]
    slowdowns: Slowdowns

    def __post_init__(self) -> None:
        if len(self.curves) != self.workers:
            raise ValueError(
                f"curves must be one for each of the {self.workers} workers, got {len(self.curves)}"
            )

    @cached_property
    def _lines(self) -> AffineArray | None:
        """Undisturbed curves in arrays if all of them are straight."""
        segments = [curve.segments() for curve in self.curves]
        if any(len(pieces) > 1 for pieces in segments):
            return None
        return AffineArray(*np.array([pieces[0][1:] for pieces in segments], np.float64).T)

    @cached_property
    def _delay_seconds(self) -> Floats:
        return np.broadcast_to(self.slowdowns.delay_seconds, self.slowdowns.slowness.shape)

    @property
    def workers(self) -> int:
        """Number of workers, N."""
        return int(self.slowdowns.slowness.shape[1])

    @property
    def steps(self) -> int:
        """Number of iterations drawn for each worker."""
        return int(self.slowdowns.slowness.shape[0])

    def cost(self, rank: int, step: int) -> PiecewiseCost:
        """Returns the slowed-down curve of worker `rank` in its iteration `step`."""
        slowness = float(self.slowdowns.slowness[step, rank])
        delay = float(self._delay_seconds[step, rank])
        pieces = self.curves[rank].segments()
        return PiecewiseCost(tuple((x, slowness * t + delay, slowness * m) for x, t, m in pieces))

    def costs(self, step: int) -> Sequence[Cost]:
        """Returns the curves of all workers in a step, in arrays if all curves are straight."""
        if (lines := self._lines) is None:
            return super().costs(step)
        slowness = self.slowdowns.slowness[step]
        overhead = slowness * lines.overhead_seconds + self._delay_seconds[step]
        return AffineArray(overhead, slowness * lines.seconds_per_sample)


def synthetic_cluster(
    curves: Sequence[Cost], steps: int, *, noise: Noise | None = None, seed: int = 0
) -> SyntheticCluster:
    """Draws a synthetic cluster; the same seed gives the same cluster.

    Args:
        curves: Undisturbed cost curves by rank.
        steps: Iterations of each worker, >= 1.
        noise: Distribution of slowdowns; None: no slowdowns.
        seed: Seed of all randomness, >= 0.

    Raises:
        ValueError: There are no workers or no steps.

    Example:
        >>> from lbbsp_core.sim.slowdowns import Pareto
        >>> synthetic_cluster(cores([6, 6, 4, 32]), 100, noise=Pareto(2.5), seed=3).workers
        4
    """
    if not curves or steps < 1:
        raise ValueError(f"a cluster needs workers and steps, got {len(curves)} and {steps}")
    slowdowns = (noise or Constant()).draw(np.random.default_rng(seed), steps, len(curves))
    return SyntheticCluster(curves, slowdowns)


OMNILEARN = ("12/12/12/12", "12/12/8/16", "9/9/6/24", "6/6/4/32")
"""Core layouts of OmniLearn (Tyagi and Sharma, TPDS 2025): 48 cores, increasingly unequal."""


def cores(
    counts: Sequence[float],
    samples_per_second: float = 10.0,
    overhead_seconds: float = 0.0,
    serial_share: float = 0.0,
) -> list[Cost]:
    r"""Returns the cost curves of CPU workers with c cores each: speed ``v c`` by default.

    .. math:: v(c) = v / (s + (1 - s) / c)

    with s the serial share of a sample's work (Amdahl's law).

    Args:
        counts: Cores by rank, > 0.
        samples_per_second: Speed v of one core, > 0.
        overhead_seconds: Seconds of every iteration, whatever its batch, >= 0.
        serial_share: Share s of a sample's work that only one core does, in [0, 1).

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> [curve(10) for curve in cores([1, 2])]
        [1.0, 0.5]
    """
    require_positive("samples_per_second", samples_per_second)
    require_nonnegative("overhead_seconds", overhead_seconds)
    require_fraction("serial_share", serial_share)
    slowness = [
        serial_share + (1 - serial_share) / require_positive("cores", count) for count in counts
    ]
    return [Affine(overhead_seconds, slow / samples_per_second) for slow in slowness]


@dataclass(frozen=True, slots=True)
class Preemption:
    """Preemption of spot instances: every worker leaves and returns, repeatedly.

    Times are exponentially distributed.

    Args:
        mean_up_seconds: Mean seconds until a worker leaves, > 0.
        mean_down_seconds: Mean seconds until it returns, > 0; inf: it never returns.
        seed: Seed of all randomness, >= 0.

    Raises:
        ValueError: An option is out of range.
    """

    mean_up_seconds: float
    mean_down_seconds: float
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive("Preemption.mean_up_seconds", self.mean_up_seconds)
        if not self.mean_down_seconds > 0:
            raise ValueError(
                f"Preemption.mean_down_seconds must be > 0, got {self.mean_down_seconds!r}"
            )

    def changes(self, workers: int) -> Iterator[Change]:
        """Yields departures and returns by time, without end if workers return."""
        rng = np.random.default_rng(self.seed)
        next_change = rng.exponential(self.mean_up_seconds, workers)
        up = np.ones(workers, np.bool_)
        while np.isfinite(next_change.min()):
            worker = int(next_change.argmin())
            now, joins = float(next_change[worker]), not up[worker]
            yield Change(now, worker, joins)
            up[worker] = joins
            mean = self.mean_up_seconds if joins else self.mean_down_seconds
            next_change[worker] = now + (rng.exponential(mean) if np.isfinite(mean) else np.inf)
