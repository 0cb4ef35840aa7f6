"""What the variables of Slurm say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from lbbsp_core.doctor.base import Finding, note, ok, problem

_SLURM: Final = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST",
                 "SLURM_STEP_TASKS_PER_NODE")  # fmt: skip


def check_slurm(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Says what the variables of Slurm are good for; TensorFlow's resolver is asked by lbbsp_tf."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        yield ok("Slurm", "this process is in no job of Slurm")
        return
    step = {name: environment[name] for name in _SLURM if name in environment}
    if len(step) < len(_SLURM):
        yield note(
            "Slurm", f"job {job}, but {', '.join(sorted(set(_SLURM) - set(step)))} is not set: "
            "this process is no task of srun, and SlurmClusterResolver cannot describe the job",
            "start the workers with srun, one task each, or set TF_CONFIG",
        )  # fmt: skip
        return
    rank, tasks = _number(step["SLURM_PROCID"]), _number(step["SLURM_STEP_NUM_TASKS"])
    on_nodes = _sum(step["SLURM_STEP_TASKS_PER_NODE"])
    if rank is None or tasks is None or on_nodes != tasks or rank >= tasks:
        yield problem(
            "Slurm", f"job {job}: its variables contradict each other: "
            + ", ".join(f"{name}={value}" for name, value in step.items()),
            "start the workers with srun, and set none of these variables yourself",
        )  # fmt: skip
        return
    yield ok(
        "Slurm", f"job {job}, task {step['SLURM_PROCID']} of {step['SLURM_STEP_NUM_TASKS']} on "
        f"{step['SLURM_STEP_NODELIST']} ({step['SLURM_STEP_TASKS_PER_NODE']} a node)"
    )  # fmt: skip
    if environment.get("TF_CONFIG", "").strip():
        yield ok("Slurm", "TF_CONFIG describes the cluster, unless the strategy is given a "
                 "SlurmClusterResolver")  # fmt: skip


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _sum(tasks_per_node: str) -> int | None:
    """Returns the number of tasks that a text such as "2(x3),1" means; None if it means none."""
    total = 0
    for part in tasks_per_node.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if found is None:
            return None
        total += int(found[1]) * int(found[2] or 1)
    return total
