"""Marks that a worker leaves for the launcher: whether its training is over, whom it has lost.

The exit status of a process does not tell whether its script has reached its end. Marks are small
files in a folder that the launcher removes with the job.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from lbbsp_core.files import write_whole
from lbbsp_core.runtime.options import env
from lbbsp_core.runtime.reliability.exit import before_end, on_exit

_SOCKET_FOLDER: Final = 80  # characters; the path of a socket may have 107


class LostWorker(NamedTuple):
    """Worker without which another one could not proceed."""

    rank: int
    why: str


class WorkerMarks(NamedTuple):
    """Marks of one worker, by the names of their files."""

    begun: bool  # it has imported a plugin
    finished: bool  # its script has ended in order
    waiting: bool  # for a worker that has not started
    preempted: bool  # it was asked to leave, by SIGTERM
    lost: LostWorker | None  # for which it has ended


def read_marks(folder: Path) -> WorkerMarks:
    """Returns the marks in the folder of a worker."""
    lost = None
    with suppress(OSError, ValueError):
        rank, why = (folder / "lost").read_text(encoding="utf-8").split(" ", 1)
        lost = LostWorker(int(rank), why)
    marks = {name: (folder / name).exists() for name in WorkerMarks._fields[:-1]}
    return WorkerMarks(**marks, lost=lost)


def mark_texts(folder: Path) -> dict[str, str]:
    """Returns the texts of all marks in the folder of a worker, by their names."""
    texts = {}
    for name in WorkerMarks._fields:
        with suppress(OSError):
            texts[name] = (folder / name).read_text(encoding="utf-8")
    return texts


def folder_variable(folder: Path) -> dict[str, str]:
    """Returns the environment variable by which a launcher names the folder of the marks."""
    return {env.MARKS: str(folder)}


def are_read() -> bool:
    """Returns whether a launcher watches over this worker."""
    return env.marks() is not None


def begin() -> None:
    """Notes that this worker takes part in a job, and later that its script has ended in order.

    Only the process that the launcher has started leaves marks, not one that the script starts.
    """
    folder = _folder()
    if folder is not None:
        _leave("begun")
        # Sockets of processes that load data, which would stay behind if they are killed.
        config = getattr(multiprocessing.current_process(), "_config", {})
        if len(str(folder)) <= _SOCKET_FOLDER:
            config.setdefault("tempdir", str(folder))
        on_exit(lambda: _leave("finished"))


def note_lost(rank: int, why: str) -> None:
    """Notes for which worker this one ends, which the launcher then names as the first cause."""
    _leave("lost", f"{rank} {why}")


def note_preempted() -> None:
    """Notes that this worker was asked to leave: an elastic job continues without it."""
    _leave("preempted")


def note_failed(folder: Path) -> None:
    """Notes, in the folder of a worker, that it is ended because the job has failed."""
    with suppress(OSError):
        (folder / "failed").touch()


def job_has_failed() -> bool:
    """Returns whether the launcher ends this worker because another one has failed."""
    folder = _folder()
    return folder is not None and (folder / "failed").exists()


def waiting_mark() -> Path | None:
    """Returns the path of the mark of a worker that waits for one that has not started, or None."""
    folder = _folder()
    return None if folder is None else folder / "waiting"


@contextmanager
def waiting() -> Iterator[None]:
    """Notes that, inside the context, this worker waits for workers that have not started."""
    _leave("waiting")
    try:
        yield
    finally:
        with suppress(OSError):
            if mark := waiting_mark():
                mark.unlink(missing_ok=True)


def scratch_folder() -> Path:
    """Creates a folder that is removed at the end of this process, or of its job."""
    folder = Path(tempfile.mkdtemp(prefix="lbbsp-", dir=_folder()))
    before_end(lambda: shutil.rmtree(folder, ignore_errors=True))
    return folder


def _folder() -> Path | None:
    folder = env.marks()
    return folder if folder is not None and os.getsid(0) == os.getpid() else None


def _leave(name: str, text: str = "") -> None:
    """Creates a mark, complete or not at all; without a folder, this has no effect."""
    folder = _folder()
    if folder is None or not folder.exists():  # a launcher that has ended has removed it
        return
    with suppress(OSError):
        write_whole(folder / name, text.encode())
