"""Records shared by all stages of the loop: measurements and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.validate import require_positive

Floats = npt.NDArray[np.float64]
"""Array of floating-point numbers."""

Ints = npt.NDArray[np.int64]
"""Array of integers."""

Flags = npt.NDArray[np.bool_]
"""Array of truth values."""

Real = float | Floats
"""One worker's value, or an array of shape ``(workers,)``."""

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # PEP 696: plain `Predictor` or `Synchroniser` stands for one with any state.
    State = TypeVar("State", default=Any)
else:
    from typing import TypeVar

    State = TypeVar("State")

_MAX_PLAUSIBLE = 1e12


@dataclass(frozen=True, slots=True)
class Measurement:
    """Work and busy time of one worker in one iteration, with the driving factors before it.

    Paper: LB-BSP (arXiv 1806.02508) sends ``<t^(k-1), cpu^k, mem^k>`` from each worker to the
    manager. Ours: the same values, but they stay on the worker, which predicts its own speed.

    Args:
        samples: Work done in the iteration, in samples, > 0. The balancer passes ``shape(x)``
            (see `lbbsp_core.cost`), so that a constant overhead does not distort the speed.
        busy_seconds: Seconds that the worker was busy *alone*, > 0; barrier waits are excluded.
        drivers: Driving factors (CPU, memory, ...) known before the iteration started, in a
            fixed order. Empty if no resources are sampled.

    Example:
        >>> Measurement(samples=32, busy_seconds=0.5).samples_per_second
        64.0

    References:
        Chen et al., arXiv 1806.02508.
    """

    samples: Real
    busy_seconds: Real
    drivers: tuple[float, ...] = ()

    @property
    def samples_per_second(self) -> Real:
        """Speed ``v = samples / busy_seconds``, of the same shape as the two."""
        return self.samples / self.busy_seconds

    @property
    def is_valid(self) -> bool:
        """True if `samples` and `busy_seconds` are plausible, see `is_plausible`.

        Predictors accept valid measurements only (rule 7).
        """
        return is_plausible(self.samples) and is_plausible(self.busy_seconds)

    def speed(self) -> float | None:
        """Returns one worker's samples per second, or None if the measurement is not valid.

        Example:
            >>> Measurement(32, 0.5).speed(), Measurement(32, 0.0).speed()
            (64.0, None)
        """
        return float(self.samples_per_second) if self.is_valid else None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one worker's batch size: ``minimum <= x <= maximum``.

    Args:
        minimum: Smallest batch, in samples, >= 0. Frameworks need 1; `allocate` accepts 0.
        maximum: Largest batch, in samples (a memory limit), or None for no limit.
        maximum_work: Largest sum of the work of a batch, > 0, in the unit of the data set's
            ``work=`` (tokens, pixels), or None for no limit; see `lbbsp_core.work`. `allocate`
            plans shares of mean samples, and leaves it to the cut of each step.

    Raises:
        TypeError: A number of samples is no integer.
        ValueError: `minimum` is negative, `maximum` is below `minimum`, or `maximum_work` is not
            finite and > 0.

    Example:
        >>> Limits(minimum=1, maximum=64)
        Limits(minimum=1, maximum=64, maximum_work=None)
    """

    minimum: int = 1
    maximum: int | None = None
    maximum_work: float | None = None

    def __post_init__(self) -> None:
        for name, kind in (("minimum", Integral), ("maximum", Integral | None)):
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"Limits.{name} must be a whole number of samples, got {value!r}")
        if self.minimum < 0:
            raise ValueError(f"Limits.minimum must be >= 0, got {self.minimum}: use 0 or more")
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(
                f"Limits.maximum must be >= minimum = {self.minimum}, got {self.maximum}: "
                "raise the maximum or lower the minimum"
            )
        if self.maximum_work is not None:
            require_positive("Limits.maximum_work", self.maximum_work)

    def allow(self, size: int) -> bool:
        """Returns whether a batch of `size` samples is within the bounds."""
        return self.minimum <= size <= (size if self.maximum is None else self.maximum)


def training_limits(limits: Limits | Sequence[Limits] | None, workers: int) -> tuple[Limits, ...]:
    """Returns one `Limits` per worker, and checks that each worker always gets samples."""
    if limits is None or isinstance(limits, Limits):
        per_worker: tuple[Limits, ...] = (limits or Limits(),) * workers
    else:
        per_worker = tuple(limits)
    if len(per_worker) != workers:
        raise ValueError(
            f"limits must be one for each of the {workers} workers, got {len(per_worker)}: "
            "pass one Limits per worker, or a single one for all"
        )
    if min(bounds.minimum for bounds in per_worker) < 1:
        raise ValueError(
            "Limits.minimum must be >= 1 while training, got 0: a worker without samples is "
            "never measured again, and frameworks refuse empty batches"
        )
    return per_worker


def is_plausible(value: Real) -> bool:
    """Returns whether a value, or each value of an array, lies strictly within 1e-12 .. 1e12.

    NaN, infinite, zero and negative values are not plausible. Speeds computed from values beyond
    these bounds could overflow.
    """
    if isinstance(value, float | int):  # a tenth of the time of an array of one, in every step
        return 1 / _MAX_PLAUSIBLE < value < _MAX_PLAUSIBLE
    return bool(np.all(plausible(np.asarray(value))))


def plausible(values: Floats) -> Flags:
    """Returns which values of an array are plausible, see `is_plausible`."""
    return np.asarray((values > 1 / _MAX_PLAUSIBLE) & (values < _MAX_PLAUSIBLE))
