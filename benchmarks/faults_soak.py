"""Watches a long job of two workers: what they use over time, and what strangers do to it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from faults_injected import LONG
from faults_jobs import SCRIPTS, launcher

PAUSE_SECONDS, IDLE, NOISY = 20.0, 1000, 200


def soak(plugin: str, seconds: float, rng: random.Random) -> None:
    """Prints a line for each look at a job.

    In the middle third of the time strangers are connected to the ports on which Keras' workers
    listen: some send nothing, others random bytes before they leave. MXNet's transport ends a
    process that is sent such bytes.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as strangers:
        folder = Path(name)
        launch = [*launcher(plugin, 2), "--run-dir", str(folder / "run")]
        script = str(Path(__file__).with_name(SCRIPTS[plugin]))
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(
                [sys.executable, *launch, script, name],
                env={**os.environ, LONG: "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        record = folder / "run" / "run.jsonl"
        while not record.exists() and job.poll() is None:
            time.sleep(1)
        print(f"{plugin}\nseconds   steps   MiB  files  threads  record MiB", flush=True)
        began, connected = time.monotonic(), False
        while job.poll() is None and (passed := time.monotonic() - began) < seconds:
            is_middle = plugin == "keras" and seconds < 3 * passed < 2 * seconds
            if is_middle and not connected:
                _connect(_workers(job.pid), strangers, rng)
            elif connected and not is_middle:
                strangers.close()
            connected = is_middle
            print(f"{passed:7.0f} {_look(_workers(job.pid), record)}", flush=True)
            time.sleep(PAUSE_SECONDS)
        job.send_signal(signal.SIGTERM)
        print(f"status {job.wait()} after SIGTERM (143: left in order)", flush=True)
        print((folder / "output").read_text()[-1500:])


def _workers(launcher: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error):
            own = process.environ()
            if own.get("DMLC_ROLE") == "worker" or "TF_CONFIG" in own:
                found.append(process)
    return found


def _look(workers: list[psutil.Process], record: Path) -> str:
    """Returns what the largest of the workers uses, and how far the job has got."""
    megabytes = max(each.memory_info().rss for each in workers) / 2**20
    files = max(each.num_fds() for each in workers)
    threads = max(each.num_threads() for each in workers)
    content = record.read_bytes()
    size = len(content) / 2**20
    steps = content.count(b"\n")
    return f"{steps:7} {megabytes:5.0f} {files:6} {threads:8} {size:11.2f}"


def _connect(workers: list[psutil.Process], stack: ExitStack, rng: random.Random) -> None:
    addresses = [
        each.laddr
        for worker in workers
        for each in worker.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    refused = 0
    for number in range(IDLE + NOISY):
        try:
            host, port = addresses[number % len(addresses)]
            host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host)
            stranger = socket.create_connection((host, port), 5)
            if number < IDLE:
                stack.enter_context(stranger)
                continue
            with stranger:
                stranger.sendall(rng.randbytes(rng.randint(1, 4096)))
        except OSError:
            refused += 1
    print(f"{IDLE} idle and {NOISY} noisy strangers at {addresses}, {refused} refused", flush=True)
