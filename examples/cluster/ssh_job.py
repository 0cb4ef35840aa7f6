"""Trains on several machines that ssh reaches, with the same folder and Python on each of them.

    python ssh_job.py --hosts node1,node2,node3 --directory ~/project train.py [ARGS]...

Prints the output of all workers, and ends with the first status that is not 0. If one worker
fails, the others end by themselves, or are ended after 30 s. Ctrl-C, or SIGTERM to this process,
ends all.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from worker import arguments, check, wait

WORKER = Path(__file__).resolve().with_name("worker.py")
READ_SECONDS = 5.0  # for output after the end: ssh may leave a process that shares connections


def variable(text: str) -> str:
    """Returns NAME=VALUE; of a NAME alone, with the value that it has here."""
    name, equals, _ = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"must be NAME or NAME=VALUE, got {text}")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set here: set it, or give {name}=VALUE")
    return text if equals else f"{name}={os.environ[name]}"


def folder(text: str) -> str:
    """Returns a folder as a word of the shell, which expands a ~ there, not here."""
    home = re.match(r"~[\w.-]*(/|$)", text)
    start = home[0] if home else ""
    rest = text[len(start) :]
    return start + (shlex.quote(rest) if rest else "")


def copy(host: str, source: IO[str]) -> None:
    """Prints the lines of a worker; where that is impossible, ends the job."""
    try:
        for line in source:
            print(f"[{host}] {line.rstrip()}", flush=True)
    except OSError as error:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        print(f"the output cannot be written ({error}): ending the job", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in source:  # a worker whose output is not read would wait
            pass


def start(host: str, rank: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Starts the worker of a host."""
    worker = ["env", *options.env] if options.env else []
    worker += [options.python, options.worker, "--hosts", ",".join(options.hosts)]
    worker += ["--rank", str(rank), "--port", str(options.port)]
    worker += ["--framework", options.framework, "--", *options.command]
    command = f"cd {folder(options.directory)} && exec {shlex.join(worker)}"
    try:
        return subprocess.Popen(
            [*shlex.split(options.ssh), host, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        sys.exit(f"--ssh cannot be started: {error}")


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--directory", default=".", help="folder of the script on each host")
    parser.add_argument(
        "--python", default="python3", help="Python on each host, as seen from --directory"
    )
    parser.add_argument("--worker", default=str(WORKER), help="path of worker.py on each host")
    parser.add_argument(
        "--env",
        action="append",
        type=variable,
        metavar="NAME[=VALUE]",
        help="variable of the workers, by default with its value here; can be repeated",
    )
    # With a terminal (-tt) the worker gets a hang-up when the connection ends.
    parser.add_argument("--ssh", default="ssh -tt -o BatchMode=yes", help="command to reach a host")
    options = parser.parse_args()
    check(parser, options)
    sys.stdout.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    processes: dict[str, subprocess.Popen[str]] = {}
    readers: list[threading.Thread] = []
    try:
        for rank, host in enumerate(options.hosts):
            process = processes[f"worker {rank} on {host}"] = start(host, rank, options)
            reader = threading.Thread(target=copy, args=(host, process.stdout), daemon=True)
            readers.append(reader)
            reader.start()
        return wait(processes)
    except KeyboardInterrupt:
        return 130
    finally:
        for process in processes.values():
            process.terminate()
        for reader in readers:
            reader.join(READ_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
