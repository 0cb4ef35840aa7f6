"""Hosts of a job: which machines run its workers, and under which addresses these meet.

--hosts, or the variables of a Slurm step ──> a host, an address and ports of each process
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from lbbsp_core.launch.output import notify
from lbbsp_core.validate import require_integer

FIRST_PORT: Final = 20_000
LAST_PORT: Final = 65_535
_RESOLVE_SECONDS: Final = 120.0
_SAY_SECONDS: Final = 5.0
_HOST: Final = re.compile(r"([\w.][\w.-]*@)?[\w.:%][\w.:%-]*")  # never an option of ssh
_BRACKETS: Final = re.compile(r"\[(.*:.*)\]$")  # around an IPv6 address, which ssh does not take


class Hosts(NamedTuple):
    """Hosts of the workers, by rank; one that is there several times runs several workers."""

    names: tuple[str, ...]  # as the launcher reaches them
    addresses: tuple[str, ...]  # as the workers reach each other
    port: int  # the first one of each host
    rank: int | None = None  # the only worker that this launcher starts, on this machine

    @property
    def remote(self) -> bool:
        """Whether the launcher starts all workers, on other machines, by ssh."""
        return self.rank is None

    def of(self, members: Sequence[int]) -> Hosts:
        """Returns the hosts of some workers."""
        names, addresses = ([column[i] for i in members] for column in self[:2])
        return self._replace(names=tuple(names), addresses=tuple(addresses))

    def ports(self, places: Sequence[str]) -> list[int]:
        """Returns a port for each process, by the address of its host."""
        ports = [self.port + places[:i].count(place) for i, place in enumerate(places)]
        if max(ports) > LAST_PORT:
            raise ValueError(
                f"port must be at most {self.port - max(ports) + LAST_PORT}, got {self.port}: it "
                "is the first of the ports of a host, and each process of the job needs one"
            )
        return ports


def find_hosts(
    hosts: str | Sequence[str] | None,
    workers: int | None,
    *,
    framework: str,
    port: int | None = None,
    rank: int | None = None,
    env: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Hosts | None:
    """Returns the hosts of a job; None if all workers run on this machine.

    Without hosts and a number of workers, this process must be a task of a Slurm step, and starts
    the worker of this task. MXNet numbers workers in the descending order of their addresses as
    text: these are the ranks here, too.
    """
    if hosts is None and workers is None:
        hosts, rank, port = _slurm_task(environ, port)
    if hosts is None:
        if rank is not None or port is not None:
            option, value = ("rank", rank) if rank is not None else ("port", port)
            raise ValueError(
                f"{option} = {value} needs hosts, or a Slurm step: workers of one machine get "
                f"free ports; give hosts, or omit {option}"
            )
        if env:
            raise ValueError(
                f"env = {list(env)} is for processes on other hosts, and no hosts are given: leave "
                "it out, because processes of this machine have all variables"
            )
        return None
    entries = hosts.split(",") if isinstance(hosts, str) else hosts
    names = [_BRACKETS.sub(r"\1", name.strip()) for name in entries]
    if workers is not None and workers != len(names):
        raise ValueError(
            f"workers must be the number of hosts = {len(names)}, got {workers}: omit it, and "
            "repeat a host that is to run several workers"
        )
    require_integer("port", FIRST_PORT if port is None else port, 1)
    if rank is not None and not 0 <= rank < len(names):
        raise ValueError(
            f"rank must be from 0 to {len(names) - 1}, the last place in the list of hosts, got "
            f"{rank}: give the place of this machine"
        )
    addresses = [_address(name, names, framework) for name in names]
    order = list(range(len(names)))
    if framework == "mxnet":
        # Names of containers become known some time after these have started.
        seconds = 0.0 if rank is None else _RESOLVE_SECONDS
        addresses = [_reachable(address, addresses, seconds) for address in addresses]
        order.sort(key=addresses.__getitem__, reverse=True)
    job_hosts = Hosts(tuple(names), tuple(addresses), FIRST_PORT if port is None else port)
    return job_hosts.of(order)._replace(rank=None if rank is None else order.index(rank))


def _address(name: str, names: Sequence[str], framework: str) -> str:
    """Returns the address of a host; raises ValueError if it cannot be one."""
    if not name:
        raise ValueError(
            f"hosts must have a name between two commas, got {','.join(names)!r}: remove one"
        )
    address = name.rpartition("@")[2]
    number = _number(address)
    problem = ""
    if _HOST.fullmatch(name) is None or (number is None and ":" in address):
        problem = "must be names or addresses without a port, which --port sets"
    elif isinstance(number, ipaddress.IPv6Address) and framework == "mxnet":
        problem = "must be names or IPv4 addresses, because MXNet knows no others"
    elif (address == "localhost" or is_loopback(address)) and len(set(names)) > 1:
        problem = "must be names or addresses under which the workers reach each other"
    if problem:
        raise ValueError(f"hosts {problem}, got {name!r}: correct it")
    return address


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns a host as an address; None if it is a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def bracketed(host: str) -> str:
    """Returns a host as it must stand before a port: an IPv6 address has brackets."""
    number = _number(host)
    return f"[{number}]" if isinstance(number, ipaddress.IPv6Address) else host


def is_loopback(number: str) -> bool:
    """Returns whether an IP number means the machine itself."""
    address = _number(number.partition("%")[0])
    return address is not None and address.is_loopback


def _reachable(host: str, hosts: Sequence[str], seconds: float) -> str:
    """Returns the IPv4 address of a host, which becomes known within some seconds.

    MXNet's processes tell each other their addresses. On Debian and Ubuntu the name of a machine
    is 127.0.1.1 on this machine itself.
    """
    started, has_reported = time.monotonic(), False
    while True:
        with suppress(OSError, UnicodeError):
            number = socket.gethostbyname(host)
            break
        waited = time.monotonic() - started
        if waited > seconds:
            raise ValueError(f"the host {host!r} has no IPv4 address here: correct it")
        if waited > _SAY_SECONDS and not has_reported:
            has_reported = True
            notify(f"waiting until {host} has an address")
        time.sleep(1)
    if is_loopback(number) and len(set(hosts)) > 1:
        raise ValueError(
            f"the host {host!r} is {number} on {socket.gethostname()}, which other machines cannot "
            "reach: list addresses that they reach, or correct /etc/hosts on this one"
        )
    return number


def _slurm_task(environ: Mapping[str, str], port: int | None) -> tuple[list[str], int, int]:
    """Returns the hosts of a Slurm step, the rank of this task of it, and the first port."""
    if "SLURM_STEP_NODELIST" not in environ:
        raise ValueError(
            "workers must be given: -n N starts N on this machine, --hosts a,b,c one on each host, "
            "and under Slurm `srun lbbsp launch` one in each task"
        )
    nodes, task = environ["SLURM_STEP_NODELIST"], int(environ["SLURM_PROCID"])
    try:
        names = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"the hosts of this Slurm step ({nodes}) cannot be read ({error}): give --hosts with "
            f"--rank {task}, or let this machine find Slurm's program scontrol"
        ) from None
    # "2(x3),1" stands for 2, 2, 2 and 1.
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    counts = [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]
    hosts = [name for name, tasks in zip(names, counts, strict=False) for _ in range(tasks)]
    here = environ.get("SLURMD_NODENAME", "")
    if task >= len(hosts) or hosts[task] != here:
        raise ValueError(
            f"task {task} of the Slurm step is on {here}, but in block distribution the hosts of "
            f"its tasks are {','.join(hosts)}: give srun --distribution=block"
        )
    # 16 ports for each of 750 jobs, below those that Linux hands out: jobs may share a node.
    by_job = FIRST_PORT + int(environ.get("SLURM_JOB_ID", "0")) % 750 * 16
    return hosts, task, by_job if port is None else port


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


def require_free_port(port: int, seconds: float = 0.0) -> None:
    """Waits until a port is free, as it is when a process of an earlier attempt has ended."""
    until = time.monotonic() + seconds
    while error := bind_error("", port):
        if time.monotonic() > until:
            raise ValueError(
                f"port {port} of {socket.gethostname()} cannot be opened ({os.strerror(error)}): "
                "end what uses it, or give another port"
            )
        time.sleep(0.1)
