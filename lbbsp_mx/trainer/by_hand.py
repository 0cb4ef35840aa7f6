"""Gradients that the script changes between backward and step: `ChangedByHand`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

from lbbsp_mx.parameters import learning
from lbbsp_mx.trainer.stages import Gradients, GradientStage

logger = logging.getLogger("lbbsp.mx")

_LOOKED_AT: Final = 4096
"""Elements of each gradient that are compared: copies of all would take much memory."""

_FIRST_STEPS: Final = 3
_EVERY: Final = 50
"""Gradients are compared in the first steps, and then at this distance."""

_SMALL: Final = 0.01
"""Part of the largest gradient below which one may be rounded too much in half precision."""

_TOLERANCE: Final = 0.02
"""Difference of the logarithms of two factors that are the same."""


class ChangedByHand(GradientStage):
    """Warns once if gradients are changed by other factors in one step than in another.

    A constant, or a mask, does the same to the sum over the workers. What depends on the gradients
    of this worker's batch, such as clipping, does not. Powers of two are those of loss scaling.
    """

    def __init__(self, params: Sequence[gluon.Parameter]) -> None:
        self._params, self._step = params, 0
        self._computed: dict[int, mx.nd.NDArray] = {}  # by the number of the parameter
        self._pairs: dict[int, tuple[mx.nd.NDArray, mx.nd.NDArray]] = {}  # computed, and left
        self._factors: dict[int, npt.NDArray[Any]] = {}  # of the last comparison
        self._has_warned = False

    def after_backward(self) -> None:
        """Copies gradients that have been computed, in some steps."""
        self._compare()
        self._computed = {}
        if not self._has_warned and (self._step < _FIRST_STEPS or self._step % _EVERY == 0):
            params = ((number, self._params[number]) for number in learning(self._params))
            with mx.autograd.pause():
                self._computed = {
                    number: _head(param.list_grad()[0]).copy()
                    for number, param in params
                    if param._grad_stype == "default" and param._data and param._data[0]._fresh_grad
                }

    def before_sums(self, gradients: Gradients) -> None:
        """Copies what the script has left of them, without a wait for the backward pass."""
        self._pairs = {
            number: (computed, _head(gradients.arrays[number][0]).copy())
            for number, computed in self._computed.items()
            if number in gradients.arrays
        }
        self._computed, self._step = {}, self._step + 1

    def _compare(self) -> None:
        """Compares both, one step later, when they are there."""
        pairs, self._pairs = self._pairs, {}
        for number, pair in pairs.items():
            old, new = (array.asnumpy().astype(np.float64) for array in pair)
            old[np.abs(old) < _SMALL * np.abs(old).max(initial=0)] = np.nan
            with np.errstate(divide="ignore", invalid="ignore"):
                factors = new / old
                change = np.log2(factors / self._factors.get(number, factors))
            self._factors[number] = factors
            known = change[~np.isnan(change)]  # without what is small, or masked
            is_same = np.allclose(known, np.round(known[:1]), atol=_TOLERANCE)  # also of none
            if not is_same and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "gradients of %s are changed between backward and step, and not by the same "
                    "factors in each step, as by clipping: unless all workers have the same "
                    "factors, what is learned depends on how batches are divided; call "
                    "trainer.allreduce_grads(), change the mean gradients, and call "
                    "trainer.update(1)",
                    self._params[number].name,
                )


def _head(array: mx.nd.NDArray) -> mx.nd.NDArray:
    return array.reshape((-1,))[:_LOOKED_AT]
