"""What all worker scripts share: how they tell the test what they saw."""

import gc
import json
import os
import sys

import numpy as np
import psutil

gc.freeze()  # what imports have left, for the collections by each loader of gluon


def result(name: str, value: object) -> None:
    """Prints a result for `jobs.Job.results`."""
    print(f"RESULT {name} {json.dumps(value, default=float)}", flush=True)


def chosen(cases, names):
    """Returns the names of cases to run: those given, or all but those after ``all-but``."""
    if names[:1] == ["all-but"]:
        return [name for name in cases if name not in names]
    return names


def answer_all(cases, names=None) -> None:
    """Says what each misuse that the command line names, or every one, is answered with."""
    for name in names or sys.argv[1:] or cases:
        result(name, _answer(cases[name]))


def _answer(misuse) -> str:
    try:
        misuse()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def largest_difference(one, other) -> float:
    """Largest absolute difference of the weights of two models, or of two lists of weights."""
    both = (each if isinstance(each, list) else each.get_weights() for each in (one, other))
    return max((float(np.abs(a - b).max()) for a, b in zip(*both, strict=True)), default=0.0)


def listening() -> list[str]:
    """Returns the addresses on which the processes of this job listen, the launcher included."""
    launcher = psutil.Process().parent()
    job = filter(_is_of_this_job, launcher.children(recursive=True))
    found = {
        connection.laddr.ip
        for process in [launcher, *job]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    return sorted(found)


def _is_of_this_job(process: psutil.Process) -> bool:
    try:
        return process.environ().get("LBBSP_JOB") == os.environ["LBBSP_JOB"]
    except psutil.Error:  # it has ended
        return False
