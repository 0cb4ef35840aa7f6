"""Profiler: measures seconds per step by batch size, and the largest batch that fits in memory.

step ──> sweep (grow, bisect) ──> points ──> repair ──> fits ──> a file that `Profile.load` reads
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from lbbsp_core.cost import Cost, Profile
from lbbsp_core.cost.fitting import Fit, Point, best, fit_costs, repair
from lbbsp_core.cost.profile_file import SCHEMA, write_document
from lbbsp_core.profiler import _step
from lbbsp_core.profiler.process import BatchSweep, ProfileError, Progress, StepProcess

__all__ = ["BatchSweep", "Point", "ProfileError", "ProfileResult", "profile_step"]


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Measured points of a step, and the cost forms fitted to them.

    Args:
        device: Name of the device that the step ran on.
        points: By ascending batch, with non-decreasing seconds.
        out_of_memory_at: Smallest batch that does not fit in memory, or None.
        fits: By name of the form, the simplest first.
        notes: Messages about repaired points and a sweep that ended early.
    """

    device: str
    points: tuple[Point, ...]
    out_of_memory_at: int | None
    fits: Mapping[str, Fit]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """Name of the form with the smallest cross-validated error."""
        return best(self.fits)

    @property
    def cost(self) -> Cost:
        """Fitted cost of the best form."""
        return self.fits[self.best].cost

    @property
    def profile(self) -> Profile:
        """Piecewise cost through the points, with the memory limit."""
        batches, seconds = [p.batch for p in self.points], [p.seconds for p in self.points]
        return Profile(batches, seconds, self.out_of_memory_at)

    def figures(self) -> dict[str, object]:
        """Returns the content of the profile file."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "points": [asdict(point) for point in self.points],
            "out_of_memory_at": self.out_of_memory_at,
            "fits": {
                name: {"parameters": fit.parameters, "cv_error": fit.cv_error}
                for name, fit in self.fits.items()
            },
            "best": self.best,
        }

    def save(self, path: str | Path) -> None:
        """Writes a file that `lbbsp_core.Profile.load` reads."""
        write_document(Path(path), self.figures())


def profile_step(
    step: Callable[[int], object] | str | Path,
    *,
    sweep: BatchSweep | None = None,
    timeout: float = 60.0,
    arguments: Sequence[str] = (),
    progress: Progress | None = None,
) -> ProfileResult:
    """Measures how many seconds a step of any framework takes at each batch size.

    ``step(batch_size)`` should do the local work of a worker in one iteration: draw a batch,
    forward, backward, update. It must return when the work is done; for PyTorch the profiler
    synchronises the GPU, and it waits for arrays of JAX and TensorFlow that the step returns.

    Args:
        step: ``"script.py"`` (its function ``step``) or ``"script.py:function"``: runs in a child
            process, which may be killed; a new one is started each time memory runs out. Or a
            function: runs in this process, so that memory may only run out by an exception.
        sweep: Batch sizes to measure, and number of repeats. Defaults to ``BatchSweep()``.
        timeout: Seconds for loading the script, and for each of its steps, > 0.
        arguments: The script's ``sys.argv[1:]``.
        progress: Called after each batch with an activity, the batch size and the seconds.

    Returns:
        The measured points, the memory limit and the fitted cost forms.

    Raises:
        ProfileError: The step cannot be loaded, fails or hangs, or a single sample does not fit.
        ValueError: An argument is invalid.

    Example:
        >>> import time
        >>> sweep = BatchSweep(max_batch=4, repeats=1, point_seconds=0, rounds=1)
        >>> found = profile_step(lambda batch_size: time.sleep(0.004 * batch_size), sweep=sweep)
        >>> found.points[-1].batch, found.out_of_memory_at
        (4, None)
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    sweep = sweep or BatchSweep()
    if callable(step):
        runner: _InProcess | StepProcess = _InProcess(step)
    else:
        runner = StepProcess(*_split_target(step), arguments, timeout)
    with closing(runner):
        sweep_result = sweep.run(runner.step, progress or (lambda *_: None))
        if not sweep_result.points:
            raise ProfileError(
                f"step(1) already runs out of memory ({runner.failure}): profile on a larger "
                "device, or check whether the failure has another cause"
            )
        device = runner.device
    points, notes = repair(sweep_result.points)
    if sweep_result.slow:
        notes.append(
            f"no batch above {points[-1].batch} was tried: a step took longer than "
            f"{sweep.longest_step:g} s"
        )
    fits = fit_costs(points)
    return ProfileResult(device, tuple(points), sweep_result.out_of_memory_at, fits, tuple(notes))


def _split_target(step: str | Path) -> tuple[str, str]:
    """Splits ``script.py:function``; without a name, the function is ``step``."""
    script, colon, function = str(step).rpartition(":")
    if not colon or os.path.exists(step):
        script, function = str(step), "step"
    if not os.path.isfile(script):
        raise ProfileError(f"{script}: there is no such file: give the path of a Python script")
    return script, function


class _InProcess:
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
            self.failure = _step.describe_error(error)
        gc.collect()  # frees the memory of the failed step
        return None

    def close(self) -> None:
        """Does nothing: no process was started."""
