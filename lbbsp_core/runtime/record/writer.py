"""Writers of run records, on rank 0."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import threading
import time
from pathlib import Path
from queue import SimpleQueue

from lbbsp_core.runtime.record.events import FAILED, FINISHED, INTERRUPTED, EventLine
from lbbsp_core.runtime.record.json_lines import to_json
from lbbsp_core.runtime.record.record import Line, RunHeader
from lbbsp_core.runtime.reliability.exit import LEFT, before_end, exit_status
from lbbsp_core.runtime.reliability.marks import job_has_failed

logger = logging.getLogger("lbbsp.record")

_ENDS = {0: FINISHED, 128 + signal.SIGINT: INTERRUPTED, LEFT: INTERRUPTED}

_PATIENCE_SECONDS = 10.0  # with a file that takes nothing, once


class RunRecord:
    """Appends lines to ``run.jsonl``; the file is complete after every line.

    A thread writes them, which may stall without the training. An existing record is continued with
    a new header; a warning says if another process may still write to it. A record that cannot be
    written, or takes nothing for some seconds, is reported once, in a warning, and never stops the
    training.

    Args:
        path: File to append to. Its folder is created.
        header: Facts of the run.
    """

    def __init__(self, path: str | Path, header: RunHeader) -> None:
        self.path = Path(path).absolute()  # the thread opens it
        self._end: str | None = None
        self._is_open = True
        self._lines: SimpleQueue[tuple[bytes, threading.Event] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lbbsp-record", daemon=True)
        self._thread.start()
        self.write(header)

    def write(self, line: RunHeader | Line) -> None:
        """Appends a step, push or event.

        Raises:
            ValueError: A number is not finite.
        """
        data = (json.dumps(to_json(line), allow_nan=False) + "\n").encode()
        if self._is_open:
            done = threading.Event()
            self._lines.put((data, done))
            if not done.wait(_PATIENCE_SECONDS):
                self._give_up("it takes nothing")

    def end(self, status: int) -> None:
        """Records how the run ends, by the exit status of this process; the last call counts."""
        end = FAILED if job_has_failed() else _ENDS.get(status, FAILED)
        if end != self._end:
            self._end = end
            self.write(EventLine(event=end, time=time.time()))

    def close(self) -> None:
        """Closes the file."""
        self._lines.put(None)
        if self._is_open:
            self._is_open = False
            self._thread.join(_PATIENCE_SECONDS)

    def _give_up(self, why: object) -> None:
        if self._is_open:
            self._warn(why)
            self._is_open = False  # last: then nobody waits for the thread, which may be this one

    def _warn(self, why: object) -> None:
        logger.warning(
            "the run record %s cannot be written (%s): the training continues without it",
            self.path,
            getattr(why, "strerror", None) or why,
        )

    # In the thread

    def _run(self) -> None:
        descriptor: int | None = None
        try:
            descriptor = self._open()
        except (OSError, ValueError) as error:  # also of a name that no file can have
            self._give_up(error)
        while (entry := self._lines.get()) is not None:
            data, done = entry
            if descriptor is not None and self._is_open:
                self._append(descriptor, data)
            done.set()
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:  # a network file system reports some failures only here
                self._warn(error)

    def _open(self) -> int:
        """Opens the file, and ends a line that an earlier run was writing when it was stopped."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(self.path, flags, 0o666)
        size, kind = os.fstat(descriptor).st_size, os.fstat(descriptor).st_mode
        try:  # of this process: children that were forked, and outlive it, do not have the lock
            import fcntl

            if stat.S_ISREG(kind):
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            logger.warning(
                "another process has written to the run record %s and has not ended: if it is of "
                "another job, give each a folder of its own",
                self.path,
            )
        except (ImportError, OSError) as error:  # a system or a file system without locks
            logger.debug("%s cannot be locked: %s", self.path, error)
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        return descriptor

    def _append(self, descriptor: int, data: bytes) -> None:
        try:
            if not self.path.exists():
                self._give_up("it has been removed")
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            self._give_up(error)


def open_record(path: str | Path, header: RunHeader) -> RunRecord:
    """Opens the record at `path`: a ``.jsonl`` file, or the folder that will hold ``run.jsonl``.

    The run ends with this process, unless the record is closed before.
    """
    path = Path(path)
    record = RunRecord(path if path.suffix == ".jsonl" else path / "run.jsonl", header)
    before_end(lambda: record.end(exit_status()))
    return record
