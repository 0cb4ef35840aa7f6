"""Progress on the terminal: of a computation, of a growing run record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


def countdown(console: Console) -> progress.Progress:
    """A bar with the time that remains, which goes when it is done."""
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class RecordTail:
    """Reads what has been appended to a record since the last look.

    Args:
        path: The record; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[dict[str, Any]]:
        """The lines that are whole by now, and were not before."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                text = stream.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Progress:
    """A line for `rich.live.Live`: steps done, time of a step, batch sizes.

    Args:
        name: What is running.
        steps: How many steps it will take.
        record: Its growing record.
    """

    def __init__(self, name: str, steps: int, record: Path) -> None:
        self._name = name
        self._steps = steps
        self._tail = RecordTail(record)
        self._done = 0
        self._last: dict[str, Any] = {}

    def __rich__(self) -> Table:
        """The line as it stands."""
        for line in self._tail.read():
            if "step" in line:
                self._done, self._last = self._done + 1, line
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._steps, completed=self._done, width=16)
        row.add_row(Text(f"{self._name:<9}", style="bold"), bar, self._state())
        return row

    def _state(self) -> Text:
        if not self._last:
            return Text("starting the workers ...", style="dim")
        return Text(
            f"step {self._done}/{self._steps} {self._last['wall_seconds'] * 1e3:5.0f} ms"
            f"  batches {' + '.join(map(str, self._last['sizes']))}",
            no_wrap=True,
            overflow="ellipsis",
        )
