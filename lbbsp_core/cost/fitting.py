r"""Fits: the parameters of each cost form to measured points, and which form predicts best.

Times of a batch span orders of magnitude, and the allocator equalises them by ratio, so errors
are relative: a fit minimises :math:`\sum_j ((\Gamma(b_j) - t_j) / t_j)^2`, every batch counting
once (what is wrong with a form outweighs the noise of a median, so repeats give no weight).
A form is judged by the points it has not seen: each batch is left out once, and foretold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import Affine, Cost, Profile, Proportional, Saturating

Floats: TypeAlias = npt.NDArray[np.float64]

_SMALLEST = 1e-9  # of a sample's average time: a slope of 0 is no `Affine`


@dataclass(frozen=True, slots=True)
class Point:
    """A batch as it was measured.

    Args:
        batch: Samples, >= 1.
        seconds: Median busy time, > 0.
        repeats: Of how many steps.
    """

    batch: int
    seconds: float
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """A form, fitted.

    Args:
        cost: With the parameters that fit all points best.
        cv_error: Mean of ``|foretold - measured| / measured`` over the batches, each foretold
            from the others, to six digits; None where the points are too few to leave one out.
    """

    cost: Cost
    cv_error: float | None

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments of `cost`, by name."""
        cost = self.cost
        if isinstance(cost, Profile):
            return {"batches": list(cost.batches), "seconds": list(cost.seconds)}
        assert isinstance(cost, Proportional | Affine | Saturating)
        return {own.name: getattr(cost, own.name) for own in fields(cost) if own.init}

    def __str__(self) -> str:
        """Such as ``Affine(overhead_seconds=0.01, seconds_per_sample=0.002)``."""
        if isinstance(self.cost, Profile):
            return f"Profile({len(self.cost.batches)} points)"
        own = ", ".join(f"{name}={value:.4g}" for name, value in self.parameters.items())
        return f"{type(self.cost).__name__}({own})"


def fit_costs(points: Sequence[Point]) -> dict[str, Fit]:
    """Fits every form that the points can tell, the simplest first.

    Args:
        points: By ascending batch, seconds not falling (see `repair`).

    Returns:
        Of ``proportional, affine, saturating, profile`` those with no more parameters than
        there are points.

    Raises:
        ValueError: The points make no `Profile`.

    Example:
        >>> points = [Point(b, 0.010 + 0.001 * b) for b in (1, 2, 4, 8, 16)]
        >>> fits = fit_costs(points)
        >>> print(fits["affine"], fits["affine"].cv_error)
        Affine(overhead_seconds=0.01, seconds_per_sample=0.001) 0.0
        >>> best(fits)
        'affine'
    """
    Profile([p.batch for p in points], [p.seconds for p in points])  # checks them
    batches = np.array([p.batch for p in points], np.float64)
    seconds = np.array([p.seconds for p in points], np.float64)
    return {
        name: Fit(form(batches, seconds), _cross_validate(form, parameters, batches, seconds))
        for name, (form, parameters) in _FORMS.items()
        if len(points) >= parameters
    }


def best(fits: Mapping[str, Fit]) -> str:
    """The form of the least cross-validated error; of several as good, the simplest."""
    known = {name: fit.cv_error for name, fit in fits.items() if fit.cv_error is not None}
    return min(known, key=lambda name: known[name]) if known else list(fits)[-1]


def repair(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """Points whose seconds do not fall as the batch grows, and what was done, in words.

    A batch that took less than a smaller one did is noise, or a size that the processor likes.
    Such neighbours get one time, their mean (pool adjacent violators: the nearest nondecreasing
    curve). At the end, where a flat piece would promise that more is free, only the largest of
    them stays, unless all is flat.

    Args:
        points: By ascending batch.

    Example:
        >>> repair([Point(1, 1.0), Point(2, 4.0), Point(3, 2.0), Point(4, 5.0)])[0][1:3]
        [Point(batch=2, seconds=3.0, repeats=1), Point(batch=3, seconds=3.0, repeats=1)]
    """
    blocks: list[list[Point]] = []
    for point in points:
        blocks.append([point])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    notes = [_note(block) for block in blocks if len(block) > 1]
    kept = [*blocks[:-1], blocks[-1][-1:]] if len(blocks) > 1 else blocks
    levels = [_mean(block) for block in blocks]
    return [
        Point(point.batch, level, point.repeats)
        for block, level in zip(kept, levels, strict=True)
        for point in block
    ], notes


def _mean(block: Sequence[Point]) -> float:
    return sum(point.seconds for point in block) / len(block)


def _note(block: Sequence[Point]) -> str:
    worst = max(abs(point.seconds / _mean(block) - 1) for point in block)
    return (
        f"batches {block[0].batch} to {block[-1].batch} got faster as they grew; they are given "
        f"one time, their mean, {worst:.1%} off at most"
    )


def _cross_validate(form: _Form, parameters: int, batches: Floats, seconds: Floats) -> float | None:
    """Mean relative error of each point as foretold by a fit to all others."""
    if len(batches) - 1 < parameters:
        return None
    errors = []
    for left_out in range(len(batches)):
        others = np.arange(len(batches)) != left_out
        cost = form(batches[others], seconds[others])
        errors.append(abs(cost(float(batches[left_out])) / seconds[left_out] - 1))
    return round(float(np.mean(errors)), 6)


# The forms


def _proportional(batches: Floats, seconds: Floats) -> Proportional:
    share = batches / seconds
    return Proportional(float((share**2).sum() / share.sum()))


def _affine(batches: Floats, seconds: Floats) -> Affine:
    from scipy.optimize import nnls  # slow to import, and few need it

    average = float(seconds[-1] / batches[-1])
    columns = np.array([1 / seconds * seconds[0], batches / seconds * average]).T
    (overhead, slope), _ = nnls(columns, np.ones(len(batches)))
    slope = max(slope * average, _SMALLEST * average)
    return Affine(float(overhead * seconds[0]), float(slope))


def _saturating(batches: Floats, seconds: Floats) -> Saturating:
    """Tries a knee after every point, and lets the best one slide."""
    from scipy.optimize import least_squares

    candidates = [_with_knee(batches, seconds, knee) for knee in range(len(batches) - 1)]
    start = min(candidates, key=lambda cost: _loss(cost, batches, seconds))
    unit = np.array([seconds[0], seconds[0], seconds[-1] / batches[-1]])

    def cost(scaled: Floats) -> Saturating:
        floor, overhead, slope = np.maximum(scaled, [0, 0, _SMALLEST]) * unit
        return Saturating(float(floor), float(overhead), float(slope))

    def errors(scaled: Floats) -> Floats:
        return cost(scaled)(batches) / seconds - 1

    first = [start.floor_seconds, start.overhead_seconds, start.seconds_per_sample] / unit
    found = cost(least_squares(errors, first, bounds=(0, np.inf)).x)
    return min((start, found), key=lambda cost: _loss(cost, batches, seconds))


def _with_knee(batches: Floats, seconds: Floats, knee: int) -> Saturating:
    """The first `knee` points on the floor, the rest on a line; none: no floor."""
    line = _affine(batches[knee:], seconds[knee:])
    flat = 1 / seconds[:knee]
    floor = float(flat.sum() / (flat**2).sum()) if knee else 0.0
    return Saturating(floor, line.overhead_seconds, line.seconds_per_sample)


def _loss(cost: Cost, batches: Floats, seconds: Floats) -> float:
    return float(((cost(batches) / seconds - 1) ** 2).sum())


def _profile(batches: Floats, seconds: Floats) -> Profile:
    return Profile([int(batch) for batch in batches], seconds.tolist())


_Form: TypeAlias = Callable[[Floats, Floats], Cost]

_FORMS: Mapping[str, tuple[_Form, int]] = {
    "proportional": (_proportional, 1),
    "affine": (_affine, 2),
    "saturating": (_saturating, 3),
    "profile": (_profile, 1),
}
"""Each form, and how many points it needs at least; the simplest first."""
