"""Addresses of a cluster as this machine sees them: names, routes, ports. Nothing is connected."""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Final, NamedTuple

import psutil

RESOLVE_SECONDS: Final = 10.0
"""Time for which answers of the name service are waited for."""


class Address(NamedTuple):
    """Address of a task."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parses ``host:port``; a host may be an IPv6 number in brackets."""
    host, _, port = text.rpartition(":")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def resolve(
    hosts: Iterable[str], seconds: float = RESOLVE_SECONDS
) -> Mapping[str, list[str] | str]:
    """Resolves names of hosts, all at once: to IP numbers, or a text that says why not."""
    late = f"the name service did not answer within {seconds:g} s"
    found: dict[str, list[str] | str] = dict.fromkeys(hosts, late)

    def look_up(host: str) -> None:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found[host] = list(dict.fromkeys(str(info[4][0]) for info in infos))
        except (OSError, UnicodeError) as error:
            found[host] = getattr(error, "strerror", None) or str(error)

    # Not waited for at the end: the C library may take longer than we wait.
    threads = [threading.Thread(target=look_up, args=(each,), daemon=True) for each in found]
    for thread in threads:
        thread.start()
    end = monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - monotonic()))
    return dict(found)


def is_loopback(number: str) -> bool:
    """Returns whether an IP number means the machine itself."""
    try:
        return ipaddress.ip_address(number.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_local(found: Sequence[str] | str) -> bool:
    """Returns whether a host that `resolve` has looked up has numbers of the loopback only."""
    return not isinstance(found, str) and all(map(is_loopback, found))


def is_own(number: str) -> bool:
    """Returns whether an IP number is one of this machine's."""
    return bind_error(number, 0) == 0


def bind_error(number: str, port: int) -> int:
    """Returns the number of the error with which a port cannot be bound; 0 if it can.

    The socket never listens. "" stands for all interfaces, port 0 for any.
    """
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            # As a server does: a port on which connections have ended before is free.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((number, port))
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def user_of(port: int) -> str:
    """Returns which process listens on a port, as far as this user may know."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            listens = each.status == psutil.CONN_LISTEN
            if listens and each.laddr and each.laddr.port == port and each.pid:
                return f"process {each.pid} ({psutil.Process(each.pid).name()})"
    return "another process"


def no_route(number: str) -> str:
    """Returns why there is no route to an IP number, or an empty string; sends no packet."""
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as connected:
            connected.connect((number, 9))
    except OSError as error:
        return error.strerror or str(error)
    return ""
