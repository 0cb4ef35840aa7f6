"""One worker's exchange with the coordinator: questions, answers, and the log of all pushes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from lbbsp_core.runtime.asynchronous.coordination import (
    Answer,
    Question,
    Table,
    question_table,
    read_answer,
    read_log,
)
from lbbsp_core.runtime.exchange.collectives import to_integers
from lbbsp_core.runtime.exchange.handshake import Identity
from lbbsp_core.runtime.exchange.protocol import DisagreementError, fingerprint
from lbbsp_core.runtime.record.writer import RunRecord

_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.005
"""Pauses between reads of the coordinator's answers: they double, from the first to the longest."""


class Servers(Protocol):
    """Operations on a framework's parameter servers that an asynchronous session needs."""

    rank: int
    workers: int

    def ask(self, table: Table) -> None:
        """Pushes a table of questions, see `lbbsp_core.runtime.asynchronous.coordination`."""

    def read_answers(self) -> Table:
        """Pulls the table of answers."""

    def exchange_log(self, table: Table) -> Table:
        """Pushes a request for the log, and pulls the answer."""

    def push_gradients(self, *, to_sum: bool) -> None:
        """Pushes this worker's gradients into the model, or into the sum of kept gradients."""

    def apply_sums(self, scale: float) -> None:
        """Updates the model by the sum of kept gradients, times `scale`; it is empty then."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Bounds the time spent inside the context, in which this worker waits for others."""


class Client:
    """One worker's questions to the coordinator; every worker has one.

    Args:
        servers: Parameter servers of the framework.

    Attributes:
        answer: Answer that was read last.
        record: Run record, to which all pushes are written; None without one.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.answer = Answer()
        self.record: RunRecord | None = None
        self._asked = self._recorded = 0  # questions, and pushes

    def ask(self, question: Question, *values: int) -> Answer:
        """Asks the coordinator, and waits for its answer."""
        self._asked += 1
        rank, workers = self._servers.rank, self._servers.workers
        self._servers.ask(question_table(workers, rank, question, self._asked, *values))
        return self.wait_for(lambda answer: answer.number == self._asked, "for the coordinator")

    def wait_for(self, done: Callable[[Answer], bool], what: str) -> Answer:
        """Reads answers until one is `done`, which it returns; records pushes meanwhile."""
        pause = _FIRST_PAUSE_SECONDS
        with self._servers.waiting(what):
            while True:
                self.answer = read_answer(self._servers.read_answers()[self._servers.rank])
                if done(self.answer):
                    return self.answer
                self.drain()
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def compare(self, fact: int, mine: str) -> None:
        """Raises an error if another worker has another value of a fact."""
        if self.ask(Question.TELL, fact, fingerprint(mine)).first != fingerprint(mine):
            raise DisagreementError(
                f"workers disagree on sync, batches, policy, parameters or samples: worker "
                f"{self._servers.rank} has {mine}, and another worker has different values; start "
                "all workers with the same ones"
            )

    def send_identity(self, identity: Identity) -> None:
        """Tells the names of this worker."""
        first = _names_of(self._servers.rank)
        for place, integer in reversed([*enumerate(identity.pack())]):  # the length comes last
            self.ask(Question.TELL, first + place, integer)

    def identities(self) -> list[Identity]:
        """Returns the names of all workers; waits until they have told them."""
        with self._servers.waiting("for the names of the other workers"):
            return [self._identity(rank) for rank in range(self._servers.workers)]

    def _identity(self, rank: int) -> Identity:
        first = _names_of(rank)
        while not (length := self.ask(Question.READ, first).first):
            time.sleep(_LONGEST_PAUSE_SECONDS)
        places = range(first + 1, first + 1 + len(to_integers(bytes(length))))
        return Identity.unpack([length, *(self.ask(Question.READ, fact).first for fact in places)])

    def drain(self) -> None:
        """Records the pushes since the last call."""
        while self.record is not None and self._recorded < self.answer.pushes:
            for line in read_log(self._servers.exchange_log, self._recorded):
                self.record.write(line)
                self._recorded += 1

    def close(self) -> None:
        """Closes the run record."""
        self.drain()
        if self.record is not None:
            self.record.end(0)
            self.record.close()
            self.record = None


def _names_of(rank: int) -> int:
    """Returns the number of the first fact that is an integer of `Identity.pack` of a worker."""
    return (1 + rank) << 16  # those before are data sets
