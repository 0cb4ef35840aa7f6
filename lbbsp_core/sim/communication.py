"""Communication models: seconds that an exchange of gradients takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lbbsp_core.sim.links import ServerLinks
from lbbsp_core.validate import require_nonnegative, require_positive


class Communication(Protocol):
    """Time of an exchange of gradients: seconds, or links at which pushes and pulls queue."""

    def together(self, workers: int) -> float | ServerLinks:
        """Returns the time of an exchange by all workers, once the last one has arrived."""
        ...

    def alone(self) -> float | ServerLinks:
        """Returns the time of one worker's push and pull while the others compute."""
        ...


@dataclass(frozen=True, slots=True)
class FixedTime:
    """Constant communication time, whatever the number of workers.

    Args:
        fixed_seconds: Seconds of an exchange, >= 0.
    """

    fixed_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_nonnegative("communication_seconds", self.fixed_seconds)

    def together(self, workers: int) -> float:
        """Returns `fixed_seconds`."""
        return self.fixed_seconds

    def alone(self) -> float:
        """Returns `fixed_seconds`."""
        return self.fixed_seconds


@dataclass(frozen=True, slots=True)
class _Link:
    """Links over which gradients travel."""

    bytes: float  # size of a gradient in bytes, >= 0
    bytes_per_second: float  # bandwidth of each worker's link, one way, > 0
    latency_seconds: float = 0.0  # latency of a message in seconds, >= 0

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_nonnegative(f"{name}.bytes", self.bytes)
        require_positive(f"{name}.bytes_per_second", self.bytes_per_second)
        require_nonnegative(f"{name}.latency_seconds", self.latency_seconds)


@dataclass(frozen=True, slots=True)
class RingAllReduce(_Link):
    r"""Ring all-reduce (reduce-scatter, then all-gather): ``2 (N - 1) (B / (N b) + l)`` seconds.

    With B bytes of gradient, b bytes per second and l seconds of latency, every worker sends
    ``2 (N - 1)`` messages of B / N bytes (Patarasuk and Yuan, JPDC 2009).

    Example:
        >>> RingAllReduce(bytes=4e6, bytes_per_second=1e6, latency_seconds=0.5).together(2)
        5.0
    """

    def together(self, workers: int) -> float:
        """Returns the seconds of one ring all-reduce."""
        part = self.bytes / workers / self.bytes_per_second
        return 2 * (workers - 1) * (part + self.latency_seconds)

    def alone(self) -> float:
        """Raises ValueError: a worker cannot run an all-reduce alone."""
        raise ValueError(
            "a ring all-reduce ends when its last worker has arrived, so no worker can push alone: "
            "use communication.kind = 'parameter-server', or sync bsp"
        )


@dataclass(frozen=True, slots=True)
class ParameterServer(_Link):
    r"""Parameter servers, at whose links pushes and pulls queue, see `lbbsp_core.sim.links`.

    Each of S servers holds 1 / S of the model behind a link of the same bandwidth as a worker's.
    If N workers request a transfer at the same time, the last one is complete after
    ``max(1, N / S) B / b + l`` seconds: if N > S, the servers' links are the bottleneck; a single
    worker is limited by its own link only. Workers that communicate at different times wait for
    one another less, or not at all.

    Args:
        servers: Number of servers S, >= 1.

    Example:
        >>> ParameterServer(bytes=4e6, bytes_per_second=4e6, servers=2).alone()
        ServerLinks(shard_seconds=0.5, transfer_seconds=1.0, latency_seconds=0.0)
    """

    servers: int = 1

    def __post_init__(self) -> None:
        _Link.__post_init__(self)
        if self.servers < 1 or self.servers != int(self.servers):
            raise ValueError(
                f"ParameterServer.servers must be a whole number >= 1, got {self.servers!r}"
            )

    def together(self, workers: int) -> ServerLinks:
        """Returns the servers' links, whatever the number of workers."""
        return self.alone()

    def alone(self) -> ServerLinks:
        """Returns the servers' links."""
        own = self.bytes / self.bytes_per_second
        return ServerLinks(own / self.servers, own, self.latency_seconds)
