"""The global order of samples: which ones step k holds, and which of them are worker i's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class GlobalOrder:
    """A seeded order of all samples, cut into global batches, independent of the workers.

    Step k, counted over the whole run, lies in epoch ``k // steps_per_epoch``. Every epoch has
    a permutation of its own; worker i takes the slice of a step after the workers before it.
    Whatever the plan, the union of a step is the same set and each sample comes once an epoch.

    Args:
        num_samples: Length of the data set, >= 1.
        global_batch_size: X, samples a step, >= 1.
        seed: Seed of the permutations, >= 0.
        shuffle: False keeps the data set's own order in every epoch.
        drop_last: True drops the short last step of an epoch.

    Raises:
        ValueError: Nonsensical sizes, or a data set that does not fill a single step.

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
        for name, value, least in (
            ("num_samples", num_samples, 1),
            ("global_batch_size", global_batch_size, 1),
            ("seed", seed, 0),
        ):
            if value != int(value) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
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
        # Two epochs, because a reader ahead of the others crosses the border before they do.
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)

    def __eq__(self, other: object) -> bool:
        """Equal orders hold the same samples in every step."""
        return isinstance(other, GlobalOrder) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[int, int, int, bool, bool]:
        """What makes this order: the arguments of `GlobalOrder`."""
        return (
            self.num_samples,
            self.global_batch_size,
            self.seed,
            self.shuffle,
            self.drop_last,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Steps in every epoch, the short last one included unless `drop_last`."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def size(self, step: int) -> int:
        """X_k: samples in global step `step`."""
        start = (step % self.steps_per_epoch) * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - start)

    def indices(self, step: int) -> Indices:
        """Samples of global step `step`: int64, shape ``(size(step),)``."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.global_batch_size
        return self._permutation(epoch if self.shuffle else 0)[start : start + self.size(step)]

    def slice(self, step: int, rank: int, sizes: Sequence[int] | npt.NDArray[np.int64]) -> Indices:
        """Worker `rank`'s samples of global step `step` under the plan `sizes`.

        Args:
            step: Global step, >= 0.
            rank: Worker, in [0, workers).
            sizes: The plan, shape ``(workers,)``, summing to ``size(step)``.

        Returns:
            int64, shape ``(sizes[rank],)``.

        Raises:
            ValueError: The plan does not sum to the step's size: samples would be lost.
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
        order.flags.writeable = False  # what we hand out are views of it
        return order


class SampleStream:
    """Samples without steps, for workers that are not in step: dealt out by position.

    A position counts samples over the whole run; each epoch is a new seeded permutation, in which
    each sample comes once, whoever takes how many at a time.

    Args:
        num_samples: Length of the data set, >= 1.
        seed: Seed of the permutations, >= 0.

    Raises:
        ValueError: Nonsensical numbers.

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
        """Length of the data set."""
        return self._order.num_samples

    def take(self, begin: int, end: int) -> Indices:
        """The samples from one position to another: int64, shape ``(end - begin,)``."""
        parts = [np.empty(0, np.int64)]
        while begin < end:
            epoch, first = divmod(begin, self.num_samples)
            part = self._order.indices(epoch)[first : first + end - begin]
            parts.append(part)
            begin += len(part)
        return np.concatenate(parts)
