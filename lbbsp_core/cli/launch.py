"""Command ``lbbsp launch``: runs a script as a job of worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import typer

from lbbsp_core.cli import options
from lbbsp_core.cli.options import optional
from lbbsp_core.launch import GRACE_SECONDS, Contention
from lbbsp_core.launch import launch as launch_job
from lbbsp_core.launch.cluster import FRAMEWORKS

_OURS: Final = (
    "--hosts", "--speeds", "--speeds-at", "--contention", "--max-restarts", "--elastic"
)  # fmt: skip
"""Options that scripts hardly have themselves."""


class _Places(NamedTuple):
    """Where workers run."""

    workers: int | None = optional(
        "-n", "--workers", metavar="WORKERS", help="Number of workers on this machine."
    )
    hosts: str | None = optional(
        metavar="A,B,C",
        help="Run a worker on each of these hosts instead, by ssh, which must need no password; "
        "all have this Python, this folder and the script at the same paths. Repeat a host for "
        "several workers on it. Under Slurm, omit it: srun lbbsp launch SCRIPT.py.",
    )
    rank: int | None = optional(
        metavar="R",
        help="Run only the worker of this place in --hosts, on this machine, as a scheduler does "
        "that starts lbbsp launch on each host.",
    )
    port: int | None = optional(
        metavar="PORT",
        help="First port of the processes of each host, with --hosts or in a job of Slurm; 20000 "
        "by default.",
    )
    env: list[str] | None = optional(
        metavar="NAME",
        help="Pass this variable on to other hosts, too, beside those of Python, the frameworks "
        "and lbbsp; repeatable.",
    )


class _Emulation(NamedTuple):
    """What slows workers down."""

    speeds: str | None = optional(
        metavar="1,1,0.5", help="Emulate workers of these relative speeds by CPU quotas."
    )
    speeds_at: list[str] | None = optional(
        metavar="SECONDS:0.5,1,1", help="Change the speeds after these seconds; repeatable."
    )
    contention: str | None = optional(
        metavar="TRACE|bursty|dbs",
        help="Let other processes compete with the workers for their cores: replay the column "
        "cpu_other_percent of a trace, or start and stop at random (bursty[:SEED], "
        "dbs[:SEED[:EPOCH_SECONDS]]).",
    )

    def neighbours(self, workers: int) -> Contention | None:
        """Returns the schedules of the processes that compete with workers."""
        if self.contention is None:
            return None
        from lbbsp_core.cli.contention import parse_contention  # reads traces by the simulator

        return parse_contention(self.contention, workers)


class _Output(NamedTuple):
    """What a job leaves."""

    run_dir: Path | None = optional(
        metavar="DIR", parser=options.folder, help="Folder for the run record."
    )
    log_dir: Path | None = optional(
        metavar="DIR",
        parser=options.folder,
        help="Folder for the output: a file for each worker, server and scheduler.",
    )
    ranks: str | None = optional(
        metavar="0,2", help="Print the output of these workers only; by default of all."
    )


class _Limits(NamedTuple):
    """When a job ends, and when it is started again."""

    timeout: float | None = optional(metavar="SECONDS", help="Stop the job after these seconds.")
    max_restarts: int = typer.Option(
        0,
        metavar="TIMES",
        help="Restart the job up to this many times when a worker fails or is preempted.",
    )
    elastic: int | None = optional(
        metavar="WORKERS", help="Restart without failed workers, as long as this many remain."
    )
    grace: float = typer.Option(
        GRACE_SECONDS, metavar="SECONDS", help="Time to write a checkpoint and end after SIGTERM."
    )


@options.one_line_errors
@options.grouped
def launch(
    command: list[str] = typer.Argument(
        metavar="SCRIPT.py [ARGS]...",
        help="Script to run, or with -m a module, followed by its own arguments. Options of "
        "lbbsp launch come before it.",
    ),
    *,
    places: _Places,
    module: bool = typer.Option(
        False, "-m", "--module", help="Run a module as python -m does: -m package.train [ARGS]..."
    ),
    framework: str = typer.Option(
        "tensorflow", metavar="|".join(FRAMEWORKS), help="Framework to train with."
    ),
    servers: int | None = optional(
        metavar="SERVERS", help="Number of parameter servers of mxnet; 1 by default."
    ),
    emulation: _Emulation,
    devices: str | None = optional(
        metavar="0,1+2,none",
        help="GPUs of each worker, by CUDA_VISIBLE_DEVICES: an entry for each worker, with + "
        "between several devices; none for CPUs only; all to leave the variable alone. By "
        "default worker i gets GPU i modulo their number, or its part of the variable if "
        "you have set it.",
    ),
    output: _Output,
    limits: _Limits,
) -> None:
    """Run a script on N workers, of this machine or of several hosts.

    With --speeds the workers run at unequal speeds, which CPU quotas emulate. With --contention a
    worker and its neighbours share a core, or the worker's CPU quota. The first worker
    that fails ends the job, and no process outlives it. With --max-restarts all processes are then
    started again; a script with a checkpoint continues from it.
    """
    options.require_writable_folder("--run-dir", output.run_dir)
    options.require_writable_folder("--log-dir", output.log_dir)
    is_missing = places.workers is None and places.hosts is None
    ours = (*_OURS, *["-n", "--workers"] * is_missing)
    for argument in command[1:]:
        if argument.partition("=")[0] in ours:
            text = (
                f"the script gets {argument}, which follows it: options of lbbsp launch come first"
            )
            typer.echo(f"lbbsp launch: {text}", err=True)
    speeds, ranks = emulation.speeds, output.ranks
    status = launch_job(
        ["-m", *command] if module else command,
        framework=framework,
        servers=servers,
        devices=devices,
        workers=places.workers,
        hosts=places.hosts,
        rank=places.rank,
        port=places.port,
        env=places.env or (),
        contention=emulation.neighbours(places.workers or 1),
        speeds=None if speeds is None else options.parse_speeds(speeds),
        speeds_at=options.parse_speeds_at(emulation.speeds_at or []),
        run_dir=output.run_dir,
        log_dir=output.log_dir,
        ranks=None if ranks is None else options.parse_ranks(ranks),
        **limits._asdict(),
    )
    raise typer.Exit(status)
