"""Samples of which batches are multiples, unless the user says otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lbbsp_core.policy import BatchConstraints
from lbbsp_core.runtime.loop.bounds import has_plan

GPU_GRANULARITY: Final = 8
"""Tensor cores compute in tiles: matrices of 16-bit numbers are best in multiples of 8 (NVIDIA,
Matrix Multiplication Background User's Guide).
"""

_FEWEST_GRANULES: Final = 8  # of an even share, so that batches can still follow speeds


def default_granularity(on_gpu: bool, workers: int, global_batch_size: int) -> int:
    """Returns the granularity that suits a worker's device.

    Example:
        >>> [default_granularity(True, workers, 512) for workers in (8, 10)]
        [8, 1]
    """
    if on_gpu and workers > 1 and global_batch_size >= _FEWEST_GRANULES * GPU_GRANULARITY * workers:
        return GPU_GRANULARITY
    return 1


def coarsen(constraints: BatchConstraints, granularity: int) -> BatchConstraints:
    """Returns constraints with another granularity if there is a plan then, else as they are."""
    coarse = replace(constraints, granularity=granularity)
    return coarse if has_plan(coarse) else constraints
