"""Invented clusters: curves of workers, and what disturbs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import Affine, AffineArray, Cost, PiecewiseCost, Segment
from lbbsp_core.sim.events import Change
from lbbsp_core.sim.slowdowns import Constant, Noise, Slowdowns
from lbbsp_core.validate import require_nonnegative, require_positive

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SyntheticCluster:
    r"""Workers with a curve each, disturbed: ``slowness[k, i] * Gamma_i(x) + delay[k, i]`` seconds.

    Args:
        curves: Gamma by rank, undisturbed: any form, `lbbsp_core.Profile.load` of a GPU included.
        weather: Slowness and delays, ``(steps, workers)``; see `synthetic_cluster`.

    Example:
        >>> cluster = SyntheticCluster([Affine(0.5, 0.25)], Slowdowns(np.array([[1.0], [2.0]])))
        >>> cluster.cost(0, 0)(2), cluster.cost(0, 1)(2)
        (1.0, 2.0)
    """

    curves: Sequence[Cost]
    weather: Slowdowns
    _table: tuple[Array, Array, Array] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.curves) != self.workers:
            raise ValueError(
                f"curves must be one for each of the {self.workers} workers, got {len(self.curves)}"
            )
        segments = [curve.segments() for curve in self.curves]
        most = max(map(len, segments))
        padded = [own + ((np.inf, 0.0, 0.0),) * (most - len(own)) for own in segments]
        start, seconds, slope = np.moveaxis(np.array(padded, dtype=np.float64), 2, 0)
        object.__setattr__(self, "_table", (start, seconds, slope))

    @property
    def workers(self) -> int:
        """N."""
        return int(self.weather.slowness.shape[1])

    @property
    def steps(self) -> int:
        """Iterations that were drawn."""
        return int(self.weather.slowness.shape[0])

    def cost(self, rank: int, step: int) -> Cost:
        """The disturbed curve."""
        slow, late = float(self.weather.slowness[step, rank]), 0.0
        if self.weather.delay_seconds is not None:
            late = float(self.weather.delay_seconds[step, rank])
        pieces: tuple[Segment, ...] = tuple(
            (start, slow * seconds + late, slow * slope)
            for start, seconds, slope in self.curves[rank].segments()
        )
        return (
            Affine(*pieces[0][1:]) if len(pieces) == 1 and pieces[0][2] else PiecewiseCost(pieces)
        )

    def costs(self, step: int) -> Sequence[Cost]:
        """As arrays, where all curves are straight."""
        start, seconds, slope = self._table
        if start.shape[1] > 1:
            return [self.cost(rank, step) for rank in range(self.workers)]
        slow = self.weather.slowness[step]
        return AffineArray(slow * seconds[:, 0] + self._delay(step), slow * slope[:, 0])

    def seconds(self, step: int, sizes: npt.NDArray[np.int64]) -> Array:
        """Elementwise, by the same arithmetic as `cost`."""
        start, seconds, slope = self._table
        piece = (sizes[:, None] >= start).sum(axis=1) - 1
        ranks = np.arange(self.workers)
        slow = self.weather.slowness[step]
        begin = slow * seconds[ranks, piece] + self._delay(step)
        busy: Array = begin + slow * slope[ranks, piece] * (sizes - start[ranks, piece])
        return busy

    def drivers(self, rank: int, step: int) -> tuple[float, ...]:
        """Nothing is announced."""
        return ()

    def _delay(self, step: int) -> Array | float:
        delay = self.weather.delay_seconds
        return 0.0 if delay is None else delay[step]


def synthetic_cluster(
    curves: Sequence[Cost], steps: int, *, noise: Noise | None = None, seed: int = 0
) -> SyntheticCluster:
    """Draws a cluster; the same seed gives the same one.

    Args:
        curves: By rank.
        steps: Iterations of each worker, >= 1.
        noise: What disturbs them; None: nothing.
        seed: >= 0.

    Raises:
        ValueError: No worker, or no step.

    Example:
        >>> from lbbsp_core.sim.slowdowns import Pareto
        >>> synthetic_cluster(cores([6, 6, 4, 32]), 100, noise=Pareto(2.5), seed=3).workers
        4
    """
    if not curves or steps < 1:
        raise ValueError(f"a cluster needs workers and steps, got {len(curves)} and {steps}")
    drawn = (noise or Constant()).weather(np.random.default_rng(seed), steps, len(curves))
    return SyntheticCluster(curves, drawn)


OMNILEARN = ("12/12/12/12", "12/12/8/16", "9/9/6/24", "6/6/4/32")
"""Core layouts of OmniLearn (Tyagi and Sharma, TPDS 2025): 48 cores, more and more unequal."""


def cores(
    counts: Sequence[float],
    samples_per_second: float = 10.0,
    overhead_seconds: float = 0.0,
    serial_share: float = 0.0,
) -> list[Cost]:
    r"""Curves of CPU workers by their cores c: speed ``v c`` by default.

    .. math:: v(c) = v / (s + (1 - s) / c)

    with s the share of a sample's work that only one core does (Amdahl's law).

    Args:
        counts: Cores by rank, > 0.
        samples_per_second: v of one core.
        overhead_seconds: Of an iteration, whatever the batch.
        serial_share: s, in [0, 1).

    Example:
        >>> [curve(10) for curve in cores([1, 2])]
        [1.0, 0.5]
    """
    require_positive("samples_per_second", samples_per_second)
    require_nonnegative("overhead_seconds", overhead_seconds)
    if not 0 <= serial_share < 1:
        raise ValueError(f"serial_share must be in [0, 1), got {serial_share!r}")
    slowness = [
        serial_share + (1 - serial_share) / require_positive("cores", count) for count in counts
    ]
    return [Affine(overhead_seconds, slow / samples_per_second) for slow in slowness]


@dataclass(frozen=True, slots=True)
class Preemption:
    """Spot instances: every worker leaves, comes back, and leaves again, without end.

    Args:
        mean_up_seconds: Of the exponential time until it leaves, > 0.
        mean_down_seconds: Until it is back, > 0; inf: it never is.
        seed: >= 0.

    Raises:
        ValueError: An option out of range.
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
        """Who leaves and joins, in the order of time; endless unless nobody comes back."""
        rng = np.random.default_rng(self.seed)
        nexts = rng.exponential(self.mean_up_seconds, workers)
        up = np.ones(workers, np.bool_)
        while np.isfinite(nexts.min()):
            worker = int(nexts.argmin())
            now, joins = float(nexts[worker]), not up[worker]
            yield Change(now, worker, joins)
            up[worker] = joins
            mean = self.mean_up_seconds if joins else self.mean_down_seconds
            nexts[worker] = now + (rng.exponential(mean) if np.isfinite(mean) else np.inf)
