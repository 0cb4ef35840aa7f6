"""Extension of a session: what a feature sends, compares, records and saves in each step.

A feature is a subclass of `StepExtension` in a file of its own, and an entry in `EXTENSIONS`
(`lbbsp_core.runtime.extensions.every`). It can be removed by deleting both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from lbbsp_core.runtime.checkpoint.checkpoint import Json
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.runtime.exchange.handshake import Facts, Peer
from lbbsp_core.runtime.exchange.protocol import StepMessage
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.planning.balancer import Balancer
from lbbsp_core.runtime.planning.running_step import StepMeter
from lbbsp_core.runtime.record.record import RunHeader, StepLine

logger = logging.getLogger("lbbsp.session")

Observer: TypeAlias = Callable[[StepLine], None]
"""Function that a step is passed to when it has ended. It must not block."""

Extra: TypeAlias = Sequence[Sequence[int]]
"""Integers that an extension has offered in a step, by rank."""


class Session(Protocol):
    """What extensions know of their session, the loop, which is above them."""

    collectives: Collectives
    options: SessionOptions
    meter: StepMeter
    observers: list[Observer]
    rank: int
    workers: int
    peers: Sequence[Peer] | None

    @property
    def balancer(self) -> Balancer:
        """Plans of all workers, after the last barrier."""
        ...

    def excluded_wait(self) -> AbstractContextManager[None]:
        """Excludes the time inside the context from busy time."""
        ...


class StepExtension:
    """Takes part in the steps of a session; subclasses override the hooks that they need.

    Hooks are called on the thread of the training, in the order of a step: `offer` when this worker
    has computed its gradient, then `received` after the barrier. `started` precedes the steps of a
    fit; `summary`, `flush` and `close` follow them. `restore` comes before the first step, and
    `state` may be asked for after `close`, which may be called twice: what is saved is kept until
    the next `started`.

    Args:
        session: Session of this worker.

    Attributes:
        width: Integers that the extension adds to the message of each step.
    """

    width: ClassVar[int] = 0

    def __init__(self, session: Session) -> None:
        self.session = session

    def facts(self) -> Facts:
        """Returns facts by name that must be the same on all workers, for the handshake."""
        return {}

    def started(self, header: Callable[[], RunHeader]) -> None:
        """Notes that the handshake has succeeded; `header` describes the run for a record."""

    def offer(self) -> Sequence[int]:
        """Returns `width` integers in [0, 2^24) for the message of the step that ends."""
        return ()

    def received(self, line: StepLine, extra: Extra, messages: Sequence[StepMessage]) -> StepLine:
        """Takes what all workers have offered in a step; the same on every worker but for times.

        The session's balancer has already decided the next plan.

        Args:
            line: Line of the step, with what the extensions before this one have added.
            extra: Integers that this extension has offered, by rank.
            messages: Whole messages by rank, such as with the busy times.

        Returns:
            The line with what this extension records, such as an entry of `values`: a number of
            each worker, or None. Reports show those of all steps, TensorBoard the latest, other
            views those of the last step.
        """
        return line

    def summary(self) -> str:
        """Returns a text that worker 0 logs, at level INFO, at the end of a fit; empty: none."""
        return ""

    def state(self) -> Json:
        """Returns a state for checkpoints, the same on all workers; None: there is none."""
        return None

    def restore(self, state: Json) -> None:
        """Continues from `state`, perhaps of another number of workers; None: none was saved.

        What does not fit is ignored. Tuples come back as lists.
        """

    def flush(self) -> None:
        """Writes what is pending to files."""

    def close(self) -> None:
        """Forgets what belongs to a fit that has ended, but not what is saved."""


_Kind = TypeVar("_Kind", bound=StepExtension)


class Extensions:
    """Extensions of a session, by class.

    Args:
        kinds: Their classes. All workers have the same ones in the same order.
        session: Session of this worker.
    """

    def __init__(self, kinds: Sequence[type[StepExtension]], session: Session) -> None:
        self._all = [kind(session) for kind in kinds]
        self._by_kind = {type(extension): extension for extension in self._all}
        self._session = session
        self.width = sum(kind.width for kind in kinds)
        """Integers of all extensions in the message of a step."""
        places = [sum(kind.width for kind in kinds[:number]) for number in range(len(kinds))]
        self._receivers = [
            (extension, slice(place, place + extension.width))
            for place, extension in zip(places, self, strict=True)
            if type(extension).received is not StepExtension.received
        ]

    def __iter__(self) -> Iterator[StepExtension]:
        return iter(self._all)

    def __getitem__(self, kind: type[_Kind]) -> _Kind:
        """Returns the extension of a class; if the session has none, one that takes no part."""
        if kind not in self._by_kind:
            self._by_kind[kind] = kind(self._session)
        return self._by_kind[kind]  # type: ignore[return-value]

    def facts(self) -> Facts:
        """Returns the facts of all, and which ones there are."""
        widths = ", ".join(f"{type(part).__name__} {part.width}" for part in self if part.width)
        facts = {name: fact for part in self for name, fact in part.facts().items()}
        return {"extensions of messages": widths, **facts}

    def offer(self) -> tuple[int, ...]:
        """Returns the integers of all for the message of a step."""
        offered = tuple(integer for extension in self for integer in extension.offer())
        assert len(offered) == self.width, f"{len(offered)} integers instead of {self.width}"
        return offered

    def end_step(self, line: StepLine, messages: Sequence[StepMessage]) -> None:
        """Passes on what all workers have offered in a step, and then its line to the observers."""
        for extension, place in self._receivers:
            extra = [message.extra[place] for message in messages]
            line = extension.received(line, extra, messages)
        if any(map(_is_not_finite, chain.from_iterable(line.values.values()))):  # is no JSON
            values = {
                name: tuple(None if _is_not_finite(number) else number for number in recorded)
                for name, recorded in line.values.items()
            }
            line = replace(line, values=values)
        for observer in self._session.observers:
            observer(line)

    def state(self) -> dict[str, Json]:
        """Returns the states of those that have one, by name."""
        states = {type(extension).__name__: extension.state() for extension in self}
        return {name: state for name, state in states.items() if state is not None}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Continues from the states that are known."""
        for extension in self:
            extension.restore(states.get(type(extension).__name__))

    def close(self) -> None:
        """Logs the summaries, and ends the training."""
        for extension in self:
            if self._session.rank == 0 and (text := extension.summary()):
                logger.info("%s", text)
            extension.flush()
            extension.close()


def _is_not_finite(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
