"""Progress on the terminal, of a computation or of a run whose record grows."""

from __future__ import annotations

from pathlib import Path

from rich import progress
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lbbsp_core.report.tail import Tail
from lbbsp_core.runtime.record.record import PushLine, StepLine, is_header, parse_line
from lbbsp_core.validate import parse_json


def countdown(console: Console) -> progress.Progress:
    """Creates a progress bar with the remaining time, which disappears at the end."""
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class RecordTail:
    """Reads the lines that were appended to a record since the last read; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)

    def read(self) -> list[StepLine | PushLine]:
        """Returns the steps or pushes that have been completed since the last call."""
        tail = self._tail
        texts = tail.read()
        lines: list[StepLine | PushLine] = []
        for number, line in enumerate(texts, start=1 + tail.lines - len(texts)):
            where = f"{tail.path} line {number}"
            values = parse_json(line, where)
            if not is_header(values):
                lines.append(parse_line(values, where))
        return lines


class Progress:
    """Progress of a run on one line, for `rich.live.Live`: steps, time of a step, batch sizes."""

    def __init__(self, title: str, steps: int, record: Path) -> None:
        self._title = title
        self._steps = steps
        self._tail = RecordTail(record)
        self._done = 0
        self._last: StepLine | None = None

    def __rich__(self) -> Table:
        """Renders the current state."""
        for line in self._tail.read():
            if isinstance(line, StepLine):
                self._done, self._last = self._done + 1, line
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._steps, completed=self._done, width=16)
        row.add_row(Text(f"{self._title:<9}", style="bold"), bar, self._state())
        return row

    def _state(self) -> Text:
        if self._last is None:
            return Text("starting the workers ...", style="dim")
        return Text(
            f"step {self._done}/{self._steps} {self._last.wall_seconds * 1e3:5.0f} ms"
            f"  batches {' + '.join(map(str, self._last.sizes))}",
            no_wrap=True,
            overflow="ellipsis",
        )
