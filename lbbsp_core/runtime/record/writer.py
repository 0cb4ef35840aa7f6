"""Writers of run records, on rank 0."""

from __future__ import annotations

import json
import logging
import os
import signal
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


MOST_WAITING_BYTES = 1 << 26
_PATIENCE_SECONDS = 5.0  # with a file that takes nothing, once


class RunRecord:
    """Appends lines to ``run.jsonl`` in a thread, each of them at once.

    An existing record is continued with a new header. A record that cannot be written, or takes
    nothing for a long time, is reported once, in a warning, and never stops the training.

    Args:
        path: File to append to. Its folder is created.
        header: Facts of the run.
    """

    def __init__(self, path: str | Path, header: RunHeader) -> None:
        self.path = Path(path).absolute()  # the thread opens it
        self._end: str | None = None
        self._has_failed = False
        self._given = self._taken = 0  # bytes
        self._lines: SimpleQueue[bytes | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lbbsp-record", daemon=True)
        self._thread.start()
        self.write(header)

    def write(self, line: RunHeader | Line) -> None:
        """Appends a step, push or event.

        Raises:
            ValueError: A number is not finite.
        """
        data = (json.dumps(to_json(line), allow_nan=False) + "\n").encode()
        if self._given - self._taken > MOST_WAITING_BYTES:
            self._give_up("it has taken nothing for many steps")
        if not self._has_failed:
            self._given += len(data)
            self._lines.put(data)

    def end(self, status: int) -> None:
        """Records how the run ends, by the exit status of this process; the last call counts."""
        end = FAILED if job_has_failed() else _ENDS.get(status, FAILED)
        if end != self._end:
            self._end = end
            self.write(EventLine(event=end, time=time.time()))
            self.flush()

    def flush(self) -> None:
        """Waits until all lines are written, for some seconds."""
        done = threading.Event()
        self._lines.put(done)
        if self._thread.is_alive() and not self._has_failed and not done.wait(_PATIENCE_SECONDS):
            self._give_up("it takes nothing")

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        self._lines.put(None)
        self._thread.join(0.0 if self._has_failed else _PATIENCE_SECONDS)

    def _give_up(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "the run record %s cannot be written (%s): the training continues without it",
                self.path,
                why,
            )

    # In the thread

    def _run(self) -> None:
        descriptor: int | None = None
        try:
            descriptor = self._open()
        except (OSError, ValueError) as error:  # also of a name that no file can have
            self._give_up(getattr(error, "strerror", None) or str(error))
        while (data := self._lines.get()) is not None:
            if isinstance(data, threading.Event):
                data.set()
            elif descriptor is not None and not self._has_failed:
                self._append(descriptor, data)
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:  # a network file system reports some failures only here
                self._give_up(error.strerror or str(error))

    def _open(self) -> int:
        """Opens the file, and ends a line that an earlier run was writing when it was stopped."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(self.path, flags, 0o666)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        return descriptor

    def _append(self, descriptor: int, data: bytes) -> None:
        try:
            while data:
                written = os.write(descriptor, data)
                self._taken += written
                data = data[written:]
        except OSError as error:
            self._give_up(error.strerror or str(error))


def open_record(path: str | Path, header: RunHeader) -> RunRecord:
    """Opens the record at `path`: a ``.jsonl`` file, or the folder that will hold ``run.jsonl``.

    The run ends with this process, unless the record is closed before.
    """
    path = Path(path)
    record = RunRecord(path if path.suffix == ".jsonl" else path / "run.jsonl", header)
    before_end(lambda: record.end(exit_status()))
    return record
