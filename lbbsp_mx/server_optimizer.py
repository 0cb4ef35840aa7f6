"""What runs on the parameter servers of an `AsyncTrainer`: the optimizer, and the coordinator.

MXNet's servers of ``dist_async`` know one thing: a push of a key calls the optimizer. Some keys
are no parameters: pushes to those add to a sum, or ask the coordinator something; the answer is
what a pull of the same key brings.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
from mxnet.optimizer import Optimizer

from lbbsp_core.runtime.coordinator import Coordinator
from lbbsp_core.runtime.exit import end_now
from lbbsp_core.runtime.protocol import StepMessage, curve, pack, unpack

COMPARE, CLAIM, PUSH, ENTERED, APPLIED, FINISH = range(1, 7)

WIDTH: Final = 7
"""Integers of a question: what, its number, up to five more. See `Answer`."""

LOGGED: Final = 7
"""Integers of a line of the log."""

LINES: Final = 64
"""Lines of the log that one answer holds; the row before them says how many there are."""


class Answer(NamedTuple):
    """What the coordinator has for a worker.

    Args:
        number: Of the worker's last question that it has answered.
        released: Iterations that the worker may have begun.
        pushes: Of all workers.
        updates: Of the model.
        present: Workers that have not left.
        first: What it answered: where the claimed samples begin, or 1 for yes.
        second: Where the claimed samples end.
    """

    number: int = 0
    released: int = 1
    pushes: int = 0
    updates: int = 0
    present: int = 0
    first: int = 0
    second: int = 0


class Keys(NamedTuple):
    """Which key is what; all that belongs together is on the same server.

    MXNet puts a key on the server with number ``key * 9973 mod servers``.

    Args:
        parameters: How many, at keys 0 and up.
        servers: S.
    """

    parameters: int
    servers: int

    @property
    def sums(self) -> int:
        """The sum of the gradients of parameter i is at ``sums + i``."""
        return -(-self.parameters // self.servers) * self.servers

    @property
    def questions(self) -> int:
        """The coordinator's."""
        return 2 * self.sums

    @property
    def log(self) -> int:
        """Its log."""
        return self.questions + self.servers


class ServerOptimizer(Optimizer):
    """The optimizer as the servers run it.

    Args:
        optimizer: Updates parameters.
        keys: What the keys are.
        coordinator: Answers on the server that has the key of the questions.
        plan: What all workers must have been started with, as a fingerprint: fact 0. Fact k is
            what the first worker says that asks about it.
    """

    def __init__(self, optimizer: Any, keys: Keys, coordinator: Coordinator, plan: int) -> None:
        super().__init__(multi_precision=optimizer.multi_precision)
        self._agreed = {0: plan}
        self._optimizer, self._keys, self._coordinator = optimizer, keys, coordinator
        self._sums: dict[int, Any] = {}
        self._answers: list[Answer] = []

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        """The optimizer's own, of a parameter."""
        if index >= self._keys.sums:
            return None
        with _ending_on_error():
            return self._optimizer.create_state_multi_precision(index, weight)

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        """What a push does."""
        with _ending_on_error():
            self._take(index, weight, grad, state)

    def _take(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        keys = self._keys
        if index < keys.sums:
            self._update(index, weight, grad, state)
        elif index < keys.questions:
            weight += grad
            self._sums[index - keys.sums] = weight
        elif index == keys.questions:
            _assign(weight, self._answer(_rows(grad, WIDTH)))
        else:
            _assign(weight, self._lines(_rows(grad, LOGGED)))

    def _update(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        """By the sum where there is one: then what was pushed only says that it is complete."""
        total = self._sums.pop(index, None)
        used = grad if total is None else total
        self._optimizer.update_multi_precision(index, weight, used, state)
        if total is not None:
            total[:] = 0

    def _answer(self, asked: np.ndarray) -> np.ndarray:
        """Answers the one row that asks something; all rows say who may go on."""
        if not self._answers:
            self._answers = [Answer() for _ in asked]
        (worker,) = np.flatnonzero(asked.any(axis=1)).tolist()
        what, number, *values = unpack(asked[worker])
        told = self._ask(worker, what, values)
        coordinator = self._coordinator
        self._answers[worker] = Answer(number, first=told[0], second=told[1])
        facts = {
            "pushes": coordinator.pushes,
            "updates": coordinator.updates,
            "present": len(coordinator.present),
        }
        self._answers = [
            answer._replace(released=released, **facts)
            for answer, released in zip(self._answers, coordinator.released, strict=True)
        ]
        return np.stack([pack(answer) for answer in self._answers])

    def _ask(self, worker: int, what: int, values: list[int]) -> tuple[int, int]:
        coordinator = self._coordinator
        if what == COMPARE:
            return self._agreed.setdefault(values[0], values[1]), 0
        if what == CLAIM:
            return coordinator.claim(worker, values[0])
        if what == PUSH:
            samples, busy_nanoseconds, slope, overhead, seen = values
            cost = curve(StepMessage(slope, overhead, busy_nanoseconds, 0))
            return int(coordinator.push(worker, samples, busy_nanoseconds / 1e9, cost, seen)), 0
        if what == ENTERED:
            return int(coordinator.entered(worker)), 0
        if what == APPLIED:
            coordinator.applied()
            return 0, 0
        return int(coordinator.finish(worker)), 0

    def _lines(self, asked: np.ndarray) -> np.ndarray:
        """The log from a line on: first how many lines, then those."""
        (first, *_) = unpack(asked[0])
        lines = self._coordinator.log(first, LINES)
        rows = [
            [
                line.worker,
                line.iteration,
                line.samples,
                round(line.busy_seconds * 1e9),
                round(line.seconds * 1e6),
                line.staleness,
                line.lead,
            ]
            for line in lines
        ]
        empty = [[0] * LOGGED] * (LINES - len(rows))
        return np.stack([pack(row) for row in [[len(rows), *[0] * (LOGGED - 1)], *rows, *empty]])


@contextmanager
def _ending_on_error() -> Iterator[None]:
    """An error would be lost in MXNet's library, and the workers would wait for ever."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        end_now(1)


def _rows(pushed: Any, width: int) -> np.ndarray:
    """What was pushed, in rows of so many integers: it arrives flat."""
    rows: np.ndarray = pushed.asnumpy().reshape(-1, 2 * width)
    return rows


def _assign(weight: Any, values: np.ndarray) -> None:
    weight[:] = values.reshape(weight.shape)
