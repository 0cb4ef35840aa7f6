"""Runs a script on an MXNet cluster whose processes are started one by one, as by hand."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from waits import HANG_SECONDS

from lbbsp_core.launch.cluster import HOST, free_ports

SCRIPTS = Path(__file__).parent / "scripts"


class Process:
    """One process of the cluster, and what it says."""

    def __init__(self, role: str, command: list[str], variables: dict[str, str]) -> None:
        self.role, self.lines = role, []
        self._popen = subprocess.Popen(
            [sys.executable, "-u", *command],
            env={**os.environ, **variables, "DMLC_ROLE": role},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._new: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def status(self) -> int | None:
        return self._popen.poll()

    def send(self, signum: int) -> None:
        self._popen.send_signal(signum)

    def wait_for(self, start: str, text: str = "") -> str:
        """Returns the next line that starts so and contains a text."""
        while True:
            try:
                line = self._new.get(timeout=HANG_SECONDS)
            except queue.Empty:
                said = f"{self.role} did not say {start!r}, {text!r} but: {self.text}"
                raise TimeoutError(said) from None
            if line.startswith(start) and text in line:
                return line

    def wait(self) -> None:
        """Waits for the end of the process, and of what it says."""
        self._popen.wait(HANG_SECONDS)
        self._reader.join(HANG_SECONDS)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def _read(self) -> None:
        for line in self._popen.stdout:
            self.lines.append(line.rstrip())
            self._new.put(line)


class Cluster:
    """Scheduler, servers and workers; workers in the order of their ranks once these are known."""

    def __init__(
        self,
        args: list[str],
        workers: int,
        servers: int,
        absent: int,
        environment: Mapping[str, str],
    ) -> None:
        (self.port,) = free_ports(1)
        variables = {
            **environment,
            "DMLC_PS_ROOT_URI": HOST,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NODE_HOST": HOST,
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
        }
        serve = ["-m", "lbbsp_mx.server"]
        self._worker = [str(SCRIPTS / args[0]), *args[1:]], variables
        self.scheduler = Process("scheduler", serve, variables)
        self.servers = [Process("server", serve, variables) for _ in range(servers)]
        self.workers: list[Process] = []
        for _ in range(workers - absent):
            self.start_worker()

    @property
    def processes(self) -> list[Process]:
        return [self.scheduler, *self.servers, *self.workers]

    def start_worker(self) -> Process:
        """Starts a worker, also one that was absent, or one too many."""
        self.workers.append(Process("worker", *self._worker))
        return self.workers[-1]

    def first(self, role: str) -> Process:
        """Returns the process for a fault; of the workers that of rank 1."""
        return {"worker": self.workers[-1], "server": self.servers[0], "scheduler": self.scheduler}[
            role
        ]

    def wait_for_ranks(self) -> None:
        self.workers.sort(key=lambda each: int(each.wait_for("RANK").split()[1]))

    def wait_for_ends(self, *but: Process) -> None:
        """Waits until all processes have ended but some, and have said all."""
        for each in self.processes:
            if each not in but:
                each.wait()


@contextmanager
def by_hand(
    *args: str, workers: int = 2, servers: int = 1, absent: int = 0, **environment: str
) -> Iterator[Cluster]:
    """Runs a script; no process is left afterwards."""
    cluster = Cluster(list(args), workers, servers, absent, environment)
    try:
        yield cluster
    finally:
        for each in cluster.processes:
            if each.status is None:
                each.send(signal.SIGCONT)
            each.kill()
