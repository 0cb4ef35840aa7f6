"""Progress of a computation on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console


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
        yield lambda subject, more, steps: bar.update(
            task, advance=steps, description=f"{subject} {more}"
        )
