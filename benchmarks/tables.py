"""Prints the tables of docs/ that the recorded traces give, as Markdown.

    python benchmarks/tables.py NAME [--rows ROW,ROW] [--traces TRACE,TRACE] [--update]

NAME is one of

    predictors          docs/predictors.md, horizon 1; predictors-2, predictors-3: further horizons
    jobs                docs/predictors.md, traces of jobs; jobs-efficiency: in step time
    drivers             docs/resources.md, choice of the default
    policies            docs/policies.md; policies-predictors: LB-BSP by predictor;
                        policies-jobs: traces of jobs with even batches
    all                 each of them

The figures depend on the traces and on the code alone. --update writes them into the document; rows
that are not measured stay. With all rows the tables of predictors and policies take minutes, since
``replayed`` is long.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from lbbsp_core import Narx
from lbbsp_core.registry import PREDICTORS
from lbbsp_core.sim import FixedTime, SimConfig, Trace, read_trace, replay_trace
from lbbsp_core.sim.backtest import Score, contenders, evaluate
from lbbsp_core.sim.experiment import Experiment, Progress, Row, chosen_runs, run_experiments
from lbbsp_core.sim.traces import names_of

ROOT = Path(__file__).parents[1]
FILES = {
    "pai_job_1": "pai_job_1.csv",
    "pai_job_2": "pai_job_2.csv",
    "coarse": "contention_coarse.csv",
    "bursty": "contention_bursty.csv",
    "replayed": "contention_replayed.csv",
}
ALL = tuple(FILES)
EVEN_JOBS = {
    "job_bursty_bsp": "job_bursty_bsp.csv",
    "job_replayed_bsp": "job_replayed_bsp.csv",
    "job_coarse_bsp": "job_coarse_bsp.csv",
}
JOBS = {
    "job_bursty": "job_bursty.csv",
    "job_replayed": "job_replayed.csv",
    "job_coarse": "job_coarse.csv",
    **EVEN_JOBS,
}
FORECASTS = ("last", "ema0.2", "ema0.5", "narx", "narx-without-drivers", "mixture")
SHORT = tuple(name for name in FILES if name != "replayed")
DRIVERS = {
    "none": (),
    "`involuntary_switches`": ("involuntary_switches",),
    "`memory_percent`": ("memory_percent",),
    "`runnable`": ("runnable",),
    "`cpu_other_percent`": ("cpu_other_percent",),
    "`cpu_other_percent`, `runnable`": ("cpu_other_percent", "runnable"),
    "`cpu_other_percent`, `runnable`, `memory_percent`": (
        "cpu_other_percent", "runnable", "memory_percent",
    ),
    "the three above, `involuntary_switches`": (
        "cpu_other_percent", "runnable", "involuntary_switches", "memory_percent",
    ),
}  # fmt: skip
POLICIES = {
    "bsp: `Even`": "bsp",
    "fixed: `FixedShares`, profiled": "fixed",
    "dbs: `EpochBalanced`": "dbs",
    "proportional: `ProportionalControl`": "proportional",
    "leader-straggler: `LeaderStraggler`": "leader-straggler",
    "lbbsp: `LoadBalanced`, mixture": "lbbsp",
    "lbbsp-every: `LoadBalanced(min_gain=0)`, mixture": "lbbsp-every",
}

Cells = Mapping[str, str]
"""Figures of a row by column, as they are printed."""


class Mean(NamedTuple):
    """Column with the geometric mean of others."""

    title: str
    traces: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of a document.

    Args:
        document: Path of the document.
        corner: Title of the first column, by which the table is found.
        rows: Labels of the rows, without bold type.
        figure: Returns the figure of a row on a trace.
        traces: Columns.
        means: Further columns.
        bold: Columns in which the best figure is in bold type.
        lowest: Whether the lowest figure is the best.
        default: Label of the row in bold type, without what is in brackets after it.
    """

    document: Path
    corner: str
    rows: tuple[str, ...]
    figure: Callable[[str, str], float]
    traces: tuple[str, ...] = ALL
    means: tuple[Mean, ...] = ()
    bold: tuple[str, ...] = ()
    lowest: bool = True
    default: str = "mixture"

    @property
    def columns(self) -> tuple[str, ...]:
        """Titles of all columns but the first."""
        return (*self.traces, *(mean.title for mean in self.means))

    def measure(self, row: str, traces: Sequence[str] | None = None) -> Cells:
        """Returns the cells of a row; means only with all traces.

        Args:
            row: Label of the row.
            traces: Columns to measure; None: all.
        """
        values = {name: self.figure(row, name) for name in traces or self.traces}
        for mean in self.means if len(values) == len(self.traces) else ():
            logs = [math.log(values[name]) for name in mean.traces]
            values[mean.title] = math.exp(sum(logs) / len(logs))
        return {name: f"{value:.4f}".removeprefix("0") for name, value in values.items()}

    def read(self) -> dict[str, Cells]:
        """Returns the cells in the document by row, without bold type and empty cells."""
        _, lines, _ = self._split()
        found = {}
        for line in lines[2:]:
            label, *cells = (cell.strip().replace("**", "") for cell in line.split("|")[1:-1])
            named = dict(zip(self.columns, cells, strict=True))
            found[label] = {name: cell for name, cell in named.items() if cell}
        return found

    def markdown(self, rows: Mapping[str, Cells]) -> str:
        """Returns the table with these rows; the best figures are those of the whole document."""
        known = {**self.read(), **rows}
        best = {name: self._best(name, known) for name in self.bold}
        lines = [_line([self.corner, *self.columns]), "|---" * (1 + len(self.columns)) + "|"]
        for row, cells in rows.items():
            is_default = row.startswith(self.default)
            label = row.replace(self.default, f"**{self.default}**", 1) if is_default else row
            texts = [cells.get(name, "") for name in self.columns]
            marks = [
                text and text == best.get(name)
                for name, text in zip(self.columns, texts, strict=True)
            ]
            lines.append(
                _line([label, *(f"**{t}**" if m else t for t, m in zip(texts, marks, strict=True))])
            )
        return "\n".join(lines)

    def update(self, rows: Mapping[str, Cells]) -> None:
        """Writes rows into the document; others stay."""
        before, _, after = self._split()
        text = self.markdown({**self.read(), **rows})
        self.document.write_text("\n".join([*before, text, *after]) + "\n", encoding="utf-8")

    def _best(self, column: str, rows: Mapping[str, Cells]) -> str:
        figures = [cells[column] for cells in rows.values() if cells.get(column)]
        return (min if self.lowest else max)(figures, default="")

    def _split(self) -> tuple[list[str], list[str], list[str]]:
        """Returns the lines of the document before, in and after the table."""
        lines = self.document.read_text(encoding="utf-8").splitlines()
        start = next(k for k, line in enumerate(lines) if line.startswith(f"| {self.corner} |"))
        length = next(k for k, line in enumerate([*lines[start:], ""]) if line[:1] != "|")
        return lines[:start], lines[start : start + length], lines[start + length :]


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


@cache
def load(name: str) -> Trace:
    """Reads a recorded trace."""
    return read_trace(ROOT / "traces" / {**FILES, **JOBS}[name])


def predictor_rmse(horizon: int, row: str, name: str) -> float:
    """Returns the RMSE of a predictor on a trace."""
    return _score(horizon, row, name).rmse


def predictor_efficiency(row: str, name: str) -> float:
    """Returns the efficiency that a predictor's forecasts give the workers of a trace."""
    return _score(1, row, name).efficiency


@cache
def _score(horizon: int, row: str, name: str) -> Score:
    trace = load(name)
    result = evaluate([trace], predictors={row: contenders(horizon)[row]}, horizon=horizon)
    return result.scores[trace.path.name][row]


def drivers_rmse(row: str, name: str) -> float:
    """Returns the RMSE of NARX on a trace with some of its columns."""
    trace, names = load(name), DRIVERS[row]
    places = [trace.drivers.index(driver) for driver in names]
    series = tuple(
        replace(
            own,
            measurements=tuple(
                replace(each, drivers=tuple(each.drivers[place] for place in places))
                for each in own.measurements
            ),
        )
        for own in trace.series
    )
    reduced = replace(trace, drivers=names, series=series)
    return evaluate([reduced], predictors={row: Narx()}).scores[trace.path.name][row].rmse


def simulate(
    traces: Sequence[Trace],
    *,
    policies: Sequence[object] | None = None,
    predictors: Sequence[object] = ("mixture",),
    syncs: Sequence[object] = ("bsp",),
    global_batch_size: int | None = None,
    communication_seconds: float = 0.0,
    progress: Progress | None = None,
    **options: int,
) -> list[Row]:
    """Replays traces under every policy and predictor, by default with their own batch sizes."""
    experiments = []
    for name, trace in zip(names_of(traces), traces, strict=True):
        cluster = replay_trace(trace)
        config = SimConfig(global_batch_size or cluster.global_batch_size, **options)
        paid = FixedTime(communication_seconds)
        experiments.append(Experiment(name, "trace", cluster, config, paid))
    runs = chosen_runs(policies, predictors, config.lag, syncs)
    return [row for row, _ in run_experiments(experiments, runs, progress=progress)]


def efficiency(policy: str, predictor: str, name: str) -> float:
    """Returns the efficiency of a policy on a trace."""
    (row,) = simulate([load(name)], policies=[policy], predictors=[predictor])
    return row.efficiency


def _predictors(horizon: int) -> Table:
    mean = Mean("geometric mean", ALL)
    further = () if horizon == 1 else (Mean("without replayed", SHORT),)
    return Table(
        ROOT / "docs" / "predictors.md",
        "predictor" + (f", horizon {horizon}" if horizon > 1 else ""),
        tuple(PREDICTORS),
        partial(predictor_rmse, horizon),
        means=(mean, *further),
        bold=(mean.title,),
    )


TABLES = {
    "predictors": _predictors(1),
    "predictors-2": _predictors(2),
    "predictors-3": _predictors(3),
    "jobs": Table(
        ROOT / "docs" / "predictors.md",
        "predictor, in jobs",
        FORECASTS,
        partial(predictor_rmse, 1),
        traces=tuple(JOBS),
        bold=tuple(JOBS),
    ),
    "jobs-efficiency": Table(
        ROOT / "docs" / "predictors.md",
        "predictor, efficiency in jobs",
        FORECASTS,
        predictor_efficiency,
        traces=tuple(JOBS),
        bold=tuple(JOBS),
        lowest=False,
    ),
    "drivers": Table(
        ROOT / "docs" / "resources.md",
        "drivers",
        tuple(DRIVERS),
        drivers_rmse,
        traces=("bursty", "coarse"),
        bold=("bursty",),
    ),
    "policies": Table(
        ROOT / "docs" / "policies.md",
        "policy",
        tuple(POLICIES),
        lambda row, name: efficiency(POLICIES[row], "mixture", name),
        bold=ALL,
        lowest=False,
        default="lbbsp: `LoadBalanced`, mixture",
    ),
    "policies-jobs": Table(
        ROOT / "docs" / "policies.md",
        "policy, in jobs",
        tuple(POLICIES),
        lambda row, name: efficiency(POLICIES[row], "mixture", name),
        traces=tuple(EVEN_JOBS),
        bold=tuple(EVEN_JOBS),
        lowest=False,
        default="lbbsp: `LoadBalanced`, mixture",
    ),
    "policies-predictors": Table(
        ROOT / "docs" / "policies.md",
        "predictor",
        tuple("mixture (default)" if name == "mixture" else name for name in PREDICTORS),
        lambda row, name: efficiency("lbbsp", row.removesuffix(" (default)"), name),
        bold=ALL,
        lowest=False,
    ),
}


def chosen(what: str, names: str | None, known: Sequence[str]) -> list[str]:
    """Returns the names in a list, which are known ones or the first words of labels."""
    if names is None:
        return list(known)
    short = {label: label.split(":")[0].removesuffix(" (default)") for label in known}
    found = {name: [k for k in known if name in (k, short[k])] for name in names.split(",")}
    for name, matches in found.items():
        if not matches:
            raise SystemExit(f"there is no {what} {name!r}: choose from {'; '.join(known)}")
    return [match for matches in found.values() for match in matches]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*TABLES, "all"])
    parser.add_argument("--rows", help="rows to measure, separated by commas; default: all")
    parser.add_argument("--traces", help="columns to measure, separated by commas; default: all")
    parser.add_argument("--update", action="store_true", help="write the rows into the document")
    options = parser.parse_args()
    if options.update and options.traces:
        parser.error("--update needs all traces: omit --traces")
    for name in TABLES if options.name == "all" else [options.name]:
        table = TABLES[name]
        traces = chosen("trace", options.traces, table.traces)
        rows = {row: table.measure(row, traces) for row in chosen("row", options.rows, table.rows)}
        print(f"{table.document.relative_to(ROOT)}\n\n{table.markdown(rows)}\n", flush=True)
        if options.update:
            table.update(rows)


if __name__ == "__main__":
    main()
