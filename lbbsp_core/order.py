"""Global order of samples: assigns samples to steps, and those of a step to workers (rule 1)."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Proportional
from lbbsp_core.types import Limits
from lbbsp_core.validate import require_whole
from lbbsp_core.work import StepShares, Work

logger = logging.getLogger("lbbsp.order")

Indices = npt.NDArray[np.int64]
Snapshot = tuple[Any, ...]
"""Numbers, strings and arrays from which `sampled_order.order_of` makes an order again."""


class Order(ABC):
    """Order of samples, cut into global batches, independent of the workers.

    Steps are counted from the start of the order. Within a step, worker i takes the slice that
    follows those of workers 0 .. i - 1. Orders are equal if their keys are.
    """

    num_samples: int
    """Size of the data set, or samples of an epoch."""
    global_batch_size: int
    """Samples per step, X; some steps may have fewer."""
    seed: int
    """Seed of the order."""
    shuffle: bool | str
    """Whether it is shuffled, or by what."""
    drop_last: bool
    """Whether a short last step is dropped."""
    by_batch: bool
    """Whether global batches are given, and not cut here."""
    steps_per_epoch: int
    """Number of steps per epoch."""
    key: tuple[Any, ...]
    """Arguments that define this order; equal keys give equal orders."""
    work: Work | None = None
    """Work of each sample of the data set, if it is known; not part of the key."""

    def __eq__(self, other: object) -> bool:
        """Compares by `key`: equal orders hold the same samples in each step."""
        return isinstance(other, Order) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def description(self) -> str:
        """Text that workers compare before the first step."""
        return str(self.key)

    @property
    def work_description(self) -> str:
        """Text by which workers compare the work of the samples."""
        return self.work.description if self.work else "none"

    @abstractmethod
    def size(self, step: int) -> int:
        """Returns X_k, the number of samples in global step `step`."""

    def is_short(self, step: int) -> bool:
        """Returns whether global step `step` has fewer than X samples."""
        return self.size(step) != self.global_batch_size

    @abstractmethod
    def position(self, step: int) -> int:
        """Returns the number of samples before global step `step`."""

    @abstractmethod
    def indices(self, step: int) -> Indices:
        """Returns the samples of global step `step`: int64, shape ``(size(step),)``, read-only."""

    def is_drawn(self, step: int) -> bool:
        """Returns whether the samples of global step `step` are known by now."""
        return True

    def snapshot(self, step: int) -> Snapshot:
        """Returns what another process needs to continue this order at global step `step`."""
        return self.key

    def adopt(self, other: Order) -> None:  # noqa: B027  only some orders have such knowledge
        """Takes over what an equal order knows of its epochs; most orders follow from the key."""

    def slice(self, step: int, rank: int, sizes: Sequence[int] | npt.NDArray[np.int64]) -> Indices:
        """Returns the samples of worker `rank` in global step `step` under the plan `sizes`.

        Args:
            step: Global step, >= 0.
            rank: Worker, in [0, workers).
            sizes: Batch sizes by rank, shape ``(workers,)``, with the sum ``size(step)``.

        Returns:
            int64, shape ``(sizes[rank],)``, read-only.

        Raises:
            ValueError: The sizes do not sum to ``size(step)``: samples would be lost.
        """
        ends = [0, *accumulate(map(int, sizes))]
        if ends[-1] != self.size(step):
            raise ValueError(
                f"the plan of step {step} must sum to {self.size(step)}, got {list(sizes)} "
                f"which sums to {ends[-1]}"
            )
        return self.indices(step)[ends[rank] : ends[rank + 1]]

    def shares(
        self,
        step: int,
        plan: tuple[int, ...],
        limits: Sequence[Limits],
        granularity: int = 1,
        parts: int = 1,
    ) -> StepShares:
        """Returns what the workers do in global step `step` under a plan.

        In a short step the plan is scaled down (rule 6): minima are then at most the number of
        `parts` of a batch, and sizes multiples of the largest divisor of the granularity for which
        that is possible. Where the work of the samples is known, it is divided by the plan.

        Example:
            >>> order = GlobalOrder(120 + 13, 120)
            >>> order.shares(1, (24, 48, 48), [Limits(8)] * 3, granularity=4).sizes
            (3, 5, 5)
        """
        if self.is_short(step):
            total = self.size(step)
            plan, limits, granularity = _scaled(plan, total, limits, granularity, parts)
        if self.work is None or not self.is_drawn(step):
            return StepShares(plan, plan, plan)
        return self.work.cut(self.indices(step), plan, limits, granularity)


class GlobalOrder(Order):
    """Seeded order of all samples, cut into global batches, independent of the workers.

    Step k, counted over the whole run, lies in pass ``k // steps_per_pass`` over the data, by
    default the epoch. Each pass has a new permutation. Within a step, worker i takes the slice
    that follows those of workers 0 .. i - 1. For any plan, a step holds the same set of samples,
    and each sample occurs once per pass. A plan that is fixed for an epoch is the re-partition of
    the data set in DBS (arXiv 2007.11831).

    Args:
        num_samples: Size of the data set, >= 1.
        global_batch_size: Samples per step, X, >= 1.
        seed: Seed of the permutations, >= 0.
        shuffle: False keeps the order of the data set in all epochs.
        drop_last: True drops the short last step of a pass.
        steps_per_epoch: Steps of an epoch, >= 1, if an epoch is not one pass over the data. Passes
            then follow each other independently of the epochs.
        by_batch: True keeps the global batches of the data set together, samples 0 .. X - 1 and so
            on, and shuffles only their order; a short last one stays last.

    Raises:
        ValueError: An argument is out of range, or the data set does not fill one step.

    Example:
        >>> order = GlobalOrder(10, 4, shuffle=False)
        >>> order.steps_per_epoch, order.indices(1).tolist(), order.indices(2).tolist()
        (3, [4, 5, 6, 7], [8, 9])
        >>> order.slice(1, rank=1, sizes=[3, 1]).tolist()
        [7]
    """

    steps_per_pass: int
    """Number of steps per pass, including the short last one unless `drop_last`."""

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        steps_per_epoch: int | None = None,
        by_batch: bool = False,
    ) -> None:
        self.num_samples = require_whole("num_samples", num_samples, 1)
        self.global_batch_size = require_whole("global_batch_size", global_batch_size, 1)
        self.seed = require_whole("seed", seed, 0)
        if num_samples < global_batch_size:
            raise ValueError(
                f"the data set must hold at least one global batch: num_samples = {num_samples} "
                f"< global_batch_size = {global_batch_size}; lower global_batch_size or add data"
            )
        self.shuffle, self.drop_last, self.by_batch = shuffle, drop_last, by_batch
        full, remainder = divmod(self.num_samples, self.global_batch_size)
        self.steps_per_pass = self.steps_per_epoch = full + (remainder > 0 and not drop_last)
        if steps_per_epoch is not None:
            steps_per_epoch = require_whole("steps_per_epoch", steps_per_epoch, 1)
            self.steps_per_epoch = steps_per_epoch
        size = self.num_samples, self.global_batch_size
        self.key = (*size, self.seed, shuffle, drop_last, steps_per_epoch, by_batch)
        # Two passes: a reader that prefetches enters the next pass before the other readers.
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)

    @property
    def description(self) -> str:
        """Key and first samples, which another version of NumPy might draw differently."""
        return f"{self.key} {self.indices(0).tolist()}"

    def size(self, step: int) -> int:
        """Returns X_k, the number of samples in global step `step`."""
        start = (step % self.steps_per_pass) * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - start)

    def indices(self, step: int) -> Indices:
        """Returns the samples of global step `step`: int64, shape ``(size(step),)``, read-only."""
        number, position = divmod(step, self.steps_per_pass)
        start, size = position * self.global_batch_size, self.size(step)
        if self.shuffle and not self.by_batch:
            return self._permutation(number)[start : start + size]
        if self.shuffle and size == self.global_batch_size:  # a short one stays last
            start = int(self._permutation(number)[position]) * self.global_batch_size
        return read_only(np.arange(start, start + size))

    def position(self, step: int) -> int:
        """Returns the number of samples before global step `step`; dropped samples count."""
        passes, steps = divmod(step, self.steps_per_pass)
        return passes * self.num_samples + steps * self.global_batch_size

    def _make_permutation(self, number: int) -> Indices:
        """Returns the order of the samples, or of the full batches, in a pass."""
        items = self.num_samples // self.global_batch_size if self.by_batch else self.num_samples
        return read_only(np.random.default_rng((self.seed, number)).permutation(items))


def make_order(
    num_samples: int,
    global_batch_size: int,
    *,
    workers: int,
    most_workers: int = 0,
    parts: int = 1,
    work: npt.ArrayLike | None = None,
    **order: Any,
) -> GlobalOrder:
    """Creates an order of `num_samples` samples in which every worker has samples in each step.

    A short last step with fewer samples than workers, or than parts of all their batches, is
    dropped, with a warning. `most_workers` counts instead, if the job has had so many, since its
    order must stay the same. `work` is the work of each sample, by which steps are cut, see
    `lbbsp_core.work.Work`. The other arguments are those of `GlobalOrder`.

    Raises:
        ValueError: The data set is smaller than one global batch, or `work` is wrong.
    """
    global_order = GlobalOrder(num_samples, global_batch_size, **order)
    if work is not None and global_order.by_batch:
        raise ValueError(
            "work= needs samples with numbers of their own, got a data set whose items are "
            "global batches: pass a data set whose items are samples, or leave work out"
        )
    sample_work = None if work is None else Work(work, num_samples)
    full, remainder = divmod(num_samples, global_batch_size)
    steps_per_epoch = order.get("steps_per_epoch")
    if (steps_per_epoch or full) == 1 and workers > 1:
        logger.warning(
            "an epoch of %d samples has one full step of %d: batches will stay even, because "
            "the first step of an epoch and short steps are excluded from learning; make "
            "epochs longer, for example by repeating the data",
            num_samples if steps_per_epoch is None else global_batch_size,
            global_batch_size,
        )
    most_workers = max(workers, most_workers)
    if 0 < remainder < most_workers * parts and not global_order.drop_last:
        global_order = GlobalOrder(num_samples, global_batch_size, **{**order, "drop_last": True})
        logger.warning(
            "%d of %d samples are dropped in each epoch, because the last step would have "
            "fewer samples than the %d workers%s",
            remainder,
            num_samples,
            most_workers,
            f" times {parts} parts of a batch" if parts > 1 else "",
        )
    global_order.work = sample_work
    return global_order


def _scaled(
    plan: tuple[int, ...], total: int, limits: Sequence[Limits], granularity: int, parts: int
) -> tuple[tuple[int, ...], list[Limits], int]:
    """Returns a plan scaled down to `total`, and the limits and granularity that it satisfies."""
    costs = [Proportional(max(size, 1)) for size in plan]

    def scaled(minimum: int, grain: int) -> tuple[tuple[int, ...], list[Limits], int]:
        within = [replace(bounds, minimum=minimum) for bounds in limits]
        sizes = allocate(costs, total=total, limits=within, granularity=grain)
        return tuple(sizes.tolist()), within, grain

    if (grain := math.gcd(total, granularity)) > 1:
        # A part may be split among devices as well.
        is_roomy = parts > 1 and total >= granularity * len(plan)
        with suppress(ValueError):  # too few samples for multiples
            return scaled(granularity if is_roomy else parts, grain)
    return scaled(parts, 1)


def read_only(indices: Indices) -> Indices:
    """Returns an array after forbidding to write to it."""
    indices.flags.writeable = False  # callers get views of permutations
    return indices


class SampleStream:
    """Seeded stream of samples addressed by position, for training without common steps.

    A position counts samples over the whole run. Each epoch is a new permutation in which each
    sample occurs once, for any sequence of batch sizes.

    Example:
        >>> stream = SampleStream(4, seed=1)
        >>> taken = [*stream.take(0, 3).tolist(), *stream.take(3, 8).tolist()]
        >>> sorted(taken[:4]), sorted(taken[4:])
        ([0, 1, 2, 3], [0, 1, 2, 3])
    """

    def __init__(self, num_samples: int, seed: int = 0, shuffle: bool = True) -> None:
        self._order = GlobalOrder(num_samples, num_samples, seed=seed, shuffle=shuffle)
        self.num_samples = self._order.num_samples

    def take(self, begin: int, end: int) -> Indices:
        """Returns the samples at the positions ``begin .. end - 1``."""
        parts = [np.empty(0, np.int64)]
        while begin < end:
            epoch, first = divmod(begin, self.num_samples)
            part = self._order.indices(epoch)[first : first + end - begin]
            parts.append(part)
            begin += len(part)
        return np.concatenate(parts)
