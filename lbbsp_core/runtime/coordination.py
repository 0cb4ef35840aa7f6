"""Questions of workers to the coordinator, and its answers, as rows of exact integers.

Workers that need not be in step share a *table* with one row for each of them, on the server
where the coordinator runs. A worker writes a question into its own row; the server replaces the
whole table by answers, which the worker then reads. Any transport that can push and pull an array
of float32 will do (see `lbbsp_core.runtime.protocol` for the exactness).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.runtime.coordinator import Coordinator
from lbbsp_core.runtime.protocol import StepMessage, curve, pack, unpack
from lbbsp_core.runtime.record import PUSH_INTEGERS, PushLine

Table = npt.NDArray[np.float32]

QUESTION_INTEGERS: Final = 7
"""Integers of a question: what, its number, up to five more. As many as those of an `Answer`."""

LOG_ROWS: Final = 64
"""Pushes that one reading of the log brings; the row before them holds their number."""

QUESTION_WIDTH: Final = 2 * QUESTION_INTEGERS
LOG_WIDTH: Final = 2 * PUSH_INTEGERS
"""Limbs of a row, see `lbbsp_core.runtime.protocol.pack`."""


class Question(IntEnum):
    """What a worker asks."""

    COMPARE = 1
    CLAIM = 2
    PUSH = 3
    ENTERED = 4
    APPLIED = 5
    FINISH = 6


class Answer(NamedTuple):
    """What the coordinator has for a worker.

    Args:
        number: Of the worker's last question that it has answered.
        released: Iterations that the worker may have started.
        pushes: Of all workers.
        updates: Of the model.
        active: Workers that have not departed.
        first: The answer: the first of the claimed samples, or 1 for yes.
        second: The end of the claimed samples.
    """

    number: int = 0
    released: int = 1
    pushes: int = 0
    updates: int = 0
    active: int = 0
    first: int = 0
    second: int = 0


def empty_questions(workers: int) -> Table:
    """Makes a table without questions or answers, shape ``(workers, QUESTION_WIDTH)``."""
    return np.zeros((workers, QUESTION_WIDTH), np.float32)


def empty_log() -> Table:
    """Makes a table for a part of the log, shape ``(1 + LOG_ROWS, LOG_WIDTH)``."""
    return np.zeros((1 + LOG_ROWS, LOG_WIDTH), np.float32)


def question_table(
    workers: int, rank: int, question: Question, number: int, values: list[int]
) -> Table:
    """Makes a table with one question, in the row of worker `rank`."""
    table, row = empty_questions(workers), [int(question), number, *values]
    table[rank] = pack([*row, *[0] * (QUESTION_INTEGERS - len(row))])
    return table


def log_request(first: int) -> Table:
    """Makes a table that asks for the pushes from number `first` on."""
    table = empty_log()
    table[0] = pack([first, *[0] * (PUSH_INTEGERS - 1)])
    return table


def read_log(table: Table) -> list[PushLine]:
    """Reads the pushes of a table that `CoordinatorService.log` has made."""
    (count, *_), *rows = map(unpack, table)
    return [PushLine.from_integers(row) for row in rows[:count]]


class CoordinatorService:
    """Answers the tables of questions that workers push.

    Args:
        coordinator: Decides.
        fingerprint: Of the options that all workers must have been started with: fact 0. Fact k
            is what the first worker says that asks about it.
    """

    def __init__(self, coordinator: Coordinator, fingerprint: int) -> None:
        self._coordinator = coordinator
        self._facts = {0: fingerprint}
        self._answers: list[Answer] = []

    def answer(self, table: Table) -> Table:
        """Answers the one row that holds a question; all rows say who may proceed.

        Args:
            table: Shape ``(workers, QUESTION_WIDTH)``.

        Returns:
            Answers by rank, of the same shape.
        """
        if not self._answers:
            self._answers = [Answer() for _ in table]
        (worker,) = np.flatnonzero(table.any(axis=1)).tolist()
        question, number, *values = unpack(table[worker])
        first, second = self._decide(worker, Question(question), values)
        self._answers[worker] = Answer(number, first=first, second=second)
        coordinator = self._coordinator
        self._answers = [
            answer._replace(
                released=released,
                pushes=coordinator.pushes,
                updates=coordinator.updates,
                active=len(coordinator.present),
            )
            for answer, released in zip(self._answers, coordinator.released, strict=True)
        ]
        return np.stack([pack(answer) for answer in self._answers])

    def log(self, table: Table) -> Table:
        """Returns the pushes from a number on: first how many rows, then those.

        Args:
            table: From `log_request`, shape ``(1 + LOG_ROWS, LOG_WIDTH)``.
        """
        first, *_ = unpack(table[0])
        rows = [line.to_integers() for line in self._coordinator.log(first, LOG_ROWS)]
        empty = [[0] * PUSH_INTEGERS] * (LOG_ROWS - len(rows))
        count = [len(rows), *[0] * (PUSH_INTEGERS - 1)]
        return np.stack([pack(row) for row in (count, *rows, *empty)])

    def _decide(self, worker: int, question: Question, values: list[int]) -> tuple[int, int]:
        coordinator = self._coordinator
        if question is Question.COMPARE:
            return self._facts.setdefault(values[0], values[1]), 0
        if question is Question.CLAIM:
            return coordinator.claim(worker, values[0])
        if question is Question.PUSH:
            samples, busy_nanoseconds, slope, overhead, updates_seen = values
            cost = curve(StepMessage(slope, overhead, busy_nanoseconds, 0))
            seconds = busy_nanoseconds / 1e9
            return int(coordinator.push(worker, samples, seconds, cost, updates_seen)), 0
        if question is Question.ENTERED:
            return int(coordinator.entered(worker)), 0
        if question is Question.APPLIED:
            coordinator.applied()
            return 0, 0
        return int(coordinator.finish(worker)), 0
