"""The run record: one header line, then one JSON line a step (or push), written by rank 0."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

SCHEMA = 1


class RunRecord:
    """Appends steps, or pushes, to ``run.jsonl``; the file is whole after every line.

    Args:
        path: File to write; its folder is made. An existing record is replaced.
        header: Facts of the run: workers, global batch size, lag, policy, predictor, versions.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("w", encoding="utf-8", buffering=1)
        self._write({"schema": SCHEMA, **header})

    def step(
        self,
        step: int,
        *,
        sizes: Sequence[int],
        busy_seconds: Sequence[float],
        predicted_seconds: Sequence[float | None],
        wall_seconds: float,
        excluded: Sequence[int] = (),
        short: bool = False,
    ) -> None:
        """Writes one step; lists are by rank, times in seconds."""
        line: dict[str, Any] = {
            "step": step,
            "sizes": list(sizes),
            "busy_seconds": list(busy_seconds),
            "predicted_seconds": list(predicted_seconds),
            "wall_seconds": wall_seconds,
            "excluded": list(excluded),
        }
        self._write({**line, "short": True} if short else line)

    def push(
        self,
        push: int,
        *,
        worker: int,
        iteration: int,
        samples: int,
        busy_seconds: float,
        seconds: float,
        staleness: int,
        lead: int,
    ) -> None:
        """Writes one push, of a run in which workers need not be in the same step.

        Args:
            push: How many came before it, of all workers.
            worker: Whose it is.
            iteration: How many came before it, of this worker.
            samples: Its batch.
            busy_seconds: Of the iteration, without waiting for others.
            seconds: When it entered the model, since the run began.
            staleness: Updates by other workers between the read of the model that the gradient
                is of, and this push.
            lead: Iterations that the worker had pushed more than the slowest one when it began
                this one, both counted since the last barrier.
        """
        self._write(
            {
                "push": push,
                "worker": worker,
                "iteration": iteration,
                "samples": samples,
                "busy_seconds": busy_seconds,
                "seconds": seconds,
                "staleness": staleness,
                "lead": lead,
            }
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Run:
    """A record read back: the header, and the steps or the pushes in order."""

    header: dict[str, Any]
    steps: list[dict[str, Any]]
    pushes: list[dict[str, Any]] = field(default_factory=list)

    def last_half(self) -> list[dict[str, Any]]:
        """The full, unheld steps of the last half: what steady state is measured on."""
        half = self.steps[len(self.steps) // 2 :]
        return [line for line in half if not line["excluded"] and not line.get("short")] or half


def read_run(path: str | Path) -> Run:
    """Reads ``run.jsonl`` (or the folder that holds it).

    Raises:
        ValueError: An empty file, a line that is not JSON, or another schema: names the line.
    """
    path = Path(path)
    path = path / "run.jsonl" if path.is_dir() else path
    lines = list(_lines(path))
    if not lines:
        raise ValueError(f"{path} is empty: the run has not begun, or was not recorded")
    header, *rest = lines
    schema = header.get("schema") if isinstance(header, dict) else header
    if not isinstance(header, dict) or schema != SCHEMA:
        raise ValueError(f"{path} line 1: schema must be {SCHEMA}, got {schema!r}")
    steps, pushes = ([line for line in rest if name in line] for name in ("step", "push"))
    return Run(header, steps, pushes)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    texts = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            yield json.loads(text)
        except json.JSONDecodeError as error:  # noqa: PERF203
            if number == len(texts) > 1:
                return  # the run was cut off while it wrote this line: the rest is whole
            raise ValueError(f"{path} line {number} is not JSON: {error}") from None
