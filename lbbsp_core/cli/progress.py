"""Progress on the terminal, of a computation or of a run whose record grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import progress
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lbbsp_core.report.live import LiveRun


@contextmanager
def countdown(
    console: Console, total: int, beginning: str = ""
) -> Iterator[Callable[[str, str, int], None]]:
    """Shows a progress bar with the remaining time, which disappears at the end.

    Yields a function that is told what runs, in two words, and by how much it advances.
    """
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(beginning, total=total)
        yield lambda what, more, steps: bar.update(
            task, advance=steps, description=f"{what} {more}"
        )


class Progress:
    """Progress of a run on one line, for `rich.live.Live`: steps, time of a step, batch sizes."""

    def __init__(self, title: str, steps: int, record: Path) -> None:
        self._title = title
        self._steps = steps
        self._run = LiveRun(record)

    def __rich__(self) -> Table:
        """Renders the current state."""
        last = self._run.last_step if self._run.read() else None
        done, state = 0, Text("starting the workers ...", style="dim")
        if last is not None:
            done, sizes = last.step + 1, " + ".join(map(str, last.sizes))
            text = f"step {done}/{self._steps} {last.wall_seconds * 1e3:5.0f} ms  batches {sizes}"
            state = Text(text, no_wrap=True, overflow="ellipsis")
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._steps, completed=done, width=16)
        row.add_row(Text(f"{self._title:<9}", style="bold"), bar, state)
        return row
