"""Writers of run records, on rank 0."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

from lbbsp_core.runtime.record.events import FAILED, FINISHED, INTERRUPTED, EventLine
from lbbsp_core.runtime.record.json_lines import to_json
from lbbsp_core.runtime.record.record import Line, RunHeader
from lbbsp_core.runtime.reliability.exit import LEFT, before_end, exit_status
from lbbsp_core.runtime.reliability.marks import job_has_failed

logger = logging.getLogger("lbbsp.record")

_ENDS = {0: FINISHED, 128 + signal.SIGINT: INTERRUPTED, LEFT: INTERRUPTED}


class RunRecord:
    """Appends lines to ``run.jsonl``; the file is complete after every line.

    An existing record is continued with a new header. A record that cannot be written is reported
    once, in a warning, and never stops the training.

    Args:
        path: File to append to. Its folder is created.
        header: Facts of the run.
    """

    def __init__(self, path: str | Path, header: RunHeader) -> None:
        self.path = Path(path)
        self._end: str | None = None
        self._descriptor: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(self.path, flags, 0o666)
            self._end_unfinished_line()
        except OSError as error:
            self._give_up(error)
        self.write(header)

    def write(self, line: RunHeader | Line) -> None:
        """Appends a step, push or event.

        Raises:
            ValueError: A number is not finite.
        """
        self._append((json.dumps(to_json(line), allow_nan=False) + "\n").encode())

    def end(self, status: int) -> None:
        """Records how the run ends, by the exit status of this process; the last call counts."""
        end = FAILED if job_has_failed() else _ENDS.get(status, FAILED)
        if end != self._end:
            self._end = end
            self.write(EventLine(event=end, time=time.time()))

    def close(self) -> None:
        """Closes the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:  # a network file system reports some failures only here
                self._warn(error)

    def _append(self, data: bytes) -> None:
        try:
            while data and self._descriptor is not None:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self._give_up(error)

    def _end_unfinished_line(self) -> None:
        """Ends the line that an earlier run was still writing when it was stopped."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._append(b"\n")

    def _give_up(self, error: OSError) -> None:
        self._warn(error)
        self.close()

    def _warn(self, error: OSError) -> None:
        logger.warning(
            "the run record %s cannot be written (%s): the training continues without it",
            self.path,
            error.strerror or error,
        )


def open_record(path: str | Path, header: RunHeader) -> RunRecord:
    """Opens the record at `path`: a ``.jsonl`` file, or the folder that will hold ``run.jsonl``.

    The run ends with this process, unless the record is closed before.
    """
    path = Path(path)
    record = RunRecord(path if path.suffix == ".jsonl" else path / "run.jsonl", header)
    before_end(lambda: record.end(exit_status()))
    return record
