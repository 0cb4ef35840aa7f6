"""Lines that are appended to a file while it is read."""

from __future__ import annotations

import os
from pathlib import Path


class Tail:
    """Reads the complete lines that were appended to a file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        """Number of lines read so far."""
        self._position = 0
        self._file: tuple[int, int] | None = None

    def read(self) -> list[bytes]:
        """Returns the lines that have been completed since the last call.

        `lines` starts from 0 again if the file was replaced by another one, or cut off.
        """
        try:
            with self.path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                self._note((status.st_dev, status.st_ino), status.st_size)
                stream.seek(self._position)
                text = stream.read()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        lines = complete.split(b"\n")[:-1]
        self.lines += len(lines)
        return lines

    def _note(self, file: tuple[int, int], size: int) -> None:
        """Starts at the beginning if this is another file than before."""
        if self._file not in (None, file) or size < self._position:
            self._position = self.lines = 0
        self._file = file
