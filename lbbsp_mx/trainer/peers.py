"""Trainers of a process that see what a script does with gradients before a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol
from weakref import WeakValueDictionary

import mxnet as mx

from lbbsp_mx import compat
from lbbsp_mx.trainer.stages import GradientStage


class SeesGradients(Protocol):
    """A trainer that sees what a script does with gradients before its step."""

    _stages: list[GradientStage]

    def sum_for_clipping(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Is told of arrays that are about to be clipped by their global norm."""
        ...


@cache
def with_peers() -> WeakValueDictionary[int, SeesGradients]:
    """Returns the trainers of several workers, which see what scripts do with gradients, by id.

    They are in the order of their creation, the same on all workers: a trainer sums gradients that
    one beside it has too.
    """
    trainers: WeakValueDictionary[int, SeesGradients] = WeakValueDictionary()

    def sum_for_clipping(arrays: Sequence[mx.nd.NDArray]) -> None:
        for trainer in list(trainers.values()):
            trainer.sum_for_clipping(arrays)

    def stages() -> list[GradientStage]:
        return [stage for trainer in list(trainers.values()) for stage in trainer._stages]

    def before_backward() -> None:
        for stage in stages():
            stage.before_backward()

    def after_backward() -> None:
        for stage in stages():
            stage.after_backward()

    compat.watch_clipping(sum_for_clipping)
    compat.watch_backward(before_backward, after_backward)
    return trainers


with_peers()  # before scripts import the function that clips
