"""Connections between the doctors of a cluster, which run on all of its hosts at the same time.

Each of them listens on the address of its own task (on all interfaces if that is an address of the
loopback, but other tasks are elsewhere), until it ends; connects to all others; and asks each a few
times for the time of day.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Final

from lbbsp_core.doctor.messages import MAX_BYTES, PING, Hello, Times

PINGS: Final = 5
RETRY_SECONDS: Final = 0.25
CONNECT_SECONDS: Final = 5.0
"""Longest time for one attempt to connect, and for one answer."""

MAX_CONNECTIONS: Final = 256
"""Connections of others that are open at the same time; further ones are closed."""

_FAILURES = (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError)


@dataclass
class Contact:
    """What this process learns of one peer.

    Args:
        name: Name of its task.
        numbers: IP numbers of its host.
        port: Its port.
        comes: Whether it connects to this process, too.
        error: Why it does not answer: the last error; empty once it has answered.
        rtt_seconds: Shortest time of a question with its answer.
        offset_seconds: Its time of day minus that of this machine.
        hello: What it says of itself, when it answers.
        has_come: Whether it has reached this process.
        is_through: Whether it has also asked all that it wants to ask.
    """

    name: str
    numbers: Sequence[str]
    port: int
    comes: bool = True
    error: str = "timed out"
    rtt_seconds: float = float("inf")
    offset_seconds: float = 0.0
    hello: Hello | None = None
    has_come: bool = False
    is_through: bool = False


@dataclass
class Exchange:
    """One meeting of doctors.

    Args:
        own: What this process says of itself.
        numbers: IP numbers to listen on; none to listen nowhere.
        port: Port to listen on.
        contacts: Peers to connect to.
        seconds: Time for all of it.
        visitors: Number of further processes that connect to this one.
    """

    own: Hello
    numbers: Sequence[str]
    port: int
    contacts: Sequence[Contact]
    seconds: float
    visitors: int = 0
    came: set[str] = field(default_factory=set, init=False)
    """Names of the visitors that have come."""
    _open: int = field(default=0, init=False)

    def run(self) -> None:
        """Meets the peers; returns when all have been met both ways, or when the time is up."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with AsyncExitStack() as stack:
            for number in self.numbers:
                server = await asyncio.start_server(
                    self._answer, number, self.port, limit=MAX_BYTES, backlog=MAX_CONNECTIONS
                )
                stack.callback(server.close)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._meet(), self.seconds)

    async def _meet(self) -> None:
        await asyncio.gather(*map(self._reach, self.contacts))
        while not self._is_complete():
            await asyncio.sleep(0.02)

    def _is_complete(self) -> bool:
        coming = [contact for contact in self.contacts if contact.comes]
        return len(self.came) >= self.visitors and all(each.is_through for each in coming)

    async def _reach(self, contact: Contact) -> None:
        """Connects to a peer again and again: it may start later than this process."""
        while contact.error:
            for number in contact.numbers:
                try:
                    await self._ask(contact, number)
                    contact.error = ""
                    break
                except _FAILURES as error:
                    contact.error = _reason(error)
            else:
                await asyncio.sleep(RETRY_SECONDS)

    async def _ask(self, contact: Contact, number: str) -> None:
        connecting = asyncio.open_connection(number, contact.port, limit=MAX_BYTES)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        try:
            writer.write(self.own.line())
            hello = Hello.of(await _read(reader))
            if hello.task != contact.name:
                raise ValueError(f"{hello.task} answers there, instead of {contact.name}")
            contact.hello = hello
            for _ in range(PINGS):
                await self._ping(contact, reader, writer)
        finally:
            writer.close()

    async def _ping(
        self, contact: Contact, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        sent, start = time.time(), time.perf_counter()
        writer.write(PING)
        times = Times.of(await _read(reader))
        seconds = time.perf_counter() - start
        rtt = max(0.0, seconds - (times.sent - times.received))
        if rtt < contact.rtt_seconds:  # the offset of the quickest answer is the most exact one
            contact.rtt_seconds = rtt
            contact.offset_seconds = (
                (times.received - sent) + (times.sent - (sent + seconds))
            ) / 2  # as NTP computes it, RFC 5905

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a connection of another process, for a bounded time and number of lines."""
        self._open += 1
        try:
            if self._open <= MAX_CONNECTIONS:
                await self._converse(reader, writer)
        except _FAILURES:
            pass  # anybody may connect: who is expected and does not come is reported
        finally:
            self._open -= 1
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = Hello.of(await _read(reader))
        if hello.cluster == self.own.cluster:
            writer.write(self.own.line())
        else:  # of another job: it learns no more than that
            writer.write(self.own._replace(versions={}).line())
        contact = next((each for each in self.contacts if each.name == hello.task), None)
        if contact is not None:
            contact.has_come = True
        for _ in range(PINGS):
            if await _read(reader) != PING:
                return
            writer.write(Times(time.time(), time.time()).line())
            await asyncio.wait_for(writer.drain(), CONNECT_SECONDS)
        # Until it has the last answer. It sends nothing more: never collect what comes.
        if await asyncio.wait_for(reader.read(1), CONNECT_SECONDS):
            return
        if contact is not None:
            contact.is_through = True
        elif hello.cluster == self.own.cluster and len(self.came) < self.visitors:
            self.came.add(hello.task)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Returns a complete line.

    Raises:
        OSError: The other side has closed the connection before.
    """
    line = await asyncio.wait_for(reader.readline(), CONNECT_SECONDS)
    if not line.endswith(b"\n"):
        raise ConnectionResetError("something accepts connections there, and closes them")
    return line


def _reason(error: BaseException) -> str:
    """Returns why a peer does not answer."""
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
