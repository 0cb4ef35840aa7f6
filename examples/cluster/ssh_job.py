"""Trains on several machines that ssh reaches, with the same folder and Python on each of them.

    python ssh_job.py --hosts node1,node2,node3 --directory ~/project train.py [ARGS]...

Prints the output of all workers, and ends with the first status that is not 0. If one worker
fails, the others end by themselves. Ctrl-C, or SIGTERM to this process, ends all.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

WORKER = Path(__file__).resolve().with_name("worker.py")


def copy(host: str, source: IO[str]) -> None:
    """Prints the lines of a worker."""
    for line in source:
        print(f"[{host}] {line.rstrip()}", flush=True)


def start(host: str, rank: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Starts the worker of a host."""
    worker = [options.python, options.worker, "--hosts", options.hosts, "--rank", str(rank)]
    worker += ["--port", str(options.port), "--framework", options.framework, *options.command]
    # The shell expands a ~ of the folder there, not here.
    command = f"cd {options.directory} && exec {shlex.join(worker)}"
    return subprocess.Popen(
        [*shlex.split(options.ssh), host, command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", required=True, help="as the workers know each other")
    parser.add_argument("--directory", default=".", help="folder of the script on each host")
    parser.add_argument("--python", default="python3", help="Python on each host")
    parser.add_argument("--worker", default=str(WORKER), help="path of worker.py on each host")
    parser.add_argument("--port", type=int, default=20000)
    parser.add_argument("--framework", choices=("tensorflow", "mxnet"), default="tensorflow")
    # With a terminal (-tt) the worker gets a hang-up when the connection ends.
    parser.add_argument("--ssh", default="ssh -tt -o BatchMode=yes", help="command to reach a host")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="train.py [ARGS]...")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    hosts = options.hosts.split(",")
    processes: list[subprocess.Popen[str]] = []
    try:
        processes += [start(host, rank, options) for rank, host in enumerate(hosts)]
        pairs = zip(hosts, processes, strict=True)
        readers = [threading.Thread(target=copy, args=(host, one.stdout)) for host, one in pairs]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        statuses = [process.wait() for process in processes]
    except KeyboardInterrupt:
        return 130
    finally:
        for process in processes:
            process.terminate()
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
