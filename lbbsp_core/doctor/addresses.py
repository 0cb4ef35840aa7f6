"""Addresses of a cluster as this machine sees them: names, routes, ports. Nothing is connected."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Final, NamedTuple, TypeAlias

import psutil

from lbbsp_core.doctor.finding import Finding, note, problem
from lbbsp_core.launch.hosts import bind_error, is_loopback

RESOLVE_SECONDS: Final = 10.0
"""Time for which answers of the name service are waited for."""

_START_WATCH: Final = "_start_watch.py"

Numbers: TypeAlias = "list[str] | str"
"""IP numbers of a host, or a text that says why it has none."""

Resolve: TypeAlias = Callable[[Sequence[str]], Mapping[str, Numbers]]


class Task(NamedTuple):
    """Task of a cluster: its kind and number, such as "worker 1", and where it listens."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name} ({self.host}:{self.port})"


def resolve(hosts: Iterable[str], seconds: float = RESOLVE_SECONDS) -> Mapping[str, Numbers]:
    """Resolves names of hosts, all at once."""
    late = f"the name service did not answer within {seconds:g} s"
    numbers: dict[str, Numbers] = dict.fromkeys(hosts, late)

    def look_up(host: str) -> None:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            numbers[host] = list(dict.fromkeys(str(info[4][0]) for info in infos))
        except (OSError, UnicodeError) as error:
            numbers[host] = getattr(error, "strerror", None) or str(error)

    # Daemons, not joined for good: the C library may take longer than we wait.
    threads = [threading.Thread(target=look_up, args=(host,), daemon=True) for host in numbers]
    for thread in threads:
        thread.start()
    end = monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - monotonic()))
    return dict(numbers)


def is_local(numbers: Numbers) -> bool:
    """Returns whether a host has numbers of the loopback only."""
    return not isinstance(numbers, str) and all(map(is_loopback, numbers))


def is_own(number: str) -> bool:
    """Returns whether an IP number is one of this machine's."""
    return bind_error(number, 0) == 0


def check_port(
    check: str, port: int, where: str, numbers: Sequence[str] = ("",)
) -> Iterator[Finding]:
    """Yields why this process may not listen on a port, if it may not."""
    errors = [error for number in numbers if (error := bind_error(number, port))]
    if not errors:
        return
    reason, remedy = f"cannot be opened: {os.strerror(errors[0])}", "choose another port in "
    if errno.EADDRINUSE in errors:
        user, yields = user_of(port)
        reason = f"is used by {user}"
        if yields:
            text = f"port {port} {reason}, which waits there for a worker of a job that has ended"
            yield note(check, text, "if that is another job, wait ten minutes, or end it")
            return
        remedy = f"end it (`ss -ltnp 'sport = :{port}'`), or {remedy}"
    elif errno.EACCES in errors:
        reason, remedy = "may not be opened by this user", "choose a port above 1023 in "
    yield problem(check, f"port {port} {reason}", remedy + where)


def user_of(port: int) -> tuple[str, bool]:
    """Returns which process listens on a port, as far as this user may know.

    And whether it only waits on behalf of a worker of lbbsp, and yields to one that starts.
    """
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                yields = any(word.endswith(_START_WATCH) for word in process.cmdline())
                return f"process {connection.pid} ({process.name()})", yields
    return "another process", False


def no_route(number: str) -> str:
    """Returns why there is no route to an IP number, or an empty string; sends no packet."""
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as connected:
            connected.connect((number, 9))
    except OSError as error:
        return error.strerror or str(error)
    return ""
