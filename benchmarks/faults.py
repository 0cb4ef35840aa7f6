"""Injects faults into real training jobs of three workers, and says what became of them.

``faults.py ends`` injects each kind of fault at a random step, or at the start, on a random worker,
into jobs that the launcher started and into jobs whose processes were started one by one, without
restarts.
Prints the seconds from the fault to the end of all processes, and whether the right worker was
named.

``faults.py restarts`` kills a random worker at random steps (``--fault term``: preempts it by
SIGTERM), restarts the job from its checkpoint, and compares it with an unbroken run: the largest
difference of a final weight or moving average, relative to the largest one, and the samples of
every step. A quarter of the jobs continue with the survivors only. By hand, the newest checkpoint
is damaged before every second restart.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
from faults_injected import ATTEMPT, EPOCHS, SAMPLES, Fault, X, samples_by_step, to_environment
from faults_jobs import SCRIPTS, End, run_job

WORKERS, STEPS_PER_EPOCH = 3, -(-SAMPLES // X)
STEPS = EPOCHS * STEPS_PER_EPOCH
JOB_SECONDS = 300.0
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


def restarts(plugins: list[str], runs: int, rng: random.Random, kind: str) -> None:
    """Prints a line for each job that was killed and continued."""
    print(f"{'plugin':<7}{'started':<10}{'kills (worker@step)':<22}{'weights':>8}  samples")
    for plugin in plugins:
        with tempfile.TemporaryDirectory() as name:
            unbroken = Path(name)
            end = _run(plugin, unbroken, [], None)
            if end.status or not (unbroken / "weights.npz").exists():
                raise SystemExit(f"the unbroken run failed:\n{end.text[-3000:]}")
            for run in range(runs):
                _restart(plugin, run, unbroken, rng, kind)


def _restart(plugin: str, run: int, unbroken: Path, rng: random.Random, kind: str) -> None:
    """Kills a job once or twice, continues it, and prints how it compares with `unbroken`."""
    by_hand, elastic = run % 4 == 1, run % 4 == 3
    steps = sorted(rng.sample(range(1, STEPS), 1 if elastic else rng.randint(1, 2)))
    faults = [Fault(kind, "step", rng.randrange(WORKERS), step) for step in steps]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if by_hand:
            for attempt in range(len(faults) + 1):
                end = _run(plugin, folder, faults, None, attempt)
                if attempt % 2 == 0:
                    _damage_newest(folder / "checkpoints", rng)
        else:
            options = ["--max-restarts", "3", *(["--elastic", "2"] if elastic else [])]
            end = _run(plugin, folder, faults, options)
        kills = " ".join(f"{fault.rank}@{fault.step}" for fault in faults)
        started = "by hand" if by_hand else "elastic" if elastic else "launched"
        start = f"{plugin:<7}{started:<10}{kills:<22}"
        if end.status or not (folder / "weights.npz").exists():
            print(f"{start}FAILED\n{end.text[-3000:]}", flush=True)
            return
        difference, samples = _compare(folder, unbroken)
    verdict = "" if difference <= TOLERANCE else "  WEIGHTS DIFFER"
    print(f"{start}{difference:8.1e}  {samples}{verdict}", flush=True)


def _run(
    plugin: str,
    folder: Path,
    faults: list[Fault],
    launched: list[str] | None,
    attempt: int = 0,
) -> End:
    variables = to_environment(faults)
    if launched is None:
        variables[ATTEMPT] = str(attempt)
    return run_job(
        plugin,
        [str(folder)],
        variables,
        workers=WORKERS,
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
    parser.add_argument("campaign", choices=("ends", "restarts"))
    parser.add_argument("--plugin", choices=tuple(SCRIPTS), action="append")
    parser.add_argument("--runs", type=int, help="jobs of each kind (default: 1), or in all (20)")
    parser.add_argument("--fault", choices=("kill", "term"), default="kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    plugins = options.plugin or list(SCRIPTS)
    if options.campaign == "ends":
        ends(plugins, options.runs or 1, rng)
    else:
        restarts(plugins, options.runs or 20, rng, options.fault)


if __name__ == "__main__":
    main()
