"""What the sum of a step's gradients is divided by: `StepSizes`, and weights of samples."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple, SupportsFloat, TypeAlias

import mxnet as mx

from lbbsp_mx import compat

logger = logging.getLogger("lbbsp.mx")

Weight: TypeAlias = "SupportsFloat | mx.nd.NDArray | None"
"""Weight of a worker's batch: a number, an array with one value, or none."""


class StepSizes(NamedTuple):
    """Sizes of the batches of a step."""

    local: int  # samples of this worker
    parts: tuple[int, ...]  # samples of the parts of its batch
    total: int  # samples of all workers, X_k
    rank: int
    is_planned: bool  # false in a single worker without a batch sampler, whose batches are unknown

    def check(self, batch_size: int) -> None:
        """Checks the batch size that is passed to `step`."""
        if self.is_planned and batch_size != self.local and batch_size not in self.parts:
            raise ValueError(
                f"step must be called with the {self.local} samples that the plan gives to worker "
                f"{self.rank}{self._or_a_part}, got {batch_size!r}: draw batches by "
                "trainer.batch_sampler(...), or of trainer.sizes[trainer.kvstore.rank] samples, "
                "and make a step for each; to accumulate gradients over several batches, pass "
                "accumulate to the trainer"
            )

    def divisor_of_means(self, batch_size: float) -> float:
        """Returns 1, by which `update` divides mean gradients, if its batch size is plausible."""
        if self.is_planned and batch_size not in (1, self.local, *self.parts, self.total):
            raise ValueError(
                f"update must be called with 1, the {self.local} samples of worker {self.rank}"
                f"{self._or_a_part}, or the {self.total} samples of all workers, got "
                f"{batch_size!r}: allreduce_grads has divided the gradients, so that each of them "
                "has the same effect"
            )
        return 1.0

    @property
    def _or_a_part(self) -> str:
        sizes = sorted(set(self.parts) - {self.local})
        return f", or those of a part ({', '.join(map(str, sizes))})" if sizes else ""


def checked_weight(weight: Weight) -> float | None:
    """Returns the weight of this worker's batch as a number."""
    if weight is None:
        return None
    number = float(weight.asnumpy().item() if isinstance(weight, mx.nd.NDArray) else weight)
    if not 0 <= number < math.inf:
        raise ValueError(
            f"weight must be a finite number >= 0, got {weight!r}: pass the number of valid "
            "tokens, or the sum of the sample weights, in this worker's batch"
        )
    return number


def total_weight(weights: Sequence[float] | None) -> float:
    """Returns the sum of the weights of all workers, by rank."""
    total = math.fsum(weights or ())
    if total <= 0:
        raise ValueError(
            "the sum of `weight` over all workers must be > 0, got 0: a global batch needs at "
            "least one valid token or sample with a positive weight"
        )
    return total


class SampleWeights:
    """Notes that a gluon loss has got a `sample_weight` while gradients were recorded."""

    def __init__(self) -> None:
        self._seen = self._has_warned = False
        compat.watch_sample_weights(self._notice)

    def warn_of_means(self, weight: float | None) -> None:
        """Warns once if such a loss is followed by a step without `weight`."""
        if self._seen and weight is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a loss has a sample_weight, and the update divides by the number of samples, not "
                "by the sum of their weights or the number of valid tokens: to divide by that "
                "sum, let the loss be a sum, not a mean, over the tokens of a sample, and call "
                "trainer.step(batch_size, weight=...) with the sum of this worker's weights"
            )

    def _notice(self) -> None:
        self._seen = self._seen or mx.autograd.is_recording()


sample_weights = functools.lru_cache(SampleWeights)
"""Returns the only observer of this process; gluon's losses are patched once."""
