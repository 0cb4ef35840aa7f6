"""Batches of several devices and of accumulated gradients: `Draws`, `cut`, `with_granularity`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
from mxnet import gluon

from lbbsp_core.order import Indices

logger = logging.getLogger("lbbsp.mx")


class Draws:
    """Loader batches that a sampler has handed out, compared with the steps that were made.

    A loader that prefetches is ahead of the steps by a constant number of batches. If gradients
    accumulate over more batches than planned, or a batch has no step, it moves further ahead. The
    first step of an epoch cannot tell, because the depth of the loader is unknown, nor can a
    sampler that another thread reads. Parts are multiples of `unit`, this worker's devices, where
    they can be.
    """

    def __init__(self, parts: int = 1, unit: int = 1) -> None:
        self.parts, self.unit = parts, unit
        self._first: int | None = None
        self._drawn = 0
        self._depth: int | None = None
        self._thread = 0

    def begin(self, step: int) -> None:
        """Starts to count the batches of an epoch, or of its rest, from global step `step`."""
        self._first, self._drawn, self._depth = step, 0, None

    def count(self) -> None:
        """Counts a loader batch."""
        self._drawn += 1
        self._thread = threading.get_ident()

    def check(self, step: int, params: Sequence[gluon.Parameter]) -> int:
        """Checks accumulated gradients; returns the number of batches that have had no step."""
        adding = self.check_adding(params)
        if self._first is None or step < self._first:
            return 0
        ahead = self._drawn - self.parts * (step - self._first)
        if 1 < self.parts > ahead:
            raise ValueError(
                f"step must follow {self.parts} batches of the loader, as accumulate = "
                f"{self.parts} says, got {ahead}: call it once after every {self.parts} batches"
            )
        if self._thread != threading.get_ident():
            return 0
        self._depth = ahead if self._depth is None else self._depth
        unused = max(0, ahead - self._depth)
        if unused and any(adding):
            more = self.parts + unused
            raise ValueError(
                f"step must follow {self.parts} batches of the loader, got {more} since the last "
                f"step: to accumulate the gradients of {more} batches in one step, create the "
                f"trainer with accumulate={more}, where global_batch_size counts the samples of "
                "all of them"
            )
        return unused

    def check_adding(self, params: Sequence[gluon.Parameter]) -> list[bool]:
        """Returns which parameters accumulate gradients."""
        adding = [param.grad_req == "add" for param in params if param.grad_req != "null"]
        if self.parts > 1 and not all(adding):
            raise ValueError(
                f"accumulate = {self.parts} needs gradients that accumulate, and grad_req='write' "
                "would keep those of the last batch: call "
                "net.collect_params().setattr('grad_req', 'add'), and zero_grad() after each step"
            )
        return adding


def cut(samples: Indices, parts: int, unit: int) -> list[Indices]:
    """Cuts the samples of a worker's step into parts, multiples of `unit` if that can be."""
    if len(samples) < parts:
        raise ValueError(
            f"the plan must give each worker at least accumulate = {parts} samples, got "
            f"{len(samples)}: let the policy respect the limits, or lower accumulate"
        )
    grain = unit if len(samples) % unit == 0 and len(samples) >= parts * unit else 1
    ends = [len(samples) // grain * (i + 1) // parts * grain for i in range(parts)]
    return np.split(samples, ends[:-1])


def part_sizes(size: int, parts: int, unit: int) -> tuple[int, ...]:
    """Returns the sizes of the parts into which `size` samples are cut."""
    return tuple(len(each) for each in cut(np.arange(size), parts, unit))
