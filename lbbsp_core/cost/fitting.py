r"""Fits cost forms to measured points, and selects the form that predicts best.

Times span orders of magnitude and the allocator equalises their ratios, so errors are relative:
a fit minimises :math:`\sum_j ((\Gamma(b_j) - t_j) / t_j)^2` with equal weights (points are not
weighted by their repeats, because the bias of a form outweighs the noise of a median). Forms are
compared by leave-one-out cross-validation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np

from lbbsp_core.cost import Affine, Cost, Profile, Proportional, Saturating
from lbbsp_core.types import Floats

_MIN_SLOPE = 1e-9  # relative to the mean time per sample: `Affine` needs a slope > 0


@dataclass(frozen=True, slots=True)
class Point:
    """Measured time of one batch size.

    Args:
        batch: Batch size in samples, >= 1.
        seconds: Median busy seconds, > 0.
        repeats: Number of steps that the median is taken over, >= 1.
    """

    batch: int
    seconds: float
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of fitting one cost form.

    Args:
        cost: Cost with the parameters that fit all points best.
        cv_error: Mean of ``|predicted - measured| / measured`` over the batches, each predicted
            by a fit to the others, rounded to six digits; None if the points are too few to
            leave one out.
    """

    cost: Cost
    cv_error: float | None

    @property
    def parameters(self) -> dict[str, float | list[int] | list[float]]:
        """Arguments of `cost` by name."""
        cost: Any = self.cost
        if isinstance(cost, Profile):
            return {"batches": list(cost.batches), "seconds": list(cost.seconds)}
        return {entry.name: getattr(cost, entry.name) for entry in fields(cost) if entry.init}

    def __str__(self) -> str:
        """Formats as ``Affine(overhead_seconds=0.01, seconds_per_sample=0.002)``."""
        if isinstance(self.cost, Profile):
            return f"Profile({len(self.cost.batches)} points)"
        arguments = ", ".join(f"{name}={value:.4g}" for name, value in self.parameters.items())
        return f"{type(self.cost).__name__}({arguments})"


def fit_costs(points: Sequence[Point]) -> dict[str, Fit]:
    """Fits each cost form that the points determine.

    The seconds must be nondecreasing, see `repair`. A form has no more parameters than there are
    points; the simplest comes first.

    Example:
        >>> points = [Point(b, 0.010 + 0.001 * b) for b in (1, 2, 4, 8, 16)]
        >>> fits = fit_costs(points)
        >>> print(fits["affine"], fits["affine"].cv_error)
        Affine(overhead_seconds=0.01, seconds_per_sample=0.001) 0.0
        >>> best(fits)
        'affine'
    """
    Profile([p.batch for p in points], [p.seconds for p in points])  # validates the points
    batches = np.array([p.batch for p in points], np.float64)
    seconds = np.array([p.seconds for p in points], np.float64)
    return {
        name: Fit(form(batches, seconds), _cross_validate(form, parameters, batches, seconds))
        for name, (form, parameters) in _FORMS.items()
        if len(points) >= parameters
    }


def best(fits: Mapping[str, Fit]) -> str:
    """Returns the name of the form with the smallest cross-validation error.

    Ties go to the simplest form; without any error it is the last of `fits`.
    """
    errors = {name: fit.cv_error for name, fit in fits.items() if fit.cv_error is not None}
    return min(errors, key=lambda name: errors[name]) if errors else list(fits)[-1]


def repair(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """Makes the seconds nondecreasing, by isotonic regression.

    A batch that took less time than a smaller one is noise, or a size that suits the processor.
    Such neighbours get the same time, their mean (pool adjacent violators: the nearest
    nondecreasing curve). At the end of the curve only the largest of them is kept, unless the whole
    curve is flat: a flat end would imply that larger batches cost nothing. Returns also a note for
    each pooled group.

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
    pairs = zip(map(_mean, blocks), kept, strict=True)
    return [Point(p.batch, mean, p.repeats) for mean, block in pairs for p in block], notes


def _mean(block: Sequence[Point]) -> float:
    return sum(point.seconds for point in block) / len(block)


def _note(block: Sequence[Point]) -> str:
    worst = max(abs(point.seconds / _mean(block) - 1) for point in block)
    return (
        f"batches {block[0].batch} to {block[-1].batch} took less time as they grew: all of them "
        f"are given the mean time, which differs from the measured ones by at most {worst:.1%}"
    )


def _cross_validate(form: _Form, parameters: int, batches: Floats, seconds: Floats) -> float | None:
    """Returns the mean relative error of each point under a fit to all others."""
    if len(batches) - 1 < parameters:
        return None
    errors = []
    for left_out in range(len(batches)):
        mask = np.arange(len(batches)) != left_out
        cost = form(batches[mask], seconds[mask])
        errors.append(abs(cost(float(batches[left_out])) / seconds[left_out] - 1))
    return round(float(np.mean(errors)), 6)


# The forms


def _proportional(batches: Floats, seconds: Floats) -> Proportional:
    """Minimises the relative squared error in closed form."""
    rate = batches / seconds
    return Proportional(float((rate**2).sum() / rate.sum()))


def _affine(batches: Floats, seconds: Floats) -> Affine:
    """Solves a nonnegative least-squares problem in scaled parameters."""
    from scipy.optimize import nnls  # slow to import

    average = float(seconds[-1] / batches[-1])
    columns = np.array([1 / seconds * seconds[0], batches / seconds * average]).T
    (overhead, slope), _ = nnls(columns, np.ones(len(batches)))
    slope = max(slope * average, _MIN_SLOPE * average)
    return Affine(float(overhead * seconds[0]), float(slope))


def _saturating(batches: Floats, seconds: Floats) -> Saturating:
    """Refines the best of the knees between points by nonlinear least squares."""
    from scipy.optimize import least_squares  # slow to import

    candidates = [_with_knee(batches, seconds, knee) for knee in range(len(batches) - 1)]
    start = min(candidates, key=lambda cost: _loss(cost, batches, seconds))
    unit = np.array([seconds[0], seconds[0], seconds[-1] / batches[-1]])

    def cost(scaled: Floats) -> Saturating:
        floor, overhead, slope = np.maximum(scaled, [0, 0, _MIN_SLOPE]) * unit
        return Saturating(float(floor), float(overhead), float(slope))

    def errors(scaled: Floats) -> Floats:
        return cost(scaled)(batches) / seconds - 1

    first = [start.floor_seconds, start.overhead_seconds, start.seconds_per_sample] / unit
    solution = cost(least_squares(errors, first, bounds=(0, np.inf)).x)
    return min((start, solution), key=lambda cost: _loss(cost, batches, seconds))


def _with_knee(batches: Floats, seconds: Floats, knee: int) -> Saturating:
    """Fits the floor to the first `knee` points (none if 0), and a line to the others."""
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
"""Fitting function and minimum number of points of each form, from the simplest."""
