"""Runs a script as one worker of a cluster, whose hosts are the same list on every one of them.

    python worker.py --hosts node1,node2,node3 --rank 1 [--framework mxnet] train.py [ARGS]...

A host that is listed twice runs two workers. Keras: sets TF_CONFIG and becomes the script. MXNet:
the first worker also runs the scheduler and, like every other one, a parameter server beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

RESOLVE_SECONDS = 120.0  # names of containers become known some time after they have started


def tf_config(hosts: Sequence[str], rank: int, port: int) -> dict[str, str]:
    """Returns TF_CONFIG of a worker; workers of the same host get ports one after the other."""
    workers = [f"{host}:{port + hosts[:i].count(host)}" for i, host in enumerate(hosts)]
    task = {"type": "worker", "index": rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


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
    deadline = time.monotonic() + RESOLVE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return socket.gethostbyname(host)
        time.sleep(1)
    sys.exit(f"the host {host} cannot be resolved: correct --hosts")


def run_mxnet(command: Sequence[str], variables: dict[str, str], rank: int) -> int:
    """Runs the worker and the processes beside it; returns the first status that is not 0."""
    serve = [sys.executable, "-m", "lbbsp_mx.server"]
    roles = [("scheduler", serve)] * (rank == 0) + [("server", serve), ("worker", command)]
    processes = [
        subprocess.Popen(each, env={**os.environ, **variables, "DMLC_ROLE": role})
        for role, each in roles
    ]
    worker = processes[-1]
    signal.signal(signal.SIGTERM, lambda *_: worker.terminate())  # it writes its checkpoint
    try:
        statuses = [process.wait() for process in reversed(processes)]  # the others end after it
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return next((status if status > 0 else 128 - status for status in statuses if status), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", required=True, help="names or addresses, with commas")
    parser.add_argument("--rank", required=True, type=int, help="place of this worker, from 0")
    parser.add_argument("--port", type=int, default=20000, help="first port, the same on all")
    parser.add_argument("--framework", choices=("tensorflow", "mxnet"), default="tensorflow")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="train.py [ARGS]...")
    options = parser.parse_args()
    hosts = [host.strip() for host in options.hosts.split(",")]
    if not 0 <= options.rank < len(hosts) or not all(hosts) or not options.command:
        parser.error(f"--rank must be from 0 to {len(hosts) - 1}, and a script must follow")
    command = [sys.executable, *options.command]
    if options.framework == "mxnet":
        variables = dmlc([resolve(host) for host in hosts], options.rank, options.port)
        return run_mxnet(command, variables, options.rank)
    os.environ.update(tf_config(hosts, options.rank, options.port))
    os.execv(sys.executable, command)  # signals reach the script


if __name__ == "__main__":
    sys.exit(main())
