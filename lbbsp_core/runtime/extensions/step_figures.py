"""Figures of the steps: the estimate of even batches, and a time of each step that all know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lbbsp_core.cost import PiecewiseCost
from lbbsp_core.runtime.exchange.protocol import PeerInfo, StepMessage, pack, unpack
from lbbsp_core.runtime.extensions.base import Extra, Session, StepExtension
from lbbsp_core.runtime.record.even_batches import EvenBatches
from lbbsp_core.runtime.record.figures import RunningFigures
from lbbsp_core.runtime.record.record import RunHeader, StepLine


class StepFigures(StepExtension):
    """Figures that are the same on all workers, of the steps before the last one.

    A step ends when its barrier is left, after its messages were exchanged. Its time, by the clock
    of worker 0, is therefore in the next message.

    Attributes:
        running: Figures of the recent steps and of an epoch.
        wanted: Whether somebody reads `running`. Steps that are observed have their estimate, too.
    """

    width = 2

    wanted = False

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.running = RunningFigures()
        self._peers: Sequence[PeerInfo] = ()
        self._even: EvenBatches | None = None
        self._last: StepLine | None = None

    def started(self, header: Callable[[], RunHeader]) -> None:
        """Keeps what was learned of the same workers in an earlier training."""
        peers = self.session.balancer.bounds.situation.peers
        if peers != self._peers:
            self._peers, self._even = peers, None

    def offer(self) -> Sequence[int]:
        """Returns the time of the last step, in nanoseconds."""
        seconds = 0.0 if self._last is None else self._last.wall_seconds
        return [int(limb) for limb in pack([round(seconds * 1e9)])]

    def received(self, line: StepLine, extra: Extra, messages: Sequence[StepMessage]) -> StepLine:
        """Adds the step before, whose time is known now; records the estimate of even batches."""
        if self._last is not None:
            (nanoseconds,) = unpack(extra[0])
            self.running.add(replace(self._last, wall_seconds=nanoseconds / 1e9))
            self._last = None
        if not (self.wanted or self.session.observers):
            return line
        if self._even is None:
            self._even = EvenBatches(
                [PiecewiseCost(peer.segments) for peer in self._peers],
                [peer.overhead for peer in self._peers],
            )
        overheads = [
            1e3 * message.overhead_nanoseconds / max(message.picoseconds_per_sample, 1)
            for message in messages
        ]
        least, most = self._even.seconds(line, overheads)
        self._last = replace(line, even_seconds=least, even_seconds_at_most=most)
        return self._last

    def close(self) -> None:
        """Forgets the last step, which the next training does not continue."""
        self._last = None
