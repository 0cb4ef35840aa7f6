"""Other processes of the cluster, as MXNet's transport (ps-lite) and the network know them."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from typing import Any, Final

import psutil
from mxnet.base import _LIB, check_call

from lbbsp_mx import env

SCHEDULER: Final = 1
EVERYONE: Final = 6  # group of all servers (2) and workers (4)

Address = tuple[str, int]

_LONG_AGO: Final = -(10**9)
_MARK: Final = 2**40  # seconds since 1970: a time that no sign of life has
_GET, _SET = "_ZN2ps10Postoffice3GetEv", "_ZN2ps10Postoffice15UpdateHeartbeatEil"
_PROBE_SECONDS: Final = 1.0
_ACKED: Final = slice(120, 128)  # tcpi_bytes_acked in Linux's tcp_info
_GREETING_BYTES: Final = 64  # which the transport sends to whoever connects; it tells a peer more


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

    def is_ready(self) -> bool:
        """Returns whether the scheduler has connected all processes of the cluster."""
        node = EVERYONE if env.role() == "scheduler" else SCHEDULER
        # All are silent for so long, but only in a ready transport.
        self._ready = self._ready or self._count_silent(node, _LONG_AGO) > 0
        return self._ready

    def has_beaten(self, node: int) -> bool:
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
        check_call(
            _LIB.MXKVStoreGetNumDeadNode(self._handle, node, ctypes.byref(count), int(seconds))
        )
        return count.value


def is_listening() -> bool:
    """Returns whether this process has a socket that listens, as its transport has once it runs."""
    return any(each.status == psutil.CONN_LISTEN for each in _connections())


def peers() -> set[Address]:
    """Returns the other ends of the open connections of the cluster to this process."""
    found = _connections()
    ports = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
    opened = [each for each in found if each.status == psutil.CONN_ESTABLISHED]
    own = {each.laddr for each in opened if each.raddr.port in ports}  # it calls itself too
    incoming = [each for each in opened if each.laddr.port in ports and each.raddr not in own]
    return {each.raddr for each in incoming if not _is_stranger(each.fd)}


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
        info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.stop)
    return 0 < int.from_bytes(info[_ACKED], sys.byteorder) <= _GREETING_BYTES


def _connections() -> list[Any]:
    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections
    return list(connections(kind="tcp"))
