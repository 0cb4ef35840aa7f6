"""Profile: how long a step takes by its batch size, and where memory ends.

step ──> search (grow, bisect) ──> points ──> repair ──> fits ──> a file that `Profile.load` reads
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lbbsp_core.cost import Cost, Profile
from lbbsp_core.cost.fitting import Fit, Point, best, fit_costs, repair
from lbbsp_core.cost.profile_file import make_document, write_document
from lbbsp_core.profiler import _step
from lbbsp_core.profiler.process import ProfileError, StepProcess
from lbbsp_core.profiler.sweep import BatchSweep, Found, Progress

__all__ = ["BatchSweep", "Point", "ProfileError", "ProfileResult", "profile_step"]


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """What was measured, and what fits it.

    Args:
        device: What the step ran on.
        points: By ascending batch, their seconds not falling.
        out_of_memory_at: The smallest batch that does not fit, or None.
        fits: By form, the simplest first.
        notes: What was repaired, or cut short, in words.
    """

    device: str
    points: tuple[Point, ...]
    out_of_memory_at: int | None
    fits: Mapping[str, Fit]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """The form of the least cross-validated error."""
        return best(self.fits)

    @property
    def cost(self) -> Cost:
        """The fit of the best form."""
        return self.fits[self.best].cost

    @property
    def profile(self) -> Profile:
        """The points themselves as a cost, with the memory cap."""
        batches, seconds = [p.batch for p in self.points], [p.seconds for p in self.points]
        return Profile(batches, seconds, self.out_of_memory_at)

    def figures(self) -> dict[str, Any]:
        """All of it, as its file holds it."""
        return make_document(
            device=self.device,
            points=[
                {"batch": p.batch, "seconds": p.seconds, "repeats": p.repeats} for p in self.points
            ],
            out_of_memory_at=self.out_of_memory_at,
            fits={
                name: {"parameters": fit.parameters, "cv_error": fit.cv_error}
                for name, fit in self.fits.items()
            },
            best=self.best,
        )

    def save(self, path: str | Path) -> None:
        """Writes a file that `lbbsp_core.Profile.load` reads."""
        write_document(Path(path), self.figures())


def profile_step(
    step: Callable[[int], object] | str | Path,
    *,
    search: BatchSweep | None = None,
    timeout: float = 60.0,
    arguments: Sequence[str] = (),
    progress: Progress | None = None,
) -> ProfileResult:
    """Measures batch size -> seconds of any function ``step(batch_size)`` of any framework.

    The step should do what a worker does alone in one iteration: draw a batch, forward, backward,
    update. It must return when the work is done; PyTorch's GPU is waited for, and arrays of JAX
    and TensorFlow that the step returns.

    Args:
        step: ``"script.py"`` (its function ``step``) or ``"script.py:function"``: called in a
            process of its own, which may die; a fresh one after every time memory ran out. Or a
            function: called in this process, so that memory may end in exceptions only.
        search: Which batches to measure, and how often. Defaults to ``BatchSweep()``.
        timeout: Seconds for loading the script, and for one step in it.
        arguments: What the script finds in ``sys.argv[1:]``.
        progress: Called after each batch.

    Raises:
        ProfileError: The step cannot be loaded, fails, hangs, or not even one sample fits.
        ValueError: An argument makes no sense.

    Example:
        >>> import time
        >>> few = BatchSweep(max_batch=4, repeats=1, point_seconds=0, rounds=1)
        >>> found = profile_step(lambda batch_size: time.sleep(0.004 * batch_size), search=few)
        >>> [point.batch for point in found.points], found.out_of_memory_at
        ([1, 2, 3, 4], None)
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    search = search or BatchSweep()
    runner: _Runner = (
        _Here(step) if callable(step) else _Isolated(*_target(step), arguments, timeout)
    )
    with closing(runner):
        found = search.run(runner.step, progress or _silent)
        if not found.points:
            raise ProfileError(
                f"step(1) already runs out of memory ({runner.failure}): profile on a larger "
                "device, or see whether the failure is of another kind"
            )
        return _conclude(found, runner.device, search)


def _conclude(found: Found, device: str, search: BatchSweep) -> ProfileResult:
    points, notes = repair(found.points)
    if found.slow:
        notes.append(
            f"no batch above {points[-1].batch} was tried: a step took longer than "
            f"{search.longest_step:g} s"
        )
    return ProfileResult(
        device, tuple(points), found.out_of_memory_at, fit_costs(points), tuple(notes)
    )


def _target(step: str | Path) -> tuple[str, str]:
    """``script.py:function`` in two; the function is ``step`` where none is named."""
    script, colon, function = str(step).rpartition(":")
    if not colon or os.path.exists(step):
        script, function = str(step), "step"
    if not os.path.isfile(script):
        raise ProfileError(f"{script}: there is no such file: give the path of a Python script")
    return script, function


def _silent(_done: str, _batch: int, _seconds: float | None) -> None:
    return None


class _Runner(Protocol):
    """Runs steps, and knows what on."""

    failure: str

    @property
    def device(self) -> str: ...
    def step(self, batch: int) -> float | None: ...
    def close(self) -> None: ...


class _Here:
    """Calls a function in this process."""

    def __init__(self, function: Callable[[int], object]) -> None:
        self._function, self.failure = function, ""

    @property
    def device(self) -> str:
        return _step.device()

    def step(self, batch: int) -> float | None:
        try:
            return _step.timed(self._function, batch)
        except Exception as error:
            if not _step.is_out_of_memory(error):
                raise
            self.failure = _step.story(error)
        gc.collect()  # what the failed step held
        return None

    def close(self) -> None:
        """Nothing was started."""


class _Isolated:
    """Calls a script's function in a process, and in a fresh one after a failure."""

    def __init__(
        self, script: str, function: str, arguments: Sequence[str], timeout: float
    ) -> None:
        self._start = script, function, arguments, timeout
        self._process: StepProcess | None = None
        self.device, self.failure = "", ""

    def step(self, batch: int) -> float | None:
        process = self._process or self._begin()
        seconds, failure = process.step(batch)
        if seconds is None:
            self.failure = failure
            self.close()
        elif not self.device:
            self.device = process.device()
        return seconds

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _begin(self) -> StepProcess:
        self._process = StepProcess(*self._start)
        self._process.load()
        return self._process
