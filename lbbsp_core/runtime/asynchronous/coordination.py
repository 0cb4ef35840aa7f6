"""Questions of workers to the coordinator, and its answers, as rows of exact integers.

Workers that need not be in the same step share a *table* with one row per worker, on the server
where the coordinator runs. A worker writes a question into its own row; the server replaces the
whole table by answers, which the worker then reads. The transport must be able to push and pull
an array of float32 (`runtime.exchange.protocol` describes how it carries integers exactly).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.runtime.asynchronous.coordinator import Coordinator
from lbbsp_core.runtime.asynchronous.reserves import PartsReport
from lbbsp_core.runtime.exchange.protocol import Row, StepMessage, curve, pack, unpack
from lbbsp_core.runtime.record.record import PUSH_INTEGERS, PushLine

Table = npt.NDArray[np.float32]

QUESTION_INTEGERS: Final = 14
"""Integers of a question: kind, number, and values. An `Answer` has fewer."""

LOG_ROWS: Final = 64
"""Maximum number of pushes that one reading of the log returns, after a row with their number."""

QUESTION_WIDTH: Final = 2 * QUESTION_INTEGERS
LOG_WIDTH: Final = 2 * PUSH_INTEGERS
"""Number of limbs in a row, see `lbbsp_core.runtime.exchange.protocol.pack`."""


class Question(IntEnum):
    """Kind of a question that a worker asks."""

    TELL = 1
    READ = 2
    CLAIM = 3
    CLAIM_PART = 4
    AWAITED = 5
    PUSH = 6
    ENTERED = 7
    APPLIED = 8
    FINISH = 9


class Answer(NamedTuple):
    """Answer of the coordinator to a worker.

    Args:
        number: Number of the worker's last question that has been answered.
        released: Number of iterations that the worker may have started.
        pushes: Number of pushes by all workers.
        updates: Number of updates of the model.
        active: Number of workers that have not departed.
        reserve: 1 if the running iteration has a reserve, or else 0.
        first: Answer to the question: position of the first claimed sample, a fact, or 1 for yes
            and 0 for no.
        second: Position after the last claimed sample, or the samples of a complete sum; 0 for
            other questions.
    """

    number: int = 0
    released: int = 1
    pushes: int = 0
    updates: int = 0
    active: int = 0
    reserve: int = 0
    first: int = 0
    second: int = 0


def read_answer(row: Row) -> Answer:
    """Reads a worker's row of a table of answers."""
    return Answer(*unpack(row)[: len(Answer._fields)])


def empty_questions(workers: int) -> Table:
    """Creates a table without questions and answers, shape ``(workers, QUESTION_WIDTH)``."""
    return np.zeros((workers, QUESTION_WIDTH), np.float32)


def empty_log() -> Table:
    """Creates a table for a part of the log, shape ``(1 + LOG_ROWS, LOG_WIDTH)``."""
    return np.zeros((1 + LOG_ROWS, LOG_WIDTH), np.float32)


def question_table(workers: int, rank: int, question: Question, number: int, *values: int) -> Table:
    """Creates a table with one question, in the row of worker `rank`."""
    table = empty_questions(workers)
    table[rank] = _padded([int(question), number, *values], QUESTION_WIDTH)
    return table


def read_log(exchange: Callable[[Table], Table], first: int) -> list[PushLine]:
    """Reads pushes from number `first` on; `exchange` calls `CoordinatorService.log`."""
    request = empty_log()
    request[0] = _padded([first], LOG_WIDTH)
    (count, *_), *rows = map(unpack, exchange(request))
    return [PushLine.from_integers(row) for row in rows[:count]]


def report_integers(shared: PartsReport) -> tuple[int, ...]:
    """Encodes `shared` for a question, but for the overhead of a step."""
    seconds, overhead = round(shared.seconds * 1e9), round(shared.part_overhead * 1e3)
    claim = round(shared.claim_seconds * 1e6)
    return shared.parts, seconds, overhead, claim, int(shared.can_share)


def read_report(integers: Sequence[int], step_overhead: float) -> PartsReport:
    """Decodes what `report_integers` returned."""
    parts, seconds, overhead, claim, can_share, *_ = integers
    return PartsReport(
        parts, seconds / 1e9, step_overhead, overhead / 1e3, claim / 1e6, bool(can_share)
    )


class CoordinatorService:
    """Answers the tables of questions that workers push.

    Facts are integers by number, each that of the first worker which tells it; that of number 0 is
    the fingerprint of the options.
    """

    def __init__(self, coordinator: Coordinator, fingerprint: int) -> None:
        self._coordinator = coordinator
        self._facts = {0: fingerprint}
        self._answers = [(0, 0, 0)] * len(coordinator.released)  # number, first and second

    def answer(self, table: Table) -> Table:
        """Answers the question of one worker, and updates the counts in the rows of all workers.

        In the table, of shape ``(workers, QUESTION_WIDTH)``, one row holds a question and the
        others are zero.
        """
        (worker,) = np.flatnonzero(table.any(axis=1)).tolist()
        question, number, *values = unpack(table[worker])
        self._answers[worker] = number, *self._decide(worker, Question(question), values)
        coordinator = self._coordinator
        counts = (
            coordinator.pushes,
            coordinator.updates,
            len(coordinator.rounds.active),
            int(coordinator.has_reserve),
        )
        answers = (
            Answer(number, released, *counts, first, second)
            for (number, first, second), released in zip(
                self._answers, coordinator.released, strict=True
            )
        )
        return np.stack([_padded(list(answer), QUESTION_WIDTH) for answer in answers])

    def log(self, table: Table) -> Table:
        """Returns the log from a push on: a row with the number of pushes, then one row for each.

        Both tables have the shape ``(1 + LOG_ROWS, LOG_WIDTH)``; the first integer of `table` is
        the number of that push.
        """
        first, *_ = unpack(table[0])
        lines = self._coordinator.log(first, LOG_ROWS)
        answer = empty_log()
        answer[0] = _padded([len(lines)], LOG_WIDTH)
        for row, line in enumerate(lines, start=1):
            answer[row] = pack(line.to_integers())
        return answer

    def _decide(self, worker: int, question: Question, values: list[int]) -> tuple[int, int]:
        """Returns the first and the second value of an answer."""
        coordinator = self._coordinator
        first, second = 0, 0
        match question:
            case Question.TELL:
                first = self._facts.setdefault(*values[:2])
            case Question.READ:
                first = self._facts.get(values[0], 0)
            case Question.CLAIM:
                first, second = coordinator.claim(worker, *values[:3])
            case Question.PUSH:
                samples, nanoseconds, slope, overhead, updates_seen, excluded, *report = values
                cost = curve(StepMessage(slope, overhead, nanoseconds, 0))
                shared = read_report(report, 1e3 * overhead / max(slope, 1))
                first = coordinator.push(
                    worker, samples, nanoseconds / 1e9, cost, updates_seen, bool(excluded), shared
                )
            case Question.CLAIM_PART:
                first, second = coordinator.claim_part(worker, values[0])
            case Question.AWAITED:
                first = coordinator.is_awaited(worker, *values[:2])
            case Question.ENTERED | Question.FINISH:
                decide = coordinator.entered if question == Question.ENTERED else coordinator.finish
                summed = decide(worker)
                first, second = summed is not None, summed or 0
            case Question.APPLIED:
                coordinator.applied()
        return int(first), second


def _padded(integers: list[int], width: int) -> Row:
    """Packs integers into a row of `width` limbs, the rest of which are zero."""
    row = np.zeros(width, np.float32)
    row[: 2 * len(integers)] = pack(integers)
    return row
