"""Communication models: seconds that an exchange of gradients takes, and queues at servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lbbsp_core.types import Floats
from lbbsp_core.validate import require_nonnegative, require_positive, require_whole


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
    r"""Parameter servers, at whose links pushes and pulls queue, first in, first out.

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
        require_whole("ParameterServer.servers", self.servers, 1)

    def together(self, workers: int) -> ServerLinks:
        """Returns the servers' links, whatever the number of workers."""
        return self.alone()

    def alone(self) -> ServerLinks:
        """Returns the servers' links."""
        transfer_seconds = self.bytes / self.bytes_per_second
        return ServerLinks(transfer_seconds / self.servers, transfer_seconds, self.latency_seconds)


@dataclass(frozen=True, slots=True)
class ServerLinks:
    """Links of the parameter servers: how long transfers occupy them.

    Args:
        shard_seconds: Seconds that one transfer occupies the link of each server, >= 0.
        transfer_seconds: Minimum seconds of a transfer, those on the worker's own link, >= 0.
        latency_seconds: Latency of a message in seconds, >= 0.

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> pushes = LinkQueue(ServerLinks(shard_seconds=1.0, transfer_seconds=1.0))
        >>> [pushes.transfer(now) for now in (0.0, 0.5, 5.0)]
        [1.0, 2.0, 6.0]
    """

    shard_seconds: float
    transfer_seconds: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("shard_seconds", "transfer_seconds", "latency_seconds"):
            require_nonnegative(f"ServerLinks.{name}", getattr(self, name))

    def push_seconds(self, busy_seconds: Floats) -> Floats:
        """Returns when the pushes of synchronous steps arrive, with the queues of `LinkQueue`.

        A step starts at the barrier: the servers send the model to the workers in the order of
        ranks, each worker computes once it has received it, and its push queues at the servers.
        Steps are independent: the queues are empty when the last push has arrived.

        Args:
            busy_seconds: Busy seconds by step and worker, shape ``(steps, workers)``.

        Returns:
            Seconds from the barrier to the arrival of each push, of the same shape. The largest
            of a row is the time of the step.

        Example:
            >>> ServerLinks(1.0, 1.0).push_seconds(np.array([[9.0, 3.0, 3.0]]))
            array([[11.,  6.,  7.]])
        """
        order = np.arange(1, busy_seconds.shape[-1] + 1)
        pulled = np.maximum(order * self.shard_seconds, self.transfer_seconds)
        computed = pulled + self.latency_seconds + busy_seconds
        ranks = np.argsort(computed, axis=-1, kind="stable")
        arrivals = np.take_along_axis(computed, ranks, axis=-1)
        begun = np.maximum.accumulate(arrivals - (order - 1) * self.shard_seconds, axis=-1)
        sent = begun + order * self.shard_seconds
        received = np.maximum(sent, arrivals + self.transfer_seconds) + self.latency_seconds
        pushed: Floats = np.empty_like(computed)
        np.put_along_axis(pushed, ranks, received, axis=-1)
        return pushed


class LinkQueue:
    """Queue of transfers in one direction over the links of all servers, first in, first out.

    Each of S servers holds 1 / S of the model, so that every push and every pull consists of S
    shards of equal size, one for each server. The shards enter the queues of all S links at once,
    and a link moves one shard after another, in the order of arrival, at its full bandwidth::

        sent_k = max(arrival_k, sent_{k-1}) + B / (S b)
        received_k = max(sent_k, arrival_k + B / b) + l

    with B bytes of gradient, b bytes per second of every link, and l seconds of latency. All S
    links carry the same traffic, so that one queue stands for all of them. Links are full duplex:
    pushes and pulls are two queues. The worker's own link bounds the duration of a transfer from
    below (ours: it does not delay the shards in the servers' queues).

    Args:
        links: Seconds that transfers take.
    """

    def __init__(self, links: ServerLinks) -> None:
        self._links = links
        self._sent = 0.0

    def transfer(self, now: float) -> float:
        """Adds the transfer of one worker and returns the time at which it has been received.

        Args:
            now: Time of the request in seconds, >= that of the last one.
        """
        links = self._links
        self._sent = max(now, self._sent) + links.shard_seconds
        return max(self._sent, now + links.transfer_seconds) + links.latency_seconds
