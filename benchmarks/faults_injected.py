"""Faults that a training script injects into itself, and its log of the samples that it reads."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

VARIABLE = "FAULTS"
ATTEMPT = "LBBSP_RESTART"  # set by the launcher
FIRST = "FAULTS_FIRST"  # number of the first attempt of a launcher
LONG = "FAULTS_LONG"  # lets a job train until it is ended
X, SAMPLES, EVERY = 32, 32 * 12 + 5, 5
EPOCHS = 10**6 if LONG in os.environ else 4


class Fault(NamedTuple):
    """One fault.

    Args:
        kind: "kill" (SIGKILL), "term" (SIGTERM), "terms" (SIGTERM to all workers at once), "raise",
            "exit 0", "exit 3", "leave" (``os._exit(0)``), "freeze" (SIGSTOP), "pause" (the same for
            some seconds), "spin" (an endless wait in Python, in jobs with a limit) or "full disk"
            (of the files that are flushed to it).
        phase: Place in the script: "start", "step" (after one), "bucket" (between two gradients of
            one) or "end".
        rank: Worker.
        step: Global step, in the phases "step" and "bucket".
    """

    kind: str
    phase: str
    rank: int
    step: int = 0


def to_environment(faults: Sequence[Fault]) -> dict[str, str]:
    """Returns the variables that tell the workers their faults: one fault for each attempt."""
    return {VARIABLE: ";".join(",".join(map(str, fault)) for fault in faults)}


def limit_seconds() -> float | None:
    """Returns the limit of waits for a worker that is alive: one if a fault is such a wait."""
    return 3.0 if "spin" in os.environ.get(VARIABLE, "") else None


class Injector:
    """Fault of this attempt of the job.

    Args:
        folder: Folder of the job, in which the workers note their processes.
        rank: Number of this worker.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.attempt = int(os.environ.get(FIRST, "0")) + int(os.environ.get(ATTEMPT, "0"))
        self._processes = folder / f"processes-{self.attempt}"
        self._processes.mkdir(parents=True, exist_ok=True)
        (self._processes / str(os.getpid())).touch()
        faults = [text.split(",") for text in os.environ.get(VARIABLE, "").split(";") if text]
        self._fault: Fault | None = None
        if self.attempt < len(faults):
            kind, phase, victim, step = faults[self.attempt]
            if int(victim) == rank:
                self._fault = Fault(kind, phase, rank, int(step))

    def at(self, phase: str, step: int = 0) -> None:
        """Fails if the fault belongs here."""
        fault = self._fault
        if fault is None or (fault.phase, fault.step) != (phase, step):
            return
        print(f"FAULT {time.time()}", flush=True)
        if fault.kind in ("kill", "term"):
            os.kill(os.getpid(), getattr(signal, f"SIG{fault.kind.upper()}"))
        elif fault.kind == "terms":
            for each in self._processes.iterdir():
                os.kill(int(each.name), signal.SIGTERM)
        elif fault.kind == "raise":
            raise RuntimeError("injected")
        elif fault.kind == "leave":
            os._exit(0)
        elif fault.kind in ("freeze", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "spin":
            while True:
                time.sleep(1)
        elif fault.kind == "full disk":
            os.fsync = _no_space
        else:
            sys.exit(int(fault.kind.removeprefix("exit ")))


def _no_space(_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class ReadSamples:
    """Data set that notes the step in which each of its samples is read.

    Args:
        folder: Folder of the logs, one for each attempt and worker.
        attempt: Number of the attempt.
        rank: Number of the worker.
    """

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        random = np.random.default_rng(0)
        self._x = random.normal(size=(SAMPLES, 8)).astype("f4")
        self._y = self._x.sum(axis=1, keepdims=True)
        self._log = (folder / f"samples-{attempt}-{rank}.txt").open("w", buffering=1)
        self._step: int | None = None

    def begin_step(self, step: int) -> None:
        """Notes that what is read from now on belongs to this step."""
        self._step = step

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if self._step is not None:  # what is read before the first step is only looked at
            print(self._step, index, file=self._log)
        return self._x[index], self._y[index]


def samples_by_step(folder: Path) -> dict[int, Counter[int]]:
    """Returns the samples that all workers have read in each step; the last attempt counts."""
    read: dict[int, tuple[int, Counter[int]]] = {}
    for path in folder.glob("samples-*.txt"):
        attempt = int(path.stem.split("-")[1])
        lines = path.read_text().splitlines()
        for step, index in (map(int, line.split()) for line in lines if line.count(" ") == 1):
            if step not in read or read[step][0] < attempt:
                read[step] = attempt, Counter()
            if read[step][0] == attempt:
                read[step][1][index] += 1
    return {step: samples for step, (_, samples) in sorted(read.items())}
