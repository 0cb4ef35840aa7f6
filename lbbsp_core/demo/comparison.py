"""Comparison that ``lbbsp demo`` runs: one training twice, as plain BSP and balanced."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from lbbsp_core import installation
from lbbsp_core.files import write_whole
from lbbsp_core.launch import launch
from lbbsp_core.report.pictures import draw_comparison
from lbbsp_core.report.summary import Comparison, Outcome, Summary, summarise
from lbbsp_core.report.wording import percent, times
from lbbsp_core.runtime.record.record import Run, read_run

logger = logging.getLogger("lbbsp.demo")

SLOW_WORKER: Final = 0.35
"""Relative speed of the last worker, unless speeds are given."""

TIMEOUT_SECONDS: Final = 900.0


class Framework(NamedTuple):
    """Packages that the demo of a framework needs."""

    plugin: str
    extra: str  # of the ``lbbsp`` distribution, which installs the framework
    newest_python: tuple[int, int] | None = None  # for which the extra does so


class Training(NamedTuple):
    """Training of the comparison, plain or balanced."""

    title: str  # for the user
    policy: str  # as `lbbsp_core.registry` reads it; also the name of the folder


class Plan(NamedTuple):
    """Settings that both runs have in common."""

    framework: str  # a key of `FRAMEWORKS`
    speeds: Sequence[float]  # relative, of each worker
    steps: int  # of each run
    run_dir: Path  # for all results

    def folder(self, training: Training) -> Path:
        """Returns the folder of one of the two runs."""
        return (self.run_dir / training.policy).absolute()


class FinishedRun(NamedTuple):
    """Results of a run that succeeded."""

    run: Run
    outcome: Outcome


class RunFailedError(RuntimeError):
    """Failure of a run."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


PLAIN: Final = Training("plain BSP", "bsp")
BALANCED: Final = Training("LB-BSP", "lbbsp")

FRAMEWORKS: Final[Mapping[str, Framework]] = {
    "tensorflow": Framework("lbbsp_tf", "tf-cpu"),
    "mxnet": Framework("lbbsp_mx", "mx", newest_python=(3, 12)),
}


def require_packages(framework: str) -> None:
    """Checks that the packages of a demo are installed."""
    plugin, extra, newest = FRAMEWORKS[framework]
    where = ""
    if newest is not None and sys.version_info[:2] > newest:
        version = ".".join(map(str, newest))
        where = f" in a virtual environment with Python {version} or earlier"
    extras = dict.fromkeys((framework, plugin), extra)
    extras |= dict.fromkeys(("sklearn", "plotly", "jinja2"), "demo")
    for module, needed in extras.items():
        if find_spec(module) is None:
            raise ModuleNotFoundError(
                f"{module} is not installed: run pip install {installation.extra(needed)}{where}"
            )


def prepare(plan: Plan, training: Training) -> None:
    """Creates the folder of a run, and removes the results of an older run from it."""
    folder = plan.folder(training)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("run.jsonl", "final.npz"):
        (folder / name).unlink(missing_ok=True)


def train(plan: Plan, training: Training) -> FinishedRun:
    """Runs one of the two trainings; call `prepare` first."""
    folder = plan.folder(training)
    module = f"{FRAMEWORKS[plan.framework].plugin}.demo"
    options = {"--policy": training.policy, "--steps": str(plan.steps), "--run-dir": str(folder)}
    log_path = folder / "output.log"
    with log_path.open("w", encoding="utf-8", buffering=1) as log:
        status = launch(
            ["-m", module, *(word for pair in options.items() for word in pair)],
            workers=len(plan.speeds),
            speeds=plan.speeds,
            run_dir=folder,
            timeout=TIMEOUT_SECONDS,
            framework=plan.framework,
            output=lambda rank, line: print(f"[{rank}] {line}", file=log),
        )
    if status:
        raise RunFailedError(
            f"the {training.title} run failed; the output of all workers is in {log_path}", status
        )
    with np.load(folder / "final.npz") as saved:
        weights = [saved[name] for name in saved.files if name != "accuracy"]
        outcome = Outcome(float(saved["accuracy"]), weights)
    return FinishedRun(read_run(folder), outcome)


def write_results(plan: Plan, bsp: FinishedRun, lbbsp: FinishedRun) -> Summary:
    """Computes the figures, and writes ``summary.json``, ``demo.html`` and ``report.html``.

    A file that cannot be written is reported in a warning.
    """
    from lbbsp_core.report.html import write_report  # imports parts of SciPy

    comparison = Comparison(summarise(bsp.run), summarise(lbbsp.run))
    figures = comparison.figures(bsp.outcome, lbbsp.outcome)
    text = json.dumps(figures, indent=2, allow_nan=False) + "\n"
    note = (
        f"Same samples in the same order: held-out accuracy "
        f"{percent(bsp.outcome.accuracy, 1)} with plain BSP, "
        f"{percent(lbbsp.outcome.accuracy, 1)} with LB-BSP. {disturbance(plan.speeds, figures)}"
    )
    _written(plan.run_dir / "summary.json", lambda path: write_whole(path, text.encode()))
    draw = partial(draw_comparison, bsp.run, lbbsp.run, speeds=plan.speeds, note=note)
    _written(plan.run_dir / "demo.html", draw)
    _written(plan.run_dir / "report.html", partial(write_report, plan.folder(BALANCED)))
    return figures


def disturbance(speeds: Sequence[float], figures: Summary) -> str:
    """Returns that workers were hardly unequal in spite of the emulation, if they were."""
    busy = figures["bsp"]["busy_seconds"]
    emulated, slowdown = max(speeds) / min(speeds), max(busy) / min(busy)
    if slowdown - 1 >= (emulated - 1) / 2:
        return ""
    return (
        f"With even batches the slowest worker took only {times(slowdown)} as long as the fastest "
        f"one, though {times(emulated)} were emulated: other programs use this machine. Run the "
        "demo again when it is quiet."
    )


def _written(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
