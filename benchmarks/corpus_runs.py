"""What the corpora of public scripts share: runs, their comparison, and the table of outcomes.

Each script runs twice: in one process on whole global batches, and on several workers with uneven
plans that change every step. A run saves the weights before and after each fit, or of each trainer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from lbbsp_core.launch import launch

RESULT = "CORPUS "
TOLERANCE, BATCH_NORM_TOLERANCE = 2e-6, 1e-5
LOG_TOLERANCE = 1e-4
TIMED_OUT = 124


class PublicScript(Protocol):
    """What a corpus tells of a script; see the classes `Script`."""

    path: str
    words: str
    name: str
    batch_norm: bool


@dataclass(frozen=True)
class Row:
    """Outcome of one script.

    Args:
        script: Path of the script.
        lines_changed: Lines added or changed for lbbsp, indentation not counted.
        outcome: "exact", "refused", "DIFFERENT" or "FAILED".
        words: Explanation.
        differences: Of each fit or trainer, see `differences`.
    """

    script: str
    lines_changed: int
    outcome: str
    words: str
    differences: tuple[float, ...] = ()


Saved = dict[str, np.ndarray]
"""Weights before and after each fit of a run, and its logs."""


@dataclass(frozen=True)
class Run:
    """What came of one launch: its status, the last error of a worker, and the saved weights."""

    status: int
    error: dict[str, object] | None
    fits: list[Saved]
    tail: str


def run(command: Sequence[str], folder: Path, workers: int, timeout: float, **options) -> Run:
    """Runs a command in `workers` processes, each with files of its own in `folder`.

    Args:
        command: Worker of the corpus, with its arguments.
        folder: Folder in which the workers save `rank*/fits.npz`.
        workers: Number of workers.
        timeout: Seconds.
        **options: Options of `lbbsp_core.launch`.
    """
    errors: list[dict[str, object]] = []
    lines: list[str] = []

    def listen(rank: int, line: str) -> None:
        if line.startswith(RESULT):
            found = json.loads(line[len(RESULT) :])
            errors.extend([found] if found["error"] else [])
        else:
            lines.append(f"[{rank}] {line}")

    status = launch(command, workers=workers, timeout=timeout, output=listen, **options)
    if status in (130, 143):  # Ctrl-C and SIGTERM end the launch only
        raise SystemExit(status)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output.txt").write_text("\n".join(lines))
    fits = [dict(np.load(saved)) for saved in sorted(folder.glob("rank*/fits.npz"))]
    own = [error for error in errors if error["own"]]
    return Run(status, (own or errors or [None])[0], fits, "\n".join(lines[-3:]))


def differences(reference: Saved, found: Saved) -> list[float]:
    """Returns for each fit the largest |dw| of a weight, relative to the way that it moved.

    The way of a weight that hardly moves counts as 1 % of the longest one.
    """
    result = []
    for fit in sorted({key.partition("_")[0] for key in reference}, key=int):
        ends = [key for key in reference if key.startswith(f"{fit}_end_")]
        ways = {k: _distance(reference, k, reference, k.replace("_end_", "_start_")) for k in ends}
        longest = max(ways.values())
        apart = {k: _distance(reference, k, found, k) for k in ends}
        result.append(
            max(apart[k] / max(ways[k], 0.01 * longest) if apart[k] else 0.0 for k in ends)
        )
    return result


def log_difference(reference: Saved, found: Saved) -> tuple[float, str]:
    """Returns the largest relative difference of a logged value, and its name."""
    logs = [key for key in reference if "_log_" in key and key in found]
    apart = [
        (_distance(reference, k, found, k) / max(np.abs(reference[k]).max(), 1e-8), k) for k in logs
    ]
    worst, key = max(apart, default=(0.0, "_log_"))
    return worst, key.partition("_log_")[2]


def _distance(a: Saved, key: str, b: Saved, other: str) -> float:
    if other not in b:  # weights that the fit has created
        return float(np.abs(a[key]).max(initial=0.0))
    if a[key].shape != b[other].shape:
        return float("inf")
    distance = float(np.abs(a[key] - b[other]).max(initial=0.0))
    return distance if np.isfinite(distance) else float("inf")


def classify(
    script: PublicScript, lines: int, reference: Run, balanced: Run, unit: str = "fit"
) -> Row:
    """Returns the row of a script from its two runs."""
    row = lambda outcome, words, apart=(): Row(script.path, lines, outcome, words, tuple(apart))  # noqa: E731
    for found, where in ((balanced, "on the workers"), (reference, "in one process")):
        if found.status == TIMED_OUT:
            return row("FAILED", f"timed out {where}")
        if found.error is not None and found.error["own"]:
            return row("refused", str(found.error["message"]))
        if found.status != 0:
            return row("FAILED", f"{where}: {say(found)}")
    if not reference.fits or len({_weights_in(f) for f in (*reference.fits, *balanced.fits)}) > 1:
        return row("FAILED", f"no {unit} was balanced, or not the same number in both runs")
    apart = [differences(reference.fits[0], fits) for fits in balanced.fits]
    worst = [max(values) for values in zip(*apart, strict=True)]
    bound = BATCH_NORM_TOLERANCE if script.batch_norm else TOLERANCE
    fits = f"{len(worst)} {unit}s, " if len(worst) > 1 else ""
    words = f"{fits}{max(worst):.1e}" + (f"; {script.words}" if script.words else "")
    apart, name = log_difference(reference.fits[0], balanced.fits[0])
    if apart > LOG_TOLERANCE:
        words += f"; the logged {name} differs by {apart:.1e}"
    return row("exact" if max(worst) <= bound else "DIFFERENT", words, worst)


def _weights_in(saved: Saved) -> int:
    return sum("_end_" in key for key in saved)


def say(found: Run) -> str:
    """Returns the error of a run, or the end of its output."""
    if found.error is None:
        return found.tail
    return f"{found.error['error']}: {found.error['message']} ({', '.join(found.error['frames'])})"


def find(folders: Sequence[Path], path: str) -> Path:
    """Returns the folder of `folders` that contains a path.

    Raises:
        FileNotFoundError: None does.
    """
    found = [folder for folder in folders if (folder / path).exists()]
    if not found:
        raise FileNotFoundError(f"{path} is in none of the folders of --scripts")
    return found[0]


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a table in Markdown."""
    head = "| script | lines changed | outcome | |\n|---|---|---|---|"
    body = (f"| {r.script} | {r.lines_changed} | {r.outcome} | {r.words.replace('|', '/')} |"
            for r in rows)  # fmt: skip
    return "\n".join([head, *body])


def main(description: str, scripts: Sequence[PublicScript], examine: Callable[..., Row]) -> int:
    """Examines the scripts and prints the table; 1 if a script failed or learned otherwise.

    Args:
        description: First line of the help text.
        scripts: The corpus.
        examine: Called with a script, the folders of scripts, a folder for files, the number of
            workers and the seconds for each run.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--scripts", type=Path, nargs="+", required=True, help="folders with them")
    parser.add_argument("--only", nargs="+", help="names or paths of scripts; default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each run")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--keep", type=Path, help="folder for edited scripts and output")
    given = parser.parse_args()
    folders = [folder.absolute() for folder in given.scripts]
    rows = []
    for script in scripts:
        if given.only and not {script.name, script.path} & set(given.only):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = (given.keep or Path(temporary)).absolute() / script.path.replace("/", "_")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            rows.append(examine(script, folders, folder, given.workers, given.timeout))
        print(table(rows[-1:]).split("\n")[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return any(row.outcome in ("FAILED", "DIFFERENT") for row in rows)
