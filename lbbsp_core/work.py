"""Work known in advance: cuts the samples of a step by their work, not by their number.

Samples differ where they have token counts, image sizes or graphs of their own. A worker's share
of a step is then a part of the step's *work*. The set of samples of a step stays the same (rule 1),
and so does the update, which counts samples; only the places where the step is cut follow the work.

Work is counted in integers (rule 3): in `UNITS` parts of a mean sample of the data set. All workers
thus compute the same cuts from the same sums.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Proportional
from lbbsp_core.types import Floats, Ints, Limits

UNITS: Final = 1024
"""Units of work of a mean sample."""

_LARGEST: Final = 1e15
"""Larger values are no work; sums of smaller ones do not overflow."""

_Bounds = tuple[Limits, int | None]
"""Bounds of a worker, and the largest work of its part in units; None without a limit."""


class StepShares(NamedTuple):
    """What the workers do in a step, by rank.

    Args:
        plan: Planned work of each worker, in mean samples of the data set.
        sizes: Samples of each worker.
        work: Work of each worker, in mean samples of the data set.
    """

    plan: tuple[int, ...]
    sizes: tuple[int, ...]
    work: tuple[float, ...]

    @property
    def are_cut_by_work(self) -> bool:
        """Whether the work of the samples is known; else the three are the same."""
        return self.work is not self.plan


class Work:
    """Work of each sample of a data set, such as its tokens, pixels or nodes.

    Args:
        values: Work of each sample in any unit, finite and > 0, shape ``(num_samples,)``. Seconds
            should be proportional to its sum over a batch (and an overhead).
        num_samples: Size of the data set.

    Raises:
        ValueError: The array has another shape, or a value is not finite and > 0.

    Example:
        >>> work = Work([100, 300, 200, 200], num_samples=4)
        >>> work.cut(np.arange(4), (2, 2), [Limits(), Limits()])
        StepShares(plan=(2, 2), sizes=(2, 2), work=(2.0, 2.0))
        >>> work.cut(np.array([1, 2, 0, 3]), (2, 2), [Limits(), Limits()])
        StepShares(plan=(2, 2), sizes=(1, 3), work=(1.5, 2.5))
    """

    def __init__(self, values: npt.ArrayLike, num_samples: int) -> None:
        amounts = _checked(values, num_samples)
        self.mean = math.fsum(amounts) / num_samples
        """Mean work of a sample, in the unit of the values."""
        self.units: Ints = np.maximum(np.rint(amounts / self.mean * UNITS), 1).astype(np.int64)
        """Work of each sample in units, >= 1, read-only."""
        self.units.flags.writeable = False
        self.digest = zlib.crc32(self.units.astype("<i8").tobytes())
        """Number that differs between different arrays."""
        self._cut = lru_cache(maxsize=16)(self._cut_anew)  # a step is cut each time it is read

    @property
    def description(self) -> str:
        """Text that workers compare before the first step."""
        return f"{len(self.units)} samples of mean {self.mean!r} with digest {self.digest:08x}"

    def check_limits(self, limits: Sequence[Limits], global_batch_size: int) -> None:
        """Raises if many steps could not be divided within `Limits.maximum_work`."""
        maxima = [bounds.maximum_work for bounds in limits if bounds.maximum_work is not None]
        if len(maxima) < len(limits):
            return
        if sum(maxima) < self.mean * global_batch_size:
            raise ValueError(
                f"the sum of Limits.maximum_work must be at least the mean work of a step, "
                f"{self.mean * global_batch_size:.4g}, got {sum(maxima):.4g}: raise maximum_work, "
                "lower global_batch_size, or add workers"
            )
        largest = int(self.units.argmax())
        if max(maxima) / self.mean * UNITS < self.units[largest]:
            raise ValueError(
                f"Limits.maximum_work must admit every sample, and sample {largest} has the work "
                f"{self.units[largest] * self.mean / UNITS:.4g}, got {max(maxima):.4g}: raise "
                "maximum_work, or leave the sample out"
            )

    def cut(
        self,
        samples: Ints,
        plan: Sequence[int],
        limits: Sequence[Limits],
        granularity: int = 1,
    ) -> StepShares:
        """Cuts a step into consecutive parts whose work is in the proportion of a plan.

        Each cut is the place between two samples (or granules) that is nearest to its share of the
        step's work. Where no limit binds, the work of each worker differs from its share by less
        than that of the largest sample (or granule). A worker at a limit leaves the rest to those
        behind it, in proportion. Sizes are multiples of the granularity where that is possible,
        except that the last worker takes the remainder.
        """
        return self._cut(samples.tobytes(), tuple(plan), tuple(limits), granularity)

    def _cut_anew(
        self, numbers: bytes, plan: tuple[int, ...], limits: tuple[Limits, ...], granularity: int
    ) -> StepShares:
        samples = np.frombuffer(numbers, np.int64)
        ends = np.concatenate([[0], np.cumsum(self.units[samples])])
        most = [  # in units
            None if limit.maximum_work is None else int(limit.maximum_work / self.mean * UNITS)
            for limit in limits
        ]
        targets = _targets(int(ends[-1]), plan, most)
        for grain in dict.fromkeys((granularity, 1)):
            places = np.append(np.arange(0, len(samples), grain), len(samples))
            bounds = list(zip(limits, most, strict=True))
            if cuts := _cuts(places, ends[places], targets, bounds):
                sizes = np.diff(places[cuts])
                done = np.diff(ends[places[cuts]]) / UNITS  # exact: a power of two
                return StepShares(plan, tuple(sizes.tolist()), tuple(done.tolist()))
        raise ValueError(
            f"a step of {len(samples)} samples, of the work {ends[-1] * self.mean / UNITS:.4g}, "
            f"cannot be divided within {list(limits)}: raise maximum or maximum_work, lower "
            "minimum or global_batch_size, or add workers"
        )


def _cuts(places: Ints, ends: Ints, targets: list[int], bounds: Sequence[_Bounds]) -> list[int]:
    """Returns cuts within all bounds, near to the targets; none if that is impossible.

    `places` are the numbers of samples before each place where a step may be cut, ascending from
    0; `ends` is the work before them, in units.
    """
    goals, final = np.array(targets[:-1], np.int64), len(places) - 1
    above = ends.searchsorted(goals)
    below = np.maximum(above - 1, 0)
    lower = goals - ends[below] <= ends[above] - goals
    nearest = [0, *np.where(lower, below, above).tolist(), final]
    sizes, work = np.diff(places[nearest]).tolist(), np.diff(ends[nearest]).tolist()
    if all(map(_fits, bounds, sizes, work)):
        return nearest
    # Where the part of each worker may end, for every start: slow, and seldom needed.
    span_by_bounds = {pair: _span(places, ends, *pair) for pair in dict.fromkeys(bounds)}
    spans = [span_by_bounds[pair] for pair in bounds]
    # From which places the workers from a rank on can divide the rest.
    possible = [np.arange(final + 1) == final]
    for first, last in reversed(spans):
        before = np.concatenate([[0], np.cumsum(possible[0])])
        some = before[last + 1] > before[np.minimum(first, last + 1)]
        possible.insert(0, some & (first <= last))
    if not possible[0][0]:
        return []
    cuts, done, planned, total = [0], 0, 0, targets[-1]
    for rank, (first, last) in enumerate(spans):
        at, target = cuts[-1], targets[rank]
        if planned < total:
            target = done + (total - done) * (target - planned) // (total - planned)
        choices = np.flatnonzero(possible[rank + 1][first[at] : last[at] + 1]) + first[at]
        distances = np.abs(ends[choices] - target)
        cuts.append(int(choices[distances.argmin()]))
        if distances.min() > np.abs(ends - target).min():  # the others share the rest
            done, planned = int(ends[cuts[-1]]), targets[rank]
    return cuts


def _fits(bounds: _Bounds, size: int, work: int) -> bool:
    """Returns whether a part of a step is within the bounds of its worker."""
    limits, most = bounds
    return limits.allow(size) and (most is None or work <= most)


def _span(places: Ints, ends: Ints, limits: Limits, most: int | None) -> tuple[Ints, Ints]:
    """Returns the first and the last place at which a part may end, for each of its starts."""
    first = places.searchsorted(places + limits.minimum)
    last = np.full(len(places), len(places) - 1)
    if limits.maximum is not None:
        last = places.searchsorted(places + limits.maximum, side="right") - 1
    if most is not None:
        last = np.minimum(last, ends.searchsorted(ends + most, side="right") - 1)
    return first, last


def require_work(work: Work | None, limits: Sequence[Limits], global_batch_size: int) -> None:
    """Raises if `Limits.maximum_work` is given and cannot be kept."""
    if work is not None:
        work.check_limits(limits, global_batch_size)
    elif bounded := [bounds for bounds in limits if bounds.maximum_work is not None]:
        raise ValueError(
            f"Limits.maximum_work needs the work of each sample, got {bounded[0]} without it: pass "
            "work= with the data set, or limit the samples by Limits.maximum"
        )


def _targets(total: int, plan: Sequence[int], maxima: Sequence[int | None]) -> list[int]:
    """Returns the work at which the part of each worker is to end, in units."""
    shares = list(accumulate(plan))
    targets = [total * share // shares[-1] for share in shares]
    parts = np.diff([0, *targets]).tolist()
    allowed = [total if most is None else most for most in maxima]
    exceeds = any(part > most for part, most in zip(parts, allowed, strict=True))
    if exceeds and sum(allowed) >= total:
        limits = [Limits(0, most) for most in maxima]
        costs = [Proportional(max(share, 1)) for share in plan]
        targets = np.cumsum(allocate(costs, total=total, limits=limits)).tolist()
    return targets


def _checked(values: npt.ArrayLike, num_samples: int) -> Floats:
    """Returns the work of each sample as floats."""
    try:
        amounts = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"work must be an array of numbers, one for each sample, got {type(values).__name__} "
            f"({error}): pass for example the number of tokens of each sample"
        ) from None
    if amounts.shape != (num_samples,):
        raise ValueError(
            f"work must have the shape ({num_samples},), a number for each sample of the data set, "
            f"got {amounts.shape}: pass the work of the whole data set, in its order"
        )
    wrong = ~((amounts > 0) & (amounts <= _LARGEST))
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"work must be finite, > 0 and at most {_LARGEST:g}, got {amounts[first]} for sample "
            f"{first}: give an empty sample a small work, such as 1 token"
        )
    return amounts
