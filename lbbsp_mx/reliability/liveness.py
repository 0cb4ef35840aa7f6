"""Watches over the processes of a cluster, so that none of them waits for one that has ended.

The scheduler receives signs of life from all workers and servers, names one that is lost, and
ends. Workers and servers end when the scheduler has ended or is lost.
"""

from __future__ import annotations

import ctypes
import math
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import psutil
from mxnet.base import _LIB, check_call

from lbbsp_core.runtime.reliability.liveness import MAX_COUNTED_SECONDS, print_message
from lbbsp_core.runtime.reliability.marks import note_lost
from lbbsp_mx import cluster, env

SCHEDULER: Final = 1
EVERYONE: Final = 6  # group of all servers (2) and workers (4)

Address = tuple[str, int]

_LONG_AGO: Final = -(10**9)
_MARK: Final = 2**40  # seconds since 1970: a time that no sign of life has
_GET, _SET = "_ZN2ps10Postoffice3GetEv", "_ZN2ps10Postoffice15UpdateHeartbeatEil"
_PROBE_SECONDS: Final = 1.0
_COUNTS: Final = struct.Struct("=120xQQ")  # tcpi_bytes_acked and _received in Linux's tcp_info
_GREETING_BYTES: Final = 64  # which the transport sends to whoever connects; it tells a peer more
_HANDSHAKE_BYTES: Final = 128  # at least 160 come from a process of the job, which says who it is

WAITING_SECONDS: Final = 15.0  # between two messages about processes that have not started
_RECENT_SECONDS: Final = 1.5  # signs come every second
_CLOSED_SECONDS: Final = 1.5  # more of silence, if a connection is closed as well
_REGISTERED_SECONDS: Final = 4.0  # after which only heartbeats count as signs of life
_LASTING_CHECKS: Final = 3  # at which a connection is open, unlike one that only probes the port


def node_names(workers: int, servers: int) -> dict[int, str]:
    """Returns the names of all workers and servers by their numbers in the transport."""
    names = {9 + 2 * rank: f"worker {rank}" for rank in range(workers)}
    return names | {8 + 2 * rank: f"server {rank}" for rank in range(servers)}


def worker_rank(node: int) -> int | None:
    """Returns the rank of the worker with a number in the transport, None for a server."""
    return (node - 9) // 2 if node % 2 else None


class Nodes:
    """Signs of life that reach this process over MXNet's transport.

    The scheduler receives those of all processes, the others only those of the scheduler. They
    are sent by threads of the library, whatever Python does.

    Args:
        handle: Handle of a native store.
    """

    def __init__(self, handle: object) -> None:
        self._handle = handle
        self._ready = False
        self.lock = threading.Lock()
        """Held by each call of MXNet's library, and while its profiler starts."""

    def is_ready(self) -> bool:
        """Returns whether the scheduler has connected all processes of the cluster."""
        node = EVERYONE if env.role() == "scheduler" else SCHEDULER
        # All are silent for so long, but only in a ready transport.
        self._ready = self._ready or self._count_silent(node, _LONG_AGO) > 0
        return self._ready

    def has_heartbeat(self, node: int) -> bool:
        """Returns whether a node has given a sign of life since the last call, the first one too.

        The transport notes the time of day of the last sign, which may be set back at any time. So
        we write a time there that no sign has, and look whether another one has replaced it.
        """
        if not hasattr(_LIB, _SET):
            return self._count_silent(node, 2) == 0
        beaten = self._count_silent(node, _LONG_AGO) > 0
        if beaten:
            get, note = _LIB[_GET], _LIB[_SET]
            get.restype = ctypes.c_void_p
            note(ctypes.c_void_p(get()), ctypes.c_int(node), ctypes.c_long(_MARK))
        return beaten

    def _count_silent(self, node: int, seconds: int) -> int:
        count = ctypes.c_int()
        arguments = self._handle, node, ctypes.byref(count), int(seconds)
        with self.lock:
            check_call(_LIB.MXKVStoreGetNumDeadNode(*arguments))
        return count.value


def is_listening() -> bool:
    """Returns whether this process has a socket that listens, as its transport has once it runs."""
    return any(connection.status == psutil.CONN_LISTEN for connection in _connections())


def peers() -> set[Address]:
    """Returns the other ends of the open connections of the cluster to this process."""
    links = _connections()
    ports = {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN}
    opened = [link for link in links if link.status == psutil.CONN_ESTABLISHED]
    own_ends = {link.laddr for link in opened if link.raddr.port in ports}  # it calls itself too
    incoming = [link for link in opened if link.laddr.port in ports and link.raddr not in own_ends]
    return {link.raddr for link in incoming if not _is_stranger(link.fd)}


def scheduler_answers() -> bool | None:
    """Returns whether the scheduler's port accepts connections; None if that cannot be known.

    The kernel accepts them for a process that is suspended, and no longer for one that has ended.
    """
    try:
        socket.create_connection(env.scheduler_address(), _PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # the network or its name service does not answer
        return None
    return True


def _is_stranger(connection: int) -> bool:
    """Returns whether a connection is of another program, as far as the system knows."""
    with socket.socket(fileno=os.dup(connection)) as peer:
        info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
    sent, received = _COUNTS.unpack(info.ljust(_COUNTS.size, b"\0"))
    return bool(sent > 0 and (sent <= _GREETING_BYTES or received <= _HANDSHAKE_BYTES))


def _connections() -> list[Any]:
    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections
    return list(connections(kind="tcp"))


class _Source(ABC):
    """What the sources of a `Watch` share in all processes.

    `transport` returns None before it runs. Only time in which this process was running counts as
    silence of others. `leaving` is set when all workers were asked to leave with a checkpoint.
    """

    def __init__(self, transport: Callable[[], Nodes | None], silence_seconds: float) -> None:
        self._transport, self._silence_seconds = transport, silence_seconds
        self._silent = f"has given no sign of life for {silence_seconds:g} s"
        self._waited = 0.0  # for the start
        self.leaving = False

    def check(self, seconds: float) -> str | None:
        """Returns why this process must end, or None, `seconds` after the last check."""
        transport, counted = self._transport(), min(seconds, MAX_COUNTED_SECONDS)
        if transport is not None and transport.is_ready():
            return self._check(transport, counted)
        before, self._waited = self._waited, self._waited + seconds
        why, state = self._check_before_start(counted)
        if why is None and before // WAITING_SECONDS != self._waited // WAITING_SECONDS:
            print_message(state)
        return why

    @abstractmethod
    def _check(self, transport: Nodes, seconds: float) -> str | None:
        """Looks over a transport that is ready."""

    @abstractmethod
    def _check_before_start(self, seconds: float) -> tuple[str | None, str]:
        """Looks before the transport is ready; also returns what is said every 15 s."""


class SchedulerWatch(_Source):
    """Watch of a worker or server over the scheduler.

    `answers` returns whether the scheduler's port accepts connections, None if unknown; `explain`
    what is known about the cause if the scheduler has ended, or nothing. A scheduler that has never
    answered is lost after `answer_seconds`.
    """

    def __init__(
        self,
        transport: Callable[[], Nodes | None],
        answers: Callable[[], bool | None],
        silence_seconds: float,
        explain: Callable[[], str] = str,
        answer_seconds: float = math.inf,
    ) -> None:
        super().__init__(transport, silence_seconds)
        self._answers, self._explain, self._answer_seconds = answers, explain, answer_seconds
        self._quiet = self._refused = 0.0
        self._has_answered = False

    def _check(self, transport: Nodes, seconds: float) -> str | None:
        if transport.has_heartbeat(SCHEDULER):
            self._quiet = self._refused = 0.0
            return None
        self._quiet += seconds
        if self._quiet > _RECENT_SECONDS and self._answers() is False:
            self._refused += 1
        if self._refused >= 2:
            return self._ended()
        is_lost = self._quiet > self._silence_seconds
        return f"the scheduler at {cluster.root()} {self._silent}" if is_lost else None

    def _check_before_start(self, seconds: float) -> tuple[str | None, str]:
        answers = self._answers()
        self._has_answered = self._has_answered or bool(answers)
        self._refused = self._refused + seconds if self._has_answered and answers is False else 0.0
        waited, why = f"for {self._waited:.0f} s", None
        if self._refused > _CLOSED_SECONDS:
            why = self._ended()
        elif not self._has_answered and self._waited > self._answer_seconds:
            why = f"the scheduler at {cluster.root()} has not answered {waited}"
        state = "does not answer: it has not started, or has ended (see its output)"
        if answers:
            state = "answers, and waits for others, or the job has started without this process"
        return why, (
            f"waiting for {cluster.describe()} {waited}; the scheduler is to listen at "
            f"{cluster.root()}: it {state}"
        )

    def _ended(self) -> str:
        cause = self._explain() or "its own output may say why"
        return f"the scheduler at {cluster.root()} has ended; {cause}"


class NodesWatch(_Source):
    """Watch of the scheduler over all workers and servers.

    `peers` returns the other ends of the open connections to the scheduler; `names` are those of
    the workers and servers by their numbers in the transport. With `leaving`, workers that end are
    not lost.
    """

    def __init__(
        self,
        transport: Callable[[], Nodes | None],
        peers: Callable[[], set[Address]],
        names: Mapping[int, str],
        silence_seconds: float,
    ) -> None:
        super().__init__(transport, silence_seconds)
        self._peers, self._names = peers, names
        self._quiet = dict.fromkeys(names, 0.0)
        self._workers_beat = False
        self._checks: dict[Address, int] = {}
        self._connected: set[Address] = set()
        self._since_ready = self._short = 0.0

    def _check(self, transport: Nodes, seconds: float) -> str | None:
        self._since_ready += seconds
        if self._since_ready < _REGISTERED_SECONDS:
            self._connected = max(self._connected, self._peers(), key=len)
        for node in self._names:
            beats = transport.has_heartbeat(node)
            self._quiet[node] = 0.0 if beats else self._quiet[node] + seconds
            if beats and self._since_ready > _REGISTERED_SECONDS and worker_rank(node) is not None:
                self._workers_beat = True
        silent = self._longer(self._names, _RECENT_SECONDS)
        return self._find_lost(silent) if silent else None

    def _find_lost(self, silent: list[int]) -> str | None:
        """Returns which of the silent nodes are lost, or None.

        Workers that run without this library send no heartbeats: if no worker ever sends one, only
        a closed connection counts.
        """
        peers = self._peers()
        if self.leaving and len(peers) + len(silent) <= len(self._names):
            return None  # their connections are closed: they have left, as all are asked to
        closed = self._longer(silent, _RECENT_SECONDS + _CLOSED_SECONDS)
        all_silent = len(silent) == len(self._names)  # they may have left together, in order
        if closed and len(peers) < len(self._names) and not all_silent:
            hosts = _hosts(self._connected - peers) or "it"
            ended = f"has ended without leaving the job: the connection from {hosts} is gone"
            return f"{self._named(closed)} {ended}"
        beating = [node for node in silent if self._workers_beat or worker_rank(node) is None]
        lost = self._longer(beating, self._silence_seconds)
        if not lost:
            return None
        why = f"{self._named(lost)} {self._silent}"
        for rank in map(worker_rank, lost):
            if rank is not None:
                note_lost(rank, why)  # which the launcher names, and may leave out
        return why

    def _longer(self, nodes: Iterable[int], seconds: float) -> list[int]:
        return [node for node in nodes if self._quiet[node] > seconds]

    def _named(self, nodes: Iterable[int]) -> str:
        return ", ".join(self._names[node] for node in nodes)

    def _check_before_start(self, seconds: float) -> tuple[str | None, str]:
        peers = self._peers()
        self._checks = {peer: self._checks.get(peer, 0) + 1 for peer in peers}
        lasting = {peer for peer, checks in self._checks.items() if checks >= _LASTING_CHECKS}
        self._connected = max(self._connected, lasting, key=len)
        self._short = self._short + seconds if len(peers) < len(self._connected) else 0.0
        gone, job = _hosts(self._connected - peers), cluster.describe()
        ended = f"a worker or server at {gone} has ended before {job} started"
        count, hosts = len(lasting), f" ({_hosts(lasting)})" if lasting else ""
        return ended if self._short > _CLOSED_SECONDS else None, (
            f"the scheduler has waited {self._waited:.0f} s for {job}: {count} of "
            f"{len(self._names)} processes have connected{hosts}"
        )


def _hosts(peers: Iterable[Address]) -> str:
    return ", ".join(sorted({host for host, _ in peers}))
