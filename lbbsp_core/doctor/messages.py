"""Messages between two doctors: lines of JSON of bounded length, checked before they are used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

FORMAT: Final = 1
MAX_BYTES: Final = 4096
"""Longest line."""

_MAX_VERSIONS: Final = 16
_MAX_TEXT: Final = 64
_MAX_SECONDS: Final = 1e12


class Hello(NamedTuple):
    """First line of either side.

    Args:
        task: Name of the sender's task, such as "worker 1".
        cluster: Digest of the cluster that the sender belongs to.
        versions: Versions of the sender's packages, by name.
    """

    task: str
    cluster: str
    versions: Mapping[str, str]

    def line(self) -> bytes:
        """Returns the message."""
        return _line({"lbbsp_doctor": FORMAT, **self._asdict()})

    @classmethod
    def of(cls, line: bytes) -> Hello:
        """Parses a line of another process; raises ValueError if it is no such message."""
        values = _values(line)
        if values.get("lbbsp_doctor") != FORMAT:
            raise ValueError("it is no message of lbbsp doctor")
        versions = values.get("versions")
        if not isinstance(versions, dict) or len(versions) > _MAX_VERSIONS:
            raise ValueError("it has no versions")
        texts = {_text(name): _text(version) for name, version in versions.items()}
        return cls(_text(values.get("task")), _text(values.get("cluster")), texts)


class Times(NamedTuple):
    """Answer to a ping.

    Args:
        received: Time of day at which the ping arrived, in seconds.
        sent: Time of day at which the answer was sent.
    """

    received: float
    sent: float

    def line(self) -> bytes:
        """Returns the message."""
        return _line(self._asdict())

    @classmethod
    def of(cls, line: bytes) -> Times:
        """Parses a line of another process; raises ValueError if it is no such message."""
        values = _values(line)
        return cls(_seconds(values.get("received")), _seconds(values.get("sent")))


PING: Final = b"ping\n"


def digest(addresses: Iterable[str]) -> str:
    """Returns a digest of the addresses of a cluster, in the order of its tasks."""
    return hashlib.sha256("\n".join(addresses).encode()).hexdigest()[:16]


def _line(values: Mapping[str, object]) -> bytes:
    line = json.dumps(values).encode("ascii") + b"\n"
    assert len(line) <= MAX_BYTES, "a message is too long"
    return line


def _values(line: bytes) -> Mapping[str, object]:
    if len(line) > MAX_BYTES:
        raise ValueError(f"the message is longer than {MAX_BYTES} bytes")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is no message of lbbsp doctor") from None
    if not isinstance(values, dict):
        raise ValueError("it is no message of lbbsp doctor")
    return values


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        raise ValueError(f"a text must have at most {_MAX_TEXT} printable characters")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a time must be a number of seconds")
    if not -_MAX_SECONDS < value < _MAX_SECONDS:  # also if it is not a number
        raise ValueError("a time must be a finite number of seconds")
    return float(value)
