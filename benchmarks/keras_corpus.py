"""Runs public Keras scripts with the changes the README asks for, and compares what they learn.

Each script runs twice: in one process on whole global batches, and on several workers with uneven
plans that change every step. Nothing is downloaded, and no script is kept here: ``--scripts`` is
a folder with a checkout of keras-io (and, for notebooks, of TensorFlow's docs) that exists
already. Data are synthetic, a few batches in the shapes and types of the originals.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from corpus_edits import (
    add_header,
    changed_lines,
    cut,
    enter_scope,
    read_script,
    replace,
    rewrite_fits,
    seed_shuffles,
)
from corpus_scripts import SCRIPTS, Script

from lbbsp_core.launch import launch

WORKER = Path(__file__).with_name("corpus_worker.py")
RESULT = "CORPUS "
TOLERANCE, BATCH_NORM_TOLERANCE = 2e-6, 1e-5
LOG_TOLERANCE = 1e-4
TIMED_OUT = 124


@dataclass(frozen=True)
class Row:
    """Outcome of one script.

    Args:
        script: Path of the script.
        lines_changed: Lines added or changed for lbbsp, indentation not counted.
        outcome: "exact", "refused", "DIFFERENT" or "FAILED".
        words: Explanation.
        differences: Of each fit, see `differences`.
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


def edited(script: Script, text: str) -> tuple[str, int]:
    """Returns the text to run, and the number of lines changed for lbbsp."""
    small = replace(cut(text, script.cuts), script.small)
    changed = seed_shuffles(rewrite_fits(replace(small, script.edits), script.fits))
    for first, last in script.scopes:
        changed = enter_scope(changed, first, last)
    changed = add_header(changed, script.global_batch_size)
    return changed, changed_lines(small, changed)


def run(script: Script, file: Path, folder: Path, workers: int, timeout: float) -> Run:
    """Runs the edited script in `workers` processes; none of them is left."""
    errors: list[dict[str, object]] = []
    lines: list[str] = []

    def listen(rank: int, line: str) -> None:
        if line.startswith(RESULT):
            found = json.loads(line[len(RESULT) :])
            errors.extend([found] if found["error"] else [])
        else:
            lines.append(f"[{rank}] {line}")

    status = launch(
        [str(WORKER), str(file), str(folder), script.data],
        workers=workers,
        timeout=timeout,
        output=listen,
    )
    if status in (130, 143):  # Ctrl-C and SIGTERM end the launch only
        raise SystemExit(status)
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


def classify(script: Script, lines: int, reference: Run, balanced: Run) -> Row:
    """Returns the row of a script from its two runs."""
    row = lambda outcome, words, apart=(): Row(script.path, lines, outcome, words, tuple(apart))  # noqa: E731
    for found, where in ((balanced, "on the workers"), (reference, "in one process")):
        if found.status == TIMED_OUT:
            return row("FAILED", f"timed out {where}")
        if found.error is not None and found.error["own"]:
            return row("refused", str(found.error["message"]))
        if found.status != 0:
            return row("FAILED", f"{where}: {_say(found)}")
    if not reference.fits or len({_weights_in(f) for f in (*reference.fits, *balanced.fits)}) > 1:
        return row("FAILED", "no fit was balanced, or not the same number in both runs")
    apart = [differences(reference.fits[0], fits) for fits in balanced.fits]
    worst = [max(values) for values in zip(*apart, strict=True)]
    bound = BATCH_NORM_TOLERANCE if script.batch_norm else TOLERANCE
    fits = f"{len(worst)} fits, " if len(worst) > 1 else ""
    words = f"{fits}{max(worst):.1e}" + (f"; {script.words}" if script.words else "")
    apart, name = log_difference(reference.fits[0], balanced.fits[0])
    if apart > LOG_TOLERANCE:
        words += f"; the logged {name} differs by {apart:.1e}"
    return row("exact" if max(worst) <= bound else "DIFFERENT", words, worst)


def _weights_in(saved: Saved) -> int:
    return sum("_end_" in key for key in saved)


def _say(found: Run) -> str:
    if found.error is None:
        return found.tail
    return f"{found.error['error']}: {found.error['message']} ({', '.join(found.error['frames'])})"


def examine(
    script: Script, scripts: Sequence[Path], folder: Path, workers: int, timeout: float
) -> Row:
    """Edits a script, runs it both ways, and returns its row."""
    try:
        text, lines = edited(script, read_script(_find(scripts, script.path)))
    except (OSError, ValueError, SyntaxError) as error:
        return Row(script.path, 0, "FAILED", str(error))
    file = folder / f"{script.name}.py"
    file.write_text(text)
    reference = run(script, file, folder / "reference", 1, timeout)
    if reference.status != 0 and (reference.error is None or not reference.error["own"]):
        return Row(script.path, lines, "FAILED", f"in one process: {_say(reference)}")
    balanced = run(script, file, folder / "balanced", workers, timeout)
    return classify(script, lines, reference, balanced)


def _find(folders: Sequence[Path], path: str) -> Path:
    found = [folder / path for folder in folders if (folder / path).exists()]
    if not found:
        raise FileNotFoundError(f"{path} is in none of the folders of --scripts")
    return found[0]


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a table in Markdown."""
    head = "| script | lines changed | outcome | |\n|---|---|---|---|"
    body = (f"| {r.script} | {r.lines_changed} | {r.outcome} | {r.words.replace('|', '/')} |"
            for r in rows)  # fmt: skip
    return "\n".join([head, *body])


def main() -> int:
    """Examines the scripts and prints the table; 1 if a script failed or learned otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", type=Path, nargs="+", required=True, help="folders with them")
    parser.add_argument("--only", nargs="+", help="names of scripts; default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each run")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--keep", type=Path, help="folder for edited scripts and output")
    arguments = parser.parse_args()
    rows = []
    for script in SCRIPTS:
        if arguments.only and script.name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = (arguments.keep or Path(temporary)).absolute() / script.path.replace("/", "_")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            rows.append(
                examine(script, arguments.scripts, folder, arguments.workers, arguments.timeout)
            )
        print(table(rows[-1:]).split("\n")[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return any(row.outcome in ("FAILED", "DIFFERENT") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
