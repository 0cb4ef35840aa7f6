"""Optimizers on the parameter servers: with the coordinator of an `AsyncTrainer`, or a script's.

MXNet's servers of ``dist_async`` call the optimizer for every push to a key. Some keys do not
hold parameters: a push to these adds to a sum of gradients, announces that the sums are complete,
or asks the coordinator a question; a pull of the same key returns the answer.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import mxnet as mx
from mxnet.optimizer import Optimizer

from lbbsp_core.runtime.asynchronous.coordination import (
    LOG_WIDTH,
    QUESTION_WIDTH,
    CoordinatorService,
    Table,
)
from lbbsp_core.runtime.reliability.exit import end_now
from lbbsp_mx.store.script_keys import FIRST_OWN_KEY

State = object  # that an optimizer keeps for a parameter


class Keys(NamedTuple):
    """Keys by purpose; a parameter and the sum of its gradients are on the same server.

    MXNet stores a key on the server with number ``key * 9973 mod servers``.
    """

    parameters: int  # whose keys start at 0
    servers: int

    @property
    def sums(self) -> int:
        """Key of the first sum; the gradients of parameter i are summed at ``sums + i``."""
        return -(-self.parameters // self.servers) * self.servers

    @property
    def questions(self) -> int:
        """Key of the coordinator's questions and answers."""
        return 2 * self.sums

    @property
    def log(self) -> int:
        """Key of the coordinator's log."""
        return self.questions + self.servers

    @property
    def barriers(self) -> range:
        """Keys of barriers, one on each server."""
        return range(self.log + 1, self.log + 1 + self.servers)


class _SentOptimizer(Optimizer):
    """Optimizer that servers receive, with the folder from which the script imports modules."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Lets a server know the folder before it reads the rest."""
        return _received, (os.path.abspath(sys.path[0]), type(self)), self.__getstate__()


def _received(folder: str, kind: type[_SentOptimizer]) -> _SentOptimizer:
    if folder not in sys.path:
        sys.path.append(folder)
    return kind.__new__(kind)


class ServerOptimizer(_SentOptimizer):
    """Optimizer that the servers run.

    `service` answers questions, on the server that has their key. A push to a parameter's key is a
    gradient, which updates the parameter. After a push to the server's key of barriers, the next
    one only says that the parameter is to be updated by its sum, times what was pushed there.
    """

    def __init__(self, optimizer: Optimizer, keys: Keys, service: CoordinatorService) -> None:
        super().__init__(multi_precision=optimizer.multi_precision)
        self.optimizer, self._keys, self._service = optimizer, keys, service
        self._sums: dict[int, mx.nd.NDArray] = {}  # by parameter; none without a gradient
        self._due: set[int] = set()  # parameters that wait for their update at a barrier
        self._scale = 1.0

    def create_state_multi_precision(self, index: int, weight: mx.nd.NDArray) -> State:
        """Creates the optimizer's state for a parameter; other keys have none."""
        if index >= self._keys.sums:
            return None
        with _ending_on_error():
            return self.optimizer.create_state_multi_precision(index, weight)

    def update_multi_precision(
        self, index: int, weight: mx.nd.NDArray, grad: mx.nd.NDArray, state: State
    ) -> None:
        """Handles a push according to the purpose of its key."""
        keys, service = self._keys, self._service
        with _ending_on_error():
            if index < keys.sums:
                self._update(index, weight, grad, state)
            elif index < keys.questions:
                weight += grad
                self._sums[index - keys.sums] = weight
            elif index == keys.questions:
                _answer(weight, grad, service.answer, QUESTION_WIDTH)
            elif index == keys.log:
                _answer(weight, grad, service.log, LOG_WIDTH)
            else:
                self._due, self._scale = set(range(keys.parameters)), grad.asscalar()

    def _update(self, index: int, weight: mx.nd.NDArray, grad: mx.nd.NDArray, state: State) -> None:
        """Updates a parameter by the pushed gradient or, at a barrier, by its sum."""
        if index not in self._due:
            self.optimizer.update_multi_precision(index, weight, grad, state)
            return
        self._due.remove(index)
        total = self._sums.pop(index, None)
        if total is not None:
            if self._scale != 1:
                total *= self._scale
            self.optimizer.update_multi_precision(index, weight, total, state)
            total[:] = 0


class ScriptOptimizer(_SentOptimizer):
    """Optimizer that a script has given to a distributed `KVStore`, as the servers run it.

    Servers call it for every key. This package's own keys keep what was summed. An error of the
    script's optimizer is printed by MXNet, which continues, as with its own stores. `indices` are
    those by which the optimizer knows native keys, where they are other numbers.
    """

    def __init__(self, optimizer: Optimizer, indices: Mapping[int, int]) -> None:
        super().__init__(multi_precision=optimizer.multi_precision)
        self.optimizer = optimizer
        self._indices = {key: index for key, index in indices.items() if key != index}

    def create_state_multi_precision(self, index: int, weight: mx.nd.NDArray) -> State:
        """Creates the optimizer's state for a parameter; other keys have none."""
        if index >= FIRST_OWN_KEY:
            return None
        return self.optimizer.create_state_multi_precision(self._indices.get(index, index), weight)

    def update_multi_precision(
        self, index: int, weight: mx.nd.NDArray, grad: mx.nd.NDArray, state: State
    ) -> None:
        """Updates a parameter; other keys take the pushed value."""
        if index >= FIRST_OWN_KEY:
            weight[:] = grad
        else:
            script_index = self._indices.get(index, index)
            self.optimizer.update_multi_precision(script_index, weight, grad, state)


@contextmanager
def _ending_on_error() -> Iterator[None]:
    """Ends the server on an error: MXNet would ignore it, and the workers would keep waiting."""
    try:
        yield
    except BaseException:
        end_now(1, traceback.format_exc())


def _answer(
    weight: mx.nd.NDArray, pushed: mx.nd.NDArray, method: Callable[[Table], Table], width: int
) -> None:
    """Answers a pushed table, which arrives flat, in rows of `width` values."""
    weight[:] = method(pushed.asnumpy().reshape(-1, width)).reshape(weight.shape)
