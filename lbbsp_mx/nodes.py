"""Other processes of the cluster, as MXNet's transport (ps-lite) and the network know them."""

from __future__ import annotations

import ctypes
import socket
from typing import Any, Final

import psutil
from mxnet.base import _LIB, check_call

from lbbsp_mx import env

SCHEDULER: Final = 1
EVERYONE: Final = 6
"""Group of all servers (2) and workers (4)."""

Address = tuple[str, int]

_LONG_AGO: Final = -(10**6)
_PROBE_SECONDS: Final = 1.0


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

    def is_ready(self) -> bool:
        """Returns whether the scheduler has connected all processes of the cluster."""
        node = EVERYONE if env.role() == "scheduler" else SCHEDULER
        return self._count_silent(node, _LONG_AGO) > 0  # all are, but only in a ready transport

    def is_silent(self, node: int, seconds: int) -> bool:
        """Returns whether a node, or one of a group, has given no sign in the last seconds, >= 1.

        The transport reads the time of day, in whole seconds: one answer proves little.
        """
        return self._count_silent(node, seconds) > 0

    def _count_silent(self, node: int, seconds: int) -> int:
        count = ctypes.c_int()
        check_call(
            _LIB.MXKVStoreGetNumDeadNode(self._handle, node, ctypes.byref(count), int(seconds))
        )
        return count.value


def is_listening() -> bool:
    """Returns whether this process has a socket that listens, as its transport has once it runs."""
    return any(each.status == psutil.CONN_LISTEN for each in _connections())


def peers() -> set[Address]:
    """Returns the other ends of the open connections to this process, the scheduler."""
    _, port = env.scheduler_address()
    opened = [each for each in _connections() if each.status == psutil.CONN_ESTABLISHED]
    own = {each.laddr for each in opened if each.raddr.port == port}  # it calls itself too
    return {each.raddr for each in opened if each.laddr.port == port} - own


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


def _connections() -> list[Any]:
    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections
    return list(connections(kind="tcp"))
