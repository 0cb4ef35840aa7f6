"""The two records every stage of the loop shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Real = float | npt.NDArray[np.float64]
"""One worker's value, or an array of shape ``(workers,)``."""

_ABSURD = 1e12


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one worker observed in one iteration (LB-BSP's ``<t, cpu, mem>`` message).

    Args:
        samples: Work done in the iteration, in samples (> 0). The balancer passes
            ``shape(x)``, see `lbbsp_core.cost`, so that an overhead does not bend the speed.
        busy_seconds: Seconds the worker was busy *alone* (> 0), barrier waits excluded.
        drivers: Driving factors known before the iteration started (CPU, memory, ...), in an
            order that its source keeps fixed. Empty where nothing is sampled.

    Example:
        >>> Measurement(samples=32, busy_seconds=0.5).samples_per_second
        64.0
    """

    samples: Any
    busy_seconds: Any
    drivers: tuple[float, ...] = ()

    @property
    def samples_per_second(self) -> Any:
        """Speed v = samples / busy_seconds, of the same shape as the two."""
        return self.samples / self.busy_seconds

    @property
    def is_valid(self) -> bool:
        """Whether both values are finite and positive: only such ones may reach a predictor.

        Values beyond 1e12, or below its inverse, are no measurements either; a speed made of
        them could overflow.
        """
        return is_plausible(self.samples) and is_plausible(self.busy_seconds)

    def speed(self) -> float | None:
        """One worker's samples per second, or None where the measurement is not usable.

        Example:
            >>> Measurement(32, 0.5).speed(), Measurement(32, 0.0).speed()
            (64.0, None)
        """
        return float(self.samples_per_second) if self.is_valid else None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one worker's batch: ``minimum <= x <= maximum``.

    Args:
        minimum: Smallest batch, in samples, >= 0. Frameworks need 1; `allocate` accepts 0.
        maximum: Largest batch, in samples (a memory cap), or None for no cap.

    Raises:
        ValueError: A negative minimum, or a maximum below the minimum.
    """

    minimum: int = 1
    maximum: int | None = None

    def __post_init__(self) -> None:
        if self.minimum < 0:
            raise ValueError(f"Limits.minimum must be >= 0, got {self.minimum}: use 0 or more")
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(
                f"Limits.maximum must be >= minimum = {self.minimum}, got {self.maximum}: "
                "raise the maximum or lower the minimum"
            )


def training_limits(limits: Limits | Sequence[Limits] | None, workers: int) -> tuple[Limits, ...]:
    """One for each worker, as given, or the same for all.

    Raises:
        ValueError: Another number of them, or one with which a worker may get no samples.
    """
    if limits is None or isinstance(limits, Limits):
        each: tuple[Limits, ...] = (limits or Limits(),) * workers
    else:
        each = tuple(limits)
    if len(each) != workers:
        raise ValueError(f"limits must be one for each of the {workers} workers, got {len(each)}")
    if min(bounds.minimum for bounds in each) < 1:
        raise ValueError(
            "Limits.minimum must be >= 1 while training, got 0: a worker without samples is "
            "never measured again, and frameworks refuse empty batches"
        )
    return each


def is_plausible(value: Any) -> bool:
    """Whether a value, or all of an array, may be a measurement: finite, > 0, not absurd."""
    if isinstance(value, float | int):  # a tenth of what an array of one costs, in every step
        return 1 / _ABSURD < value < _ABSURD
    values = np.asarray(value)
    return bool(np.all((values > 1 / _ABSURD) & (values < _ABSURD)))
