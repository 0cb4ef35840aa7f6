"""What all worker scripts share: how they tell the test what they saw."""

import contextlib
import gc
import json
import os
import sys

import numpy as np
import patience  # noqa: F401, before the modules of lbbsp that a script imports
import psutil

gc.freeze()  # what imports have left, for the collections by each loader of gluon


def result(name: str, value: object) -> None:
    """Prints a result for `jobs.Job.results`."""
    # In one write: another thread may say something between two.
    sys.stdout.write(f"RESULT {name} {json.dumps(value, default=float)}\n")
    sys.stdout.flush()


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
    found = _listening(launcher)
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended, as what watches the start does
            if process.environ().get("LBBSP_JOB") == os.environ["LBBSP_JOB"]:
                found |= _listening(process)
    return sorted(found)


def _listening(process: psutil.Process) -> set[str]:
    connections = process.net_connections("inet")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
