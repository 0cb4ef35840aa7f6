"""Injects faults into real training jobs of three workers, and says what became of them.

``faults.py ends`` injects each kind of fault at a random step, or at the start, on a random worker,
into jobs that the launcher started and into jobs whose processes were started one by one, without
restarts.
Prints the seconds from the fault to the end of all processes, and whether the right worker was
named.

``faults.py restarts`` kills a random worker at random steps (``--fault term``: preempts it by
SIGTERM; ``terms``: all workers at once), restarts the job from its checkpoint, and compares it with
an unbroken run: the largest difference of a final weight or moving average, relative to the largest
one, and the samples of every step. ``--variant`` is one of the scripts', see ``faults_keras.py``:
in "buckets" the fault is between two gradients of a step. A quarter of the jobs continue with the
survivors only, but not where there is noise, which another number of workers draws otherwise. By
hand, the newest checkpoint is damaged before every second restart. With ``--started down`` jobs
lose a worker after the other, end with the last one, and are started again with all of them.

``faults.py soak`` trains for ``--seconds``, and prints what a worker uses; strangers are connected
to the workers' ports meanwhile.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from faults_injected import (
    ATTEMPT,
    EPOCHS,
    FIRST,
    SAMPLES,
    Fault,
    X,
    samples_by_step,
    to_environment,
)
from faults_jobs import SCRIPTS, End, run_job
from faults_soak import soak

WORKERS, STEPS_PER_EPOCH = 3, -(-SAMPLES // X)
STEPS = EPOCHS * STEPS_PER_EPOCH
JOB_SECONDS = 900.0
TOLERANCE = 2e-6
PHASES = {
    **dict.fromkeys(("kill", "raise", "exit 0", "exit 3", "leave"), ("start", "step", "step")),
    **dict.fromkeys(("freeze", "spin", "pause", "full disk"), ("step",)),
}
PROCEEDS = ("pause", "full disk")


def ends(plugins: list[str], runs: int, rng: random.Random) -> None:
    """Prints a line for each fault without a restart."""
    print(f"{'plugin':<7}{'started':<10}{'fault':<11}{'worker':>6}{'step':>6}  end")
    for plugin, by_hand, kind, _ in product(plugins, (False, True), PHASES, range(runs)):
        rank = 0 if kind == "full disk" else rng.randrange(WORKERS)  # it writes the checkpoints
        phase = rng.choice(PHASES[kind])
        fault = Fault(kind, phase, rank, rng.randrange(1, STEPS) if phase == "step" else 0)
        with tempfile.TemporaryDirectory() as folder:
            end = run_job(
                plugin,
                [folder],
                to_environment([fault]),
                workers=WORKERS,
                launched=None if by_hand else [],
                pauses=kind == "pause",
                limit_seconds=JOB_SECONDS,
            )
        started = "by hand" if by_hand else "launched"
        step = fault.step or fault.phase
        start = f"{plugin:<7}{started:<10}{kind:<11}{fault.rank:>6}{step:>6}  "
        print(start + _describe(fault, end), flush=True)


def _describe(fault: Fault, end: End) -> str:
    if end.seconds is None:
        return f"no fault took place: status {end.status}\n{end.text[-3000:]}"
    if fault.kind in PROCEEDS:
        return f"FAILED\n{end.text[-3000:]}" if end.status else "proceeded to its end"
    if end.left:
        return f"HANGS: {end.left} processes left after {end.seconds:.0f} s\n{end.text[-3000:]}"
    named = any(f"worker {fault.rank}" in line for line in end.text.splitlines())
    return (
        f"status {end.status} after {end.seconds:4.1f} s, worker "
        f"{'named' if named else 'NOT NAMED'}{'' if end.status else ', COUNTED AS SUCCESS'}"
    )


@dataclass(frozen=True)
class Restarts:
    """Jobs that are broken and continued.

    Args:
        fault: Kind of the faults.
        variant: Variant of the scripts.
        started: How jobs are started and continued: "launched", "by hand", "elastic", "down", or ""
            for the first three in turn.
        workers: Number of workers.
        most: Largest number of faults of a job.
        rng: Chooses workers and steps.
    """

    fault: str
    variant: str
    started: str
    workers: int
    most: int
    rng: random.Random

    def run(self, plugins: list[str], runs: int) -> None:
        """Prints a line for each job."""
        print(f"{'plugin':<7}{'started':<10}{'faults (worker@step)':<22}{'weights':>8}  samples")
        for plugin in plugins:
            with tempfile.TemporaryDirectory() as name:
                unbroken = Path(name)
                end = self._job(plugin, unbroken, [], None)
                if end.status or not (unbroken / "weights.npz").exists():
                    raise SystemExit(f"the unbroken run failed:\n{end.text[-3000:]}")
                for run in range(runs):
                    self._continue(plugin, run, unbroken)

    def _continue(self, plugin: str, run: int, unbroken: Path) -> None:
        """Breaks a job, continues it, and prints how it compares with `unbroken`."""
        alike = self.variant == "noise" or self.fault == "terms"
        last = "launched" if alike else "elastic"
        started = self.started or ("launched", "by hand", "launched", last)[run % 4]
        count = 1 if started == "elastic" else self.rng.randint(1, self.most)
        count = self.workers if started == "down" else count
        phase = "bucket" if self.variant == "buckets" else "step"
        left = [self.workers - i * (started == "down") for i in range(count)]
        steps = sorted(self.rng.sample(range(1, STEPS), count))
        faults = [
            Fault(self.fault, phase, self.rng.randrange(workers), step)
            for workers, step in zip(left, steps, strict=True)
        ]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if started == "by hand":
                for attempt in range(count + 1):
                    end = self._job(plugin, folder, faults, None, **{ATTEMPT: str(attempt)})
                    if attempt % 2 == 0:
                        _damage_newest(folder / "checkpoints", self.rng)
            elif started == "down":
                fewer = ["--max-restarts", str(count - 1), "--elastic", "1"]
                end = self._job(plugin, folder, faults, fewer)
                if not end.status or (folder / "weights.npz").exists():
                    raise SystemExit(f"the last worker was not lost:\n{end.text[-3000:]}")
                end = self._job(plugin, folder, faults, [], **{FIRST: str(count)})
            else:
                elastic = ["--elastic", str(self.workers - 1)] if started == "elastic" else []
                end = self._job(plugin, folder, faults, ["--max-restarts", "3", *elastic])
            places = " ".join(f"{fault.rank}@{fault.step}" for fault in faults)
            start = f"{plugin:<7}{started:<10}{places:<22}"
            if end.status or not (folder / "weights.npz").exists():
                print(f"{start}FAILED\n{end.text[-3000:]}", flush=True)
                return
            attempts = len([*folder.glob("processes-*")])
            difference, samples = _compare(folder, unbroken)
        if plugin == "keras" and (
            started == "down" or (self.workers == 2 and started == "elastic")
        ):
            samples = "(a single worker reads ahead)"
        verdict = "" if difference <= TOLERANCE else "  WEIGHTS DIFFER"
        verdict += "" if attempts == count + 1 else f"  {attempts} ATTEMPTS"
        print(f"{start}{difference:8.1e}  {samples}{verdict}", flush=True)

    def _job(
        self,
        plugin: str,
        folder: Path,
        faults: list[Fault],
        launched: list[str] | None,
        **variables: str,
    ) -> End:
        return run_job(
            plugin,
            [str(folder), self.variant],
            {**to_environment(faults), **variables},
            workers=self.workers,
            launched=launched,
            limit_seconds=JOB_SECONDS,
        )


def _damage_newest(checkpoints: Path, rng: random.Random) -> None:
    """Cuts the newest checkpoint off, if there is one before it."""
    paths = sorted(checkpoints.glob("step-*.npz"))
    if len(paths) > 1:
        with paths[-1].open("r+b") as file:
            file.truncate(rng.randrange(paths[-1].stat().st_size))


def _compare(folder: Path, unbroken: Path) -> tuple[float, str]:
    """Returns the largest difference of a weight, relative, and a verdict on the samples."""
    with np.load(folder / "weights.npz") as got, np.load(unbroken / "weights.npz") as expected:
        largest = max(np.abs(expected[name]).max() for name in expected.files)
        difference = max(np.abs(got[name] - expected[name]).max() for name in expected.files)
    steps = samples_by_step(folder)
    if steps != samples_by_step(unbroken):
        return difference / largest, "STEPS HAVE OTHER SAMPLES"
    epochs = [Counter[int]() for _ in range(EPOCHS)]
    for step, samples in steps.items():
        epochs[step // STEPS_PER_EPOCH] += samples
    complete = all(epoch == Counter(range(SAMPLES)) for epoch in epochs)
    return difference / largest, "each once an epoch" if complete else "NOT EACH ONCE AN EPOCH"


def main() -> None:
    """Runs a campaign."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("campaign", choices=("ends", "restarts", "soak"))
    parser.add_argument("--plugin", choices=tuple(SCRIPTS), action="append")
    parser.add_argument("--runs", type=int, help="jobs of each kind (default: 1), or in all (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="of soak (300)")
    of_restarts = parser.add_argument_group("restarts")
    of_restarts.add_argument("--fault", choices=("kill", "term", "terms"), default="kill")
    of_restarts.add_argument("--variant", default="plain", help="of the scripts, such as noise")
    of_restarts.add_argument("--started", choices=("launched", "by hand", "elastic", "down"))
    of_restarts.add_argument("--workers", type=int, default=WORKERS)
    of_restarts.add_argument("--most", type=int, default=2, help="faults of a job (2)")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    plugins = options.plugin or list(SCRIPTS)
    print("seed", options.seed)
    if options.campaign == "ends":
        ends(plugins, options.runs or 1, rng)
    elif options.campaign == "soak":
        for plugin in plugins:
            soak(plugin, options.seconds, rng)
    else:
        broken = options.fault, options.variant, options.started or ""
        Restarts(*broken, options.workers, options.most, rng).run(plugins, options.runs or 20)


if __name__ == "__main__":
    main()
