"""What it costs to bring gradients together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from lbbsp_core.validate import require_nonnegative, require_positive


class Communication(Protocol):
    """Seconds of an exchange of gradients, after the last worker has arrived."""

    asynchronous: ClassVar[bool]
    """Whether one worker alone can push and pull."""

    def seconds(self, workers: int) -> float:
        """Of all workers together, at a barrier."""
        ...

    def seconds_alone(self) -> float:
        """Of one worker that pushes and pulls while the others compute."""
        ...


@dataclass(frozen=True, slots=True)
class FixedTime:
    """The same, whoever takes part.

    Args:
        fixed_seconds: >= 0.
    """

    fixed_seconds: float = 0.0

    asynchronous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_nonnegative("communication_seconds", self.fixed_seconds)

    def seconds(self, workers: int) -> float:
        """`fixed_seconds`."""
        return self.fixed_seconds

    def seconds_alone(self) -> float:
        """`fixed_seconds`."""
        return self.fixed_seconds


@dataclass(frozen=True, slots=True)
class _Link:
    """A message of `bytes` over a link.

    Args:
        bytes: Of a gradient, >= 0.
        bytes_per_second: Of each worker's link, one way, > 0.
        latency_seconds: Of a message, >= 0.
    """

    bytes: float
    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_nonnegative(f"{name}.bytes", self.bytes)
        require_positive(f"{name}.bytes_per_second", self.bytes_per_second)
        require_nonnegative(f"{name}.latency_seconds", self.latency_seconds)


@dataclass(frozen=True, slots=True)
class RingAllReduce(_Link):
    r"""``2 (N - 1) (B / (N b) + l)``: reduce-scatter, then all-gather, on a ring.

    B bytes of gradient, b bytes a second, l seconds of latency: every worker sends ``2 (N - 1)``
    messages of B / N bytes (Patarasuk and Yuan, JPDC 2009).

    Example:
        >>> RingAllReduce(bytes=4e6, bytes_per_second=1e6, latency_seconds=0.5).seconds(2)
        5.0
    """

    asynchronous: ClassVar[bool] = False

    def seconds(self, workers: int) -> float:
        """The ring."""
        part = self.bytes / workers / self.bytes_per_second
        return 2 * (workers - 1) * (part + self.latency_seconds)

    def seconds_alone(self) -> float:
        """There is no such thing."""
        raise ValueError(
            "a ring all-reduce ends when its last worker has arrived, so nobody can push alone: "
            "use communication.kind = 'parameter-server', or sync bsp"
        )


@dataclass(frozen=True, slots=True)
class ParameterServer(_Link):
    r"""``2 (max(1, N / S) B / b + l)``: all push to S servers, then all pull.

    Every server holds 1 / S of the model behind a link of its own, as wide as a worker's; where
    N > S workers come at once the servers' links are what limits. A worker alone has only its
    own link in the way.

    Args:
        servers: S, >= 1.

    Example:
        >>> server = ParameterServer(bytes=4e6, bytes_per_second=4e6)
        >>> server.seconds(3), server.seconds_alone()
        (6.0, 2.0)
    """

    servers: int = 1

    asynchronous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _Link.__post_init__(self)
        if self.servers < 1 or self.servers != int(self.servers):
            raise ValueError(
                f"ParameterServer.servers must be a whole number >= 1, got {self.servers!r}"
            )

    def seconds(self, workers: int) -> float:
        """All at once."""
        crowd = max(1.0, workers / self.servers)
        return 2 * (crowd * self.bytes / self.bytes_per_second + self.latency_seconds)

    def seconds_alone(self) -> float:
        """One worker, the servers idle."""
        return self.seconds(1)
