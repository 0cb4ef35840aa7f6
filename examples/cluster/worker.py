"""Runs a script as one worker of a cluster, whose hosts are the same list on every one of them.

    python worker.py --hosts node1,node2,node3 --rank 1 [--framework mxnet] train.py [ARGS]...

A host that is listed twice runs two workers. Keras: sets TF_CONFIG and becomes the script. MXNet:
the first worker also runs the scheduler and, like every other one, a parameter server beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

RESOLVE_SECONDS = 120.0  # names of containers become known some time after they have started
SAY_SECONDS = 5.0  # after which a wait for a name is reported
END_SECONDS = 30.0  # after a failure: the other processes of a job end by themselves within 15 s
LEFT = 128 + signal.SIGTERM  # status of a worker that has left in order, after a SIGTERM
LAST_PORT = 65535


def arguments(description: str) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that worker.py and ssh_job.py have in common."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--hosts", required=True, help="names or addresses, with commas")
    parser.add_argument("--port", type=int, default=20000, help="first port, the same on all")
    parser.add_argument("--framework", choices=("tensorflow", "mxnet"), default="tensorflow")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="train.py [ARGS]...")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Makes a list of the hosts; ends with an error if one, the port or the script is wrong."""
    options.hosts = [host.strip() for host in options.hosts.split(",")]
    if not all(options.hosts):
        parser.error(f"--hosts must have a name between two commas, got {','.join(options.hosts)}")
    for host in options.hosts:
        if problem := host_problem(host, options):
            parser.error(f"--hosts {problem}, got {host}")
    highest = LAST_PORT + 1 - max(map(options.hosts.count, options.hosts))
    if not 1 <= options.port <= highest:
        parser.error(
            f"--port must be from 1 to {highest}, got {options.port}: it is the port of the first "
            "worker of a host, and others follow"
        )
    if options.command[:1] == ["--"]:  # argparse keeps it
        del options.command[0]
    if not options.command:
        parser.error("a script must follow the options: train.py [ARGS]...")


def host_problem(host: str, options: argparse.Namespace) -> str:
    """Returns what is wrong with a host, or an empty string."""
    address = as_address(host)
    if address is None and ":" in host:
        return "must be names or addresses without a port, which --port sets"
    if isinstance(address, ipaddress.IPv6Address) and options.framework == "mxnet":
        return "must be names or IPv4 addresses, because MXNet knows no others"
    loops = host == "localhost" if address is None else address.is_loopback
    if loops and len(set(options.hosts)) > 1:
        return "must be names or addresses under which the workers reach each other"
    return ""


def as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns a host as an address, with or without brackets; None if it is a name."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    return None


def tf_config(hosts: Sequence[str], rank: int, port: int) -> dict[str, str]:
    """Returns TF_CONFIG of a worker; workers of the same host get ports one after the other."""
    ports = [port + hosts[:i].count(host) for i, host in enumerate(hosts)]
    workers = [f"{bracketed(host)}:{own}" for host, own in zip(hosts, ports, strict=True)]
    task = {"type": "worker", "index": rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def bracketed(host: str) -> str:
    """Returns a host as it must stand before a port: an IPv6 address has brackets."""
    address = as_address(host)
    return f"[{address}]" if isinstance(address, ipaddress.IPv6Address) else host


def dmlc(addresses: Sequence[str], rank: int, port: int) -> dict[str, str]:
    """Returns the variables of MXNet, but for the role, of the processes of a worker."""
    return {
        "DMLC_PS_ROOT_URI": addresses[0],
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": addresses[rank],
        "DMLC_NUM_WORKER": str(len(addresses)),
        "DMLC_NUM_SERVER": str(len(addresses)),
    }


def resolve(host: str) -> str:
    """Returns the IPv4 address of a host, for which it waits."""
    started = time.monotonic()
    said = False
    while (waited := time.monotonic() - started) < RESOLVE_SECONDS:
        with contextlib.suppress(OSError):
            return socket.gethostbyname(host)
        if waited > SAY_SECONDS and not said:
            print(f"waiting until {host} has an IPv4 address", file=sys.stderr, flush=True)
            said = True
        time.sleep(1)
    sys.exit(f"the host {host} has no IPv4 address that is known here: correct --hosts")


def reachable(hosts: Sequence[str]) -> list[str]:
    """Returns the addresses of the hosts; ends with an error if one is out of others' reach.

    MXNet's processes tell each other their addresses. On Debian and Ubuntu the name of a machine
    is 127.0.1.1 on this machine itself. TensorFlow does without: it passes the names on, and
    listens on all interfaces.
    """
    addresses = [resolve(host) for host in hosts]
    for host, address in zip(hosts, addresses, strict=True):
        if address.startswith("127.") and len(set(hosts)) > 1:
            sys.exit(
                f"the host {host} is {address} on {socket.gethostname()}, which other machines "
                "cannot reach: list addresses that they reach, or correct /etc/hosts on this one"
            )
    return addresses


def run_mxnet(command: Sequence[str], variables: Mapping[str, str], rank: int) -> int:
    """Runs the worker and the processes beside it; returns its status, or theirs if it is 0."""
    serve = [sys.executable, "-m", "lbbsp_mx.server"]
    roles = [("scheduler", serve)] * (rank == 0) + [("server", serve), ("worker", command)]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    requests: list[int] = []

    def pass_on(signum: int, _: object) -> None:
        requests.append(signum)
        if "worker" in processes:
            processes["worker"].terminate()  # it writes its checkpoint, and the others end after it

    signal.signal(signal.SIGTERM, pass_on)
    try:
        for role, each in roles:
            processes[role] = subprocess.Popen(
                each,
                env={**os.environ, **variables, "DMLC_ROLE": role},
                preexec_fn=None if role == "worker" else ignore_sigterm,
            )
        if requests:  # before the worker was there
            processes["worker"].terminate()
        names = [role for role, _ in reversed(roles)]  # the worker knows best why a job has failed
        return wait({f"the {role}": processes[role] for role in names})
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def ignore_sigterm() -> None:
    """Keeps a server from SIGTERM, which schedulers may send to all processes of a job."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def wait(processes: Mapping[str, subprocess.Popen]) -> int:
    """Waits until all have ended, but not for long once one has failed.

    A process that fails before it has joined the job is missed by no other: these wait for it.

    Args:
        processes: Processes by their names.

    Returns:
        The first status that is not 0, in the order of the processes.
    """
    deadline = math.inf
    while running := [name for name, process in processes.items() if process.poll() is None]:
        failed = [
            f"{name} ended with status {process.returncode}"
            for name, process in processes.items()
            if process.returncode not in (None, 0, LEFT)
        ]
        if failed and deadline == math.inf:
            deadline = time.monotonic() + END_SECONDS
        if time.monotonic() > deadline:
            rest = " and ".join(running)
            message = f"{', '.join(failed)}; ending {rest}, still running {END_SECONDS:g} s later"
            print(message, file=sys.stderr)
            break
        time.sleep(0.2)
    statuses = [process.returncode for process in processes.values()]
    return next((status if status > 0 else 128 - status for status in statuses if status), 0)


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rank", required=True, type=int, help="place in the list, from 0")
    options = parser.parse_args()
    check(parser, options)
    hosts = options.hosts
    if not 0 <= options.rank < len(hosts):
        parser.error(f"--rank must be from 0 to {len(hosts) - 1}, got {options.rank}")
    command = [sys.executable, *options.command]
    if options.framework == "mxnet":
        variables = dmlc(reachable(hosts), options.rank, options.port)
        return run_mxnet(command, variables, options.rank)
    os.environ.update(tf_config(hosts, options.rank, options.port))
    os.execv(sys.executable, command)  # signals reach the script


if __name__ == "__main__":
    sys.exit(main())
