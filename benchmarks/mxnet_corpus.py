"""Runs public MXNet scripts with the changes the docs ask for, and compares what they learn.

Each script runs twice: in one process on whole global batches, and on several workers with uneven
plans that change every step. Nothing is downloaded, and no script is kept here: ``--scripts`` names
folders with checkouts of MXNet, gluon-cv and gluon-nlp that exist already. Data are synthetic, a
few batches in the shapes and types of the originals.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import corpus_runs
from corpus_edits import changed_lines, replace
from corpus_runs import Row, Run, classify, find, say
from mxnet_scripts import SCRIPTS, Script

WORKER = Path(__file__).with_name("mxnet_worker.py")
ZEROED = "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0"
"""Fills new memory with zeros. MXNet's servers do not initialise the member that tells them to sum
float64 in float32, so that each job would do one or the other by chance."""
PACKAGES = ("", "src", "scripts")  # folders of a checkout in which its packages are


def edited(script: Script, folder: Path) -> int:
    """Edits a script and its modules in a copy of their folder; returns the lines changed."""
    lines = 0
    for name, small, edits in script.parts:
        file = folder / name
        text = replace(file.read_text(encoding="utf-8"), small)
        changed = replace(text, edits)
        file.write_text(changed, encoding="utf-8")
        lines += changed_lines(text, changed)
    if script.double:
        main = folder / script.file
        main.write_text(main.read_text(encoding="utf-8").replace("float32", "float64"))
    return lines


def run(
    script: Script, checkout: Path, copied: Path, folder: Path, workers: int, timeout: float
) -> Run:
    """Runs the edited script in `workers` processes; none of them is left."""
    settings = {
        "arguments": script.arguments.format(each=24 // workers).split(),
        "data": script.data,
        "double": script.double,
        "paths": [
            *(str(checkout / name) for name in PACKAGES),
            str((checkout / script.path).parent.parent),
        ],
    }
    os.environ["GLIBC_TUNABLES"] = ZEROED
    command = [str(WORKER), str(copied / script.file), str(folder), json.dumps(settings)]
    clustered = workers > 1 or script.in_cluster
    options = {"framework": "mxnet"} if clustered else {}
    return corpus_runs.run(command, folder, workers, timeout, **options)


def examine(
    script: Script, scripts: Sequence[Path], folder: Path, workers: int, timeout: float
) -> Row:
    """Edits a script, runs it both ways, and returns its row."""
    copied = folder / "edited"
    try:
        checkout = find(scripts, script.path)
        only_code = shutil.ignore_patterns("*.ipynb", "*.png", "*.jpg", "*.params")
        shutil.copytree((checkout / script.path).parent, copied, ignore=only_code)
        lines = edited(script, copied)
    except (OSError, ValueError) as error:
        return Row(script.path, 0, "FAILED", str(error))
    reference = run(script, checkout, copied, folder / "reference", 1, timeout)
    if reference.status != 0 and (reference.error is None or not reference.error["own"]):
        return Row(script.path, lines, "FAILED", f"in one process: {say(reference)}")
    balanced = run(script, checkout, copied, folder / "balanced", workers, timeout)
    return classify(script, lines, reference, balanced, "trainer")


if __name__ == "__main__":
    sys.exit(corpus_runs.main(__doc__.splitlines()[0], SCRIPTS, examine))
