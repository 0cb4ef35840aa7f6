"""Runs public Keras scripts with the changes the README asks for, and compares what they learn.

Each script runs twice: in one process on whole global batches, and on several workers with uneven
plans that change every step. Nothing is downloaded, and no script is kept here: ``--scripts`` is
a folder with a checkout of keras-io (and, for notebooks, of TensorFlow's docs) that exists
already. Data are synthetic, a few batches in the shapes and types of the originals.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import corpus_runs
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
from corpus_runs import Row, Run, classify, find, say
from corpus_scripts import SCRIPTS, Script

WORKER = Path(__file__).with_name("corpus_worker.py")


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
    command = [str(WORKER), str(file), str(folder), script.data]
    return corpus_runs.run(command, folder, workers, timeout)


def examine(
    script: Script, scripts: Sequence[Path], folder: Path, workers: int, timeout: float
) -> Row:
    """Edits a script, runs it both ways, and returns its row."""
    try:
        text, lines = edited(script, read_script(find(scripts, script.path) / script.path))
    except (OSError, ValueError, SyntaxError) as error:
        return Row(script.path, 0, "FAILED", str(error))
    file = folder / f"{script.name}.py"
    file.write_text(text)
    reference = run(script, file, folder / "reference", 1, timeout)
    if reference.status != 0 and (reference.error is None or not reference.error["own"]):
        return Row(script.path, lines, "FAILED", f"in one process: {say(reference)}")
    balanced = run(script, file, folder / "balanced", workers, timeout)
    return classify(script, lines, reference, balanced)


if __name__ == "__main__":
    sys.exit(corpus_runs.main(__doc__.splitlines()[0], SCRIPTS, examine))
