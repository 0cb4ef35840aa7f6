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
from lbbsp_core.types import Limits

Ints = npt.NDArray[np.int64]

UNITS: Final = 1024
"""Units of work of a mean sample."""

_LARGEST: Final = 1e15
"""Larger values are no work; sums of smaller ones do not overflow."""


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
        given = _checked(values, num_samples)
        self.mean = math.fsum(given) / num_samples
        """Mean work of a sample, in the unit of the values."""
        self.units: Ints = np.maximum(np.rint(given / self.mean * UNITS), 1).astype(np.int64)
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
        allowed = [bounds.maximum_work for bounds in limits]
        known = [each for each in allowed if each is not None]
        if len(known) < len(allowed):
            return
        if sum(known) < self.mean * global_batch_size:
            raise ValueError(
                f"the sum of Limits.maximum_work must be at least the mean work of a step, "
                f"{self.mean * global_batch_size:.4g}, got {sum(known):.4g}: raise maximum_work, "
                "lower global_batch_size, or add workers"
            )
        largest = int(self.units.argmax())
        if self._in_units(max(known)) < self.units[largest]:
            raise ValueError(
                f"Limits.maximum_work must admit every sample, and sample {largest} has the work "
                f"{self.units[largest] * self.mean / UNITS:.4g}, got {max(known):.4g}: raise "
                "maximum_work, or leave the sample out"
            )

    def cut(
        self,
        samples: npt.NDArray[np.int64],
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
        maxima = [
            None if each.maximum_work is None else self._in_units(each.maximum_work)
            for each in limits
        ]
        targets = _targets(int(ends[-1]), plan, maxima)
        for grain in dict.fromkeys((granularity, 1)):
            places = np.append(np.arange(0, len(samples), grain), len(samples))
            step = _Step(places, ends[places], targets, limits, maxima)
            cuts = step.nearest() or step.within_limits()
            if cuts is not None:
                sizes = np.diff(places[cuts])
                done = np.diff(ends[places[cuts]]) / UNITS  # exact: a power of two
                return StepShares(plan, tuple(sizes.tolist()), tuple(done.tolist()))
        raise ValueError(
            f"a step of {len(samples)} samples, of the work {ends[-1] * self.mean / UNITS:.4g}, "
            f"cannot be divided within {list(limits)}: raise maximum or maximum_work, lower "
            "minimum or global_batch_size, or add workers"
        )

    def _in_units(self, work: float) -> int:
        """Returns work in the unit of the values as units, rounded down."""
        return int(work / self.mean * UNITS)


class _Step(NamedTuple):
    """A step to cut.

    Args:
        places: Numbers of samples before each place where it may be cut, ascending from 0.
        ends: Work before each place, in units.
        targets: Work at which the part of each worker is to end, by rank.
        limits: Bounds of the workers.
        maxima: Largest work of each worker, in units; None without a limit.
    """

    places: Ints
    ends: Ints
    targets: list[int]
    limits: Sequence[Limits]
    maxima: list[int | None]

    def nearest(self) -> list[int] | None:
        """Returns the cuts that are nearest to the targets; None if they exceed a limit."""
        targets = np.array(self.targets[:-1], np.int64)
        above = self.ends.searchsorted(targets)
        below = np.maximum(above - 1, 0)
        lower = targets - self.ends[below] <= self.ends[above] - targets
        cuts = [0, *np.where(lower, below, above).tolist(), len(self.places) - 1]
        sizes, work = np.diff(self.places[cuts]).tolist(), np.diff(self.ends[cuts]).tolist()
        for size, done, bounds, most in zip(sizes, work, self.limits, self.maxima, strict=True):
            fits = size <= (size if bounds.maximum is None else bounds.maximum)
            if size < bounds.minimum or not fits or (most is not None and done > most):
                return None
        return cuts

    def within_limits(self) -> list[int] | None:
        """Returns cuts within all limits, near to the targets; None if there are none."""
        kinds = list(zip(self.limits, self.maxima, strict=True))
        known = {kind: self._span(*kind) for kind in dict.fromkeys(kinds)}
        spans = [known[kind] for kind in kinds]
        # From which places the workers from a rank on can divide the rest.
        possible = [np.arange(len(self.places)) == len(self.places) - 1]
        for first, last in reversed(spans):
            before = np.concatenate([[0], np.cumsum(possible[0])])
            some = before[last + 1] > before[np.minimum(first, last + 1)]
            possible.insert(0, some & (first <= last))
        if not possible[0][0]:
            return None
        cuts, anchor, total = [0], (0, 0), self.targets[-1]
        for rank, (first, last) in enumerate(spans):
            at, span = cuts[-1], slice(first[cuts[-1]], last[cuts[-1]] + 1)
            done, planned = anchor
            target = self.targets[rank]
            if planned < total:
                target = done + (total - done) * (target - planned) // (total - planned)
            choices = np.flatnonzero(possible[rank + 1][span]) + first[at]
            distances = np.abs(self.ends[choices] - target)
            cuts.append(int(choices[distances.argmin()]))
            if distances.min() > np.abs(self.ends - target).min():  # the others share the rest
                anchor = int(self.ends[cuts[-1]]), self.targets[rank]
        return cuts

    def _span(self, bounds: Limits, most: int | None) -> tuple[Ints, Ints]:
        """Returns the first and the last place at which a part may end, for each of its starts."""
        first = self.places.searchsorted(self.places + bounds.minimum)
        last = np.full(len(self.places), len(self.places) - 1)
        if bounds.maximum is not None:
            last = self.places.searchsorted(self.places + bounds.maximum, side="right") - 1
        if most is not None:
            last = np.minimum(last, self.ends.searchsorted(self.ends + most, side="right") - 1)
        return first, last


def require_work(work: Work | None, limits: Sequence[Limits], global_batch_size: int) -> None:
    """Raises if `Limits.maximum_work` is given and cannot be kept."""
    if work is not None:
        work.check_limits(limits, global_batch_size)
        return
    for bounds in limits:
        if bounds.maximum_work is not None:
            raise ValueError(
                f"Limits.maximum_work needs the work of each sample, got {bounds} without it: pass "
                "work= with the data set, or limit the samples by Limits.maximum"
            )


def _targets(total: int, plan: Sequence[int], maxima: Sequence[int | None]) -> list[int]:
    """Returns the work at which the part of each worker is to end, in units."""
    shares = list(accumulate(plan))
    targets = [total * share // shares[-1] for share in shares]
    parts = np.diff([0, *targets]).tolist()
    if any(most is not None and most < part for most, part in zip(maxima, parts, strict=True)):
        allowed = sum(total if most is None else most for most in maxima)
        if allowed >= total:
            limits = [Limits(0, most) for most in maxima]
            costs = [Proportional(max(share, 1)) for share in plan]
            targets = np.cumsum(allocate(costs, total=total, limits=limits)).tolist()
    return targets


def _checked(values: npt.ArrayLike, num_samples: int) -> npt.NDArray[np.float64]:
    """Returns the work of each sample as floats."""
    try:
        given = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"work must be an array of numbers, one for each sample, got {type(values).__name__} "
            f"({error}): pass for example the number of tokens of each sample"
        ) from None
    if given.shape != (num_samples,):
        raise ValueError(
            f"work must have the shape ({num_samples},), a number for each sample of the data set, "
            f"got {given.shape}: pass the work of the whole data set, in its order"
        )
    wrong = ~((given > 0) & (given <= _LARGEST))
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"work must be finite, > 0 and at most {_LARGEST:g}, got {given[first]} for sample "
            f"{first}: give an empty sample a small work, such as 1 token"
        )
    return given
