"""What `LoadBalancer.dataset` was given, and the source that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy.typing as npt
import tensorflow as tf
from keras.utils import PyDataset

from lbbsp_core.validate import require_flag, require_integer
from lbbsp_tf.compat import Nest
from lbbsp_tf.data.arrays import Arrays
from lbbsp_tf.data.items import Batches, Items
from lbbsp_tf.data.mapping import SampleMap
from lbbsp_tf.data.source import Source
from lbbsp_tf.data.stream import Stream


@dataclass(frozen=True)
class InputOptions:
    """Arguments of `LoadBalancer.dataset`, which documents them."""

    x: Nest = None
    y: Nest = None
    sample_weight: Nest = None
    seed: int | None = None
    map: SampleMap | None = None
    batch_map: SampleMap | None = None
    shuffle: bool | None = None
    steps_per_epoch: int | None = None
    validation_split: float = 0.0
    num_samples: int | None = None
    batched: bool | None = None
    padded: bool | None = None
    readers: int = 1
    prefetch: int | None = None
    work: npt.ArrayLike | None = None

    def __post_init__(self) -> None:
        require_integer("readers", self.readers, 1)
        if self.prefetch is not None:
            require_integer("prefetch", self.prefetch, 0)
        for name in ("shuffle", "batched", "padded"):
            if (value := getattr(self, name)) is not None:
                require_flag(name, value)

    def open(self, global_batch_size: int) -> Source:
        """Returns the source of the data; an error names the remedy for what is not supported."""
        if isinstance(self.x, tf.data.Dataset):
            self._refuse_for_streams()
            return Stream(
                self.x,
                global_batch_size,
                num_samples=self.num_samples,
                batched=self.batched,
                steps_per_epoch=self.steps_per_epoch,
            )
        if self.num_samples is not None or self.batched is not None:
            raise ValueError(
                "num_samples and batched are options for a tf.data.Dataset only: leave them out"
            )
        _refuse_sequences(self.x)
        if _is_array_like(self.x):
            return Arrays(self.x, self.y, self.sample_weight, self.validation_split)
        kind = type(self.x).__name__
        if self.y is not None or self.sample_weight is not None:
            raise ValueError(
                f"y and sample_weight must be None if x is a {kind}: let its items be (x, y) or "
                "(x, y, sample_weight)"
            )
        if self.validation_split:
            raise ValueError(
                f"validation_split needs arrays, got a {kind}: split the data set yourself, and "
                "pass fit(..., validation_data=...)"
            )
        if isinstance(self.x, PyDataset):
            return Batches(self.x, global_batch_size)
        if hasattr(self.x, "__len__") and hasattr(self.x, "__getitem__"):
            return Items(self.x, self.readers, any_length=self.padded is not None)
        raise ValueError(
            f"x must be arrays, a tf.data.Dataset, a keras.utils.PyDataset, or an object with "
            f"__len__ and __getitem__ whose items are samples, got {kind}: for data that can only "
            "be iterated over, use tf.data.Dataset.from_generator(function, output_signature=...)"
        )

    def _refuse_for_streams(self) -> None:
        """Raises an error for options that have no effect on a `tf.data.Dataset`."""
        by_items = "let its elements be (x, y) or (x, y, sample_weight)"
        by_shuffle = "call its shuffle(buffer_size, seed=...) first"
        by_split = "split it with take() and skip(), and pass validation_data= to fit"
        by_numbers = (
            "its samples have no numbers; pass arrays, or an object with __len__ and __getitem__ "
            "whose items are samples"
        )
        for name, argument, remedy in (
            ("y", self.y, by_items),
            ("sample_weight", self.sample_weight, by_items),
            ("validation_split", self.validation_split or None, by_split),
            ("shuffle", self.shuffle, by_shuffle),
            ("seed", self.seed, by_shuffle),
            ("work", self.work, by_numbers),
        ):
            if argument is not None:
                raise ValueError(f"{name} must not be given for a tf.data.Dataset: {remedy}")


def _is_array_like(x: Nest) -> bool:
    """Returns whether `x` is an array of samples or a nest of such arrays."""
    return isinstance(x, (list, tuple, Mapping, tf.RaggedTensor, tf.SparseTensor)) or (
        hasattr(x, "shape") and hasattr(x, "dtype")
    ) or hasattr(x, "iloc")  # fmt: skip


def _refuse_sequences(x: Nest) -> None:
    """Raises an error for data that only one process could iterate over."""
    classes = [f"{c.__module__}.{c.__name__}" for c in type(x).__mro__]
    if any(c.startswith("torch.utils.data") and c.endswith(".DataLoader") for c in classes):
        raise ValueError(
            "x must not be a torch DataLoader, whose batches have a fixed size: pass its data set, "
            "loader.dataset, and readers= in place of num_workers="
        )
    if hasattr(x, "__next__") and not hasattr(x, "shape") and not isinstance(x, PyDataset):
        raise ValueError(
            f"x must not be a {type(x).__name__}, which can be read only once: pass "
            "tf.data.Dataset.from_generator(function, output_signature=...)"
        )
