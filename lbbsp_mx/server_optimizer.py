"""What runs on the parameter servers of an `AsyncTrainer`: the optimizer, and the coordinator.

MXNet's servers of ``dist_async`` know one thing: a push of a key calls the optimizer. Some keys
are no parameters: a push to those adds to a sum, or asks the coordinator; a pull of the same key
brings the answer.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import mxnet as mx
from mxnet.optimizer import Optimizer

from lbbsp_core.runtime.coordination import (
    LOG_WIDTH,
    QUESTION_WIDTH,
    CoordinatorService,
    Table,
)
from lbbsp_core.runtime.exit import end_now

State = object
"""What an optimizer keeps of a parameter."""


class Keys(NamedTuple):
    """Keys by purpose; all that belong together are on the same server.

    MXNet puts a key on the server with number ``key * 9973 mod servers``.

    Args:
        parameters: Number of parameters, at keys 0 and up.
        servers: S.
    """

    parameters: int
    servers: int

    @property
    def sums(self) -> int:
        """Key of the first sum: that of the gradients of parameter i is at ``sums + i``."""
        return -(-self.parameters // self.servers) * self.servers

    @property
    def questions(self) -> int:
        """Key of the coordinator's questions and answers."""
        return 2 * self.sums

    @property
    def log(self) -> int:
        """Key of the coordinator's log."""
        return self.questions + self.servers


class ServerOptimizer(Optimizer):
    """Optimizer as the servers run it.

    Args:
        optimizer: Updates parameters.
        keys: Purposes of the keys.
        service: Answers, on the server that has the key of the questions.
    """

    def __init__(self, optimizer: Optimizer, keys: Keys, service: CoordinatorService) -> None:
        super().__init__(multi_precision=optimizer.multi_precision)
        self.optimizer, self._keys, self._service = optimizer, keys, service
        self._sums: dict[int, mx.nd.NDArray] = {}

    def create_state_multi_precision(self, index: int, weight: mx.nd.NDArray) -> State:
        """Creates the optimizer's own state of a parameter."""
        if index >= self._keys.sums:
            return None
        with _ending_on_error():
            return self.optimizer.create_state_multi_precision(index, weight)

    def update_multi_precision(
        self, index: int, weight: mx.nd.NDArray, grad: mx.nd.NDArray, state: State
    ) -> None:
        """Handles a push."""
        with _ending_on_error():
            self._handle(index, weight, grad, state)

    def _handle(self, index: int, weight: mx.nd.NDArray, grad: mx.nd.NDArray, state: State) -> None:
        keys = self._keys
        if index < keys.sums:
            self._update(index, weight, grad, state)
        elif index < keys.questions:
            weight += grad
            self._sums[index - keys.sums] = weight
        elif index == keys.questions:
            _assign(weight, self._service.answer(_table(grad, QUESTION_WIDTH)))
        else:
            _assign(weight, self._service.log(_table(grad, LOG_WIDTH)))

    def _update(self, index: int, weight: mx.nd.NDArray, grad: mx.nd.NDArray, state: State) -> None:
        """Updates by the sum where there is one: the push then only says that it is complete."""
        total = self._sums.pop(index, None)
        used = grad if total is None else total
        self.optimizer.update_multi_precision(index, weight, used, state)
        if total is not None:
            total[:] = 0


@contextmanager
def _ending_on_error() -> Iterator[None]:
    """Ends the server at an error, which MXNet's library would lose while the workers wait."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        end_now(1)


def _table(pushed: mx.nd.NDArray, width: int) -> Table:
    """Returns what was pushed, which arrives flat, in rows of `width` values."""
    return pushed.asnumpy().reshape(-1, width)


def _assign(weight: mx.nd.NDArray, values: Table) -> None:
    weight[:] = values.reshape(weight.shape)
