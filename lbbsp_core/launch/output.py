"""Output of a job's processes: printed behind the ranks, and kept in a file of each process."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from lbbsp_core.processes import child


class Output:
    """Where the lines of the processes of an attempt go, one call at a time.

    `show` gets the rank and each line of the workers in `ranks`, None for all. A file in `folder`
    gets all lines of one process, those of attempts one after the other.
    """

    def __init__(
        self, show: child.Output, ranks: Collection[int] | None, folder: Path | None, attempt: int
    ) -> None:
        self._show, self._ranks, self._folder, self._attempt = show, ranks, folder, attempt
        self._files = ExitStack()
        self._lacks = False

    def of(self, name: str, rank: int | None) -> child.Output:
        """Returns where the lines of a process go; only workers have a rank."""
        shown = rank is not None and (self._ranks is None or rank in self._ranks)
        file = self._open(name)

        def take(index: int, line: str) -> None:
            if file is not None:
                self._write(file, line)
            if shown:
                self._show(index, line)

        return take

    def close(self) -> None:
        """Closes all files."""
        self._files.close()

    def _open(self, name: str) -> BinaryIO | None:
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name.replace(' ', '-')}.log"
        file = self._files.enter_context(path.open("ab", buffering=0))
        now = time.strftime("%Y-%m-%d %H:%M:%S%z")
        self._write(file, f"--- {now}: {name}, attempt {self._attempt + 1} ---")
        return file

    def _write(self, file: BinaryIO, line: str) -> None:
        try:
            with suppress(ValueError):  # it is closed: the attempt has ended
                file.write(f"{line}\n".encode(errors="backslashreplace"))
        except OSError as error:  # a full disk ends no training
            if not self._lacks:
                notify(f"{file.name} lacks lines ({error.strerror}); others may, too")
            self._lacks = True


def print_line(rank: int, line: str) -> None:
    """Prints a line in one write, whatever the encoding of our output."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"[{rank}] {line}\n".encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def notify(text: str) -> None:
    """Prints a message of the launcher itself to standard error."""
    print(f"lbbsp launch: {text}", file=sys.stderr, flush=True)
