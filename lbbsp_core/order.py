"""Global order of samples: assigns samples to steps, and those of a step to workers (rule 1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class GlobalOrder:
    """Seeded order of all samples, cut into global batches, independent of the workers.

    Step k, counted over the whole run, lies in epoch ``k // steps_per_epoch``. Each epoch has a
    new permutation. Within a step, worker i takes the slice that follows those of workers
    0 .. i - 1. For any plan, a step holds the same set of samples, and each sample occurs once
    per epoch. A plan that is fixed for an epoch is the re-partition of the data set in DBS
    (arXiv 2007.11831).

    Args:
        num_samples: Size of the data set, >= 1.
        global_batch_size: Samples per step, X, >= 1.
        seed: Seed of the permutations, >= 0.
        shuffle: False keeps the order of the data set in all epochs.
        drop_last: True drops the short last step of an epoch.

    Raises:
        ValueError: An argument is out of range, or the data set does not fill one step.

    Example:
        >>> order = GlobalOrder(10, 4, shuffle=False)
        >>> order.steps_per_epoch, order.indices(1).tolist(), order.indices(2).tolist()
        (3, [4, 5, 6, 7], [8, 9])
        >>> order.slice(1, rank=1, sizes=[3, 1]).tolist()
        [7]
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        for name, value, minimum in (
            ("num_samples", num_samples, 1),
            ("global_batch_size", global_batch_size, 1),
            ("seed", seed, 0),
        ):
            if value != int(value) or value < minimum:
                raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
        if num_samples < global_batch_size:
            raise ValueError(
                f"the data set must hold at least one global batch: num_samples = {num_samples} "
                f"< global_batch_size = {global_batch_size}; lower global_batch_size or add data"
            )
        self.num_samples = int(num_samples)
        self.global_batch_size = int(global_batch_size)
        self.seed = int(seed)
        self.shuffle = shuffle
        self.drop_last = drop_last
        # Two epochs: a reader that prefetches enters the next epoch before the other readers.
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)

    def __eq__(self, other: object) -> bool:
        """Compares by `key`: equal orders hold the same samples in each step."""
        return isinstance(other, GlobalOrder) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[int, int, int, bool, bool]:
        """Arguments that define this order; equal keys give equal orders."""
        return (
            self.num_samples,
            self.global_batch_size,
            self.seed,
            self.shuffle,
            self.drop_last,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch, including the short last one unless `drop_last`."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def size(self, step: int) -> int:
        """Returns X_k, the number of samples in global step `step`."""
        start = (step % self.steps_per_epoch) * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - start)

    def indices(self, step: int) -> Indices:
        """Returns the samples of global step `step`: int64, shape ``(size(step),)``, read-only."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.global_batch_size
        return self._permutation(epoch if self.shuffle else 0)[start : start + self.size(step)]

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
        total = sum(int(size) for size in sizes)
        if total != self.size(step):
            raise ValueError(
                f"the plan of step {step} must sum to {self.size(step)}, got {list(sizes)} "
                f"which sums to {total}"
            )
        start = sum(int(size) for size in sizes[:rank])
        return self.indices(step)[start : start + int(sizes[rank])]

    def _make_permutation(self, epoch: int) -> Indices:
        if not self.shuffle:
            order = np.arange(self.num_samples)
        else:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
        order.flags.writeable = False  # callers get views of it
        return order


class SampleStream:
    """Seeded stream of samples addressed by position, for training without common steps.

    A position counts samples over the whole run. Each epoch is a new permutation in which each
    sample occurs once, for any sequence of batch sizes.

    Args:
        num_samples: Size of the data set, >= 1.
        seed: Seed of the permutations, >= 0.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> stream = SampleStream(4, seed=1)
        >>> first, rest = stream.take(0, 3), stream.take(3, 8)
        >>> sorted([*first, rest[0]]), sorted(rest[1:].tolist())
        ([0, 1, 2, 3], [0, 1, 2, 3])
    """

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        self._order = GlobalOrder(num_samples, num_samples, seed=seed)

    @property
    def num_samples(self) -> int:
        """Size of the data set."""
        return self._order.num_samples

    def take(self, begin: int, end: int) -> Indices:
        """Returns the samples at the positions ``begin .. end - 1``.

        Args:
            begin: First position, >= 0.
            end: Position after the last one, >= `begin`.

        Returns:
            int64, shape ``(end - begin,)``.
        """
        parts = [np.empty(0, np.int64)]
        while begin < end:
            epoch, first = divmod(begin, self.num_samples)
            part = self._order.indices(epoch)[first : first + end - begin]
            parts.append(part)
            begin += len(part)
        return np.concatenate(parts)
