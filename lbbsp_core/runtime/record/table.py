"""Steps of a run as arrays, from which reports and summaries compute their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.policy import Even, Observe
from lbbsp_core.runtime.record.figures import Figures, StepTimes
from lbbsp_core.runtime.record.record import Run, RunHeader
from lbbsp_core.types import plausible
from lbbsp_core.validate import one_line

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

_PLAIN = (repr(Even()), repr(Observe()))
"""Policy of plain BSP, as headers name it."""


@dataclass(frozen=True)
class StepTable:
    """Steps since the number of workers last changed; n steps of N workers."""

    header: RunHeader  # facts of the run since its last start
    steps: Integers  # numbers of the steps, shape `(n,)`
    sizes: Floats  # batch sizes in samples, shape `(n, N)`
    amounts: Floats  # work of the workers in mean samples, or samples, shape `(n, N)`
    busy: Floats  # busy seconds, shape `(n, N)`; NaN where they were not measured
    predicted: Floats  # predicted busy seconds, shape `(n, N)`; NaN without a prediction
    wall: Floats  # seconds from barrier to barrier, shape `(n,)`
    hidden: Floats  # seconds in which communication was hidden, shape `(n,)`
    even: Floats  # least estimate of the slowest worker's seconds with even batches, shape `(n,)`
    even_at_most: Floats  # the largest estimate, shape `(n,)`
    is_regular: Booleans  # whether a step is full and no measurement was excluded, shape `(n,)`
    is_short: Booleans  # whether a step has fewer samples than the global batch size, shape `(n,)`
    # driving factors, and what extensions have recorded, by name, shape `(n, N)`; NaN where unknown
    drivers: dict[str, Floats]
    values: dict[str, Floats]
    has_work: bool  # whether `amounts` are work rather than samples

    @property
    def workers(self) -> int:
        """Number of workers, N."""
        return self.sizes.shape[1]

    @property
    def slowest(self) -> Floats:
        """Busy seconds of the slowest worker, shape ``(n,)``."""
        return np.asarray(self.busy.max(axis=1))

    @property
    def seconds(self) -> Floats:
        """Seconds of the steps, which are not shorter than those of the slowest worker."""
        return np.maximum(self.wall, self.slowest)

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return float(np.median(self.seconds))

    @property
    def samples_per_second(self) -> float:
        """Throughput of all workers together: samples of all steps / their time."""
        return float(self.sizes.sum() / self.seconds.sum())

    @property
    def figures(self) -> Figures:
        """Figures of all steps, in which all workers must have been measured."""
        columns = (self.seconds, self.busy.mean(axis=1), self.slowest, self.even, self.hidden,
                   self.even_at_most)  # fmt: skip
        figures = StepTimes(*(float(column.sum()) for column in columns)).figures
        assert figures is not None, "a step without a time was not measured"
        return figures

    @property
    def is_measured(self) -> Booleans:
        """Steps that show the speeds of all workers, shape ``(n,)``: regular and measured.

        Without any such step, those in which all workers were measured, although they are short
        or excluded: a record of a single step has figures, too.
        """
        by_worker = plausible(self.busy) & plausible(self.sizes) & plausible(self.amounts)
        complete = by_worker.all(axis=1) & plausible(self.wall)
        regular = complete & self.is_regular
        return np.asarray(regular if regular.any() else complete)

    @property
    def is_full(self) -> Booleans:
        """Full steps, or all if all are short, shape ``(n,)``."""
        return self.is_short if self.is_short.all() else ~self.is_short

    @property
    def is_even(self) -> bool:
        """True if the batches of each full step are as equal as integers allow."""
        return not self.has_work and bool((np.ptp(self.sizes[self.is_full], axis=1) <= 1).all())

    @property
    def is_plain(self) -> bool:
        """True for plain BSP: by the policy in the header, or else by even batches.

        Limits and the granularity may keep the batches of plain BSP from being equal, and those
        of a policy that adapts may stay equal.
        """
        return self.is_even if self.header.policy is None else self.header.policy in _PLAIN

    def select(self, rows: Booleans) -> StepTable:
        """Returns the table of some of its steps, given as a mask of shape ``(n,)``."""
        shorter: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                shorter[name] = value[rows]
            elif isinstance(value, dict):
                shorter[name] = {key: column[rows] for key, column in value.items()}
        return replace(self, **shorter)


def step_table(run: Run) -> StepTable:
    """Converts the steps of a run since the number of workers last changed."""
    if not run.steps:
        raise ValueError("the run must have at least one step, got none: train for longer")
    lines = run.with_same_workers()
    times = [StepTimes.of(line) for line in lines]
    busy = np.array([line.busy_seconds for line in lines], np.float64)
    return StepTable(
        header=run.header,
        steps=np.array([line.step for line in lines], np.int64),
        sizes=np.array([line.sizes for line in lines], np.float64),
        amounts=np.array([line.amounts for line in lines], np.float64),
        busy=np.where(plausible(busy), busy, np.nan),
        predicted=np.array([line.predicted_seconds for line in lines], np.float64),
        wall=np.array([line.wall_seconds for line in lines], np.float64),
        hidden=np.array([line.hidden_seconds for line in lines], np.float64),
        even=np.array([step_times.even for step_times in times], np.float64),
        even_at_most=np.array([step_times.even_at_most for step_times in times], np.float64),
        is_regular=np.array([line.is_regular for line in lines], np.bool_),
        is_short=np.array([line.short for line in lines], np.bool_),
        drivers=_by_name([line.drivers for line in lines], busy.shape[1]),
        values=_by_name([line.values for line in lines], busy.shape[1]),
        has_work=any(line.work for line in lines),
    )


def worker_names(header: RunHeader, workers: int) -> list[str]:
    """Returns a name for each worker, with its host where it is known.

    Example:
        >>> from lbbsp_core.runtime.record.record import RunHeader
        >>> header = RunHeader(framework="none", workers=2, global_batch_size=8, versions={},
        ...                    hosts=("a", "b"))
        >>> worker_names(header, 2)
        ['worker 0 on a', 'worker 1 on b']
    """
    named_workers = known_workers(header, workers)
    return [f"worker {rank}" + f" on {host}" * bool(host) for rank, host, _ in named_workers]


def known_workers(header: RunHeader, workers: int) -> list[tuple[int, str, str]]:
    """Returns rank, host and device of each worker; empty texts if those of any are unknown."""
    columns = (
        [one_line(text) for text in texts] if len(texts) == workers else [""] * workers
        for texts in (header.hosts, header.devices)
    )
    return list(zip(range(workers), *columns, strict=True))


def _by_name(
    rows: Sequence[Mapping[str, Sequence[float | None]]], workers: int
) -> dict[str, Floats]:
    """Returns the named values of each step as arrays."""
    lacking = (None,) * workers
    return {
        name: np.array([row.get(name, lacking) for row in rows], np.float64)
        for name in dict.fromkeys(name for row in rows for name in row)
    }
