"""Launcher of worker processes, here or on other hosts, with restarts and emulated speeds.

command, speeds ──> environments, CPU shares ──> processes under CPU quotas ──> one exit status
   hosts                 ^                       or relays to other hosts             │
                         └───────────── restart: new cluster, all or survivors <──────┘
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from lbbsp_core.launch.cluster import job_spec, require_free_ports
from lbbsp_core.launch.contention import Contention, Phase, check_contention, own_cores, places
from lbbsp_core.launch.cpu_shares import Schedule, schedule
from lbbsp_core.launch.devices import assign_devices
from lbbsp_core.launch.elsewhere import by_ssh
from lbbsp_core.launch.hosts import Hosts, find_hosts
from lbbsp_core.launch.output import Output, notify, print_line
from lbbsp_core.launch.restart import Attempt, RestartLimits, check_limits, run_attempts
from lbbsp_core.launch.script import check_command
from lbbsp_core.launch.supervise import Outcome, Supervisor, signal_handlers
from lbbsp_core.launch.throttle import Emulation, available_cores, create_throttle
from lbbsp_core.processes.child import Event, Reaper
from lbbsp_core.validate import require_integer

__all__ = ["Contention", "Phase", "launch"]

GRACE_SECONDS: Final = 30.0  # as schedulers give to jobs that they end (Kubernetes, Slurm)


def launch(
    command: Sequence[str],
    *,
    workers: int | None = None,
    speeds: Sequence[float] | None = None,
    speeds_at: Sequence[tuple[float, Sequence[float]]] = (),
    run_dir: str | Path | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
    elastic: int | None = None,
    grace: float = GRACE_SECONDS,
    framework: str = "tensorflow",
    servers: int | None = None,
    output: Callable[[int, str], None] | None = None,
    emulation: Emulation = "auto",
    contention: Contention | None = None,
    devices: str | Sequence[str] | None = None,
    hosts: str | Sequence[str] | None = None,
    rank: int | None = None,
    port: int | None = None,
    env: Sequence[str] = (),
    log_dir: str | Path | None = None,
    ranks: Collection[int] | None = None,
) -> int:
    """Runs a script as a job of worker processes, on this machine or others; waits for its end.

    The first worker that fails ends the job, or this attempt of it: then all processes are started
    again, as often as ``max_restarts`` permits. The environment variable LBBSP_RESTART tells the
    script how often that has happened. No process and no cgroup outlives the call.

    A signal that asks this process to end is passed on to the scripts as SIGTERM, and they get
    ``grace`` seconds to write a checkpoint. They get as much time if one of them leaves with status
    143, as all do together after a SIGTERM to one of them; a restart follows if one is left.

    With ``speeds``, worker i gets ``speeds[i] / speeds[j]`` times the CPU time of worker j, and all
    workers together get no more than the machine has.

    Args:
        command: The script and its arguments, or "-m", a module and its arguments. This Python
            runs it in every worker.
        workers: Number of workers, >= 1; with `hosts` it may be omitted. Without both this process
            must be a task of a Slurm step, and runs the worker of this task, as with `rank`.
        speeds: Relative speeds, one per worker, > 0. None emulates no speeds.
        speeds_at: Pairs of seconds since the start and the speeds from then on.
        run_dir: Folder of the run's files. It is created, and passed to the workers as
            LBBSP_RUN_DIR.
        timeout: Seconds for the whole job with its restarts, > 0. None sets no limit.
        max_restarts: Maximum number of restarts after failures.
        elastic: Minimum number of workers; the job is then restarted without a worker that has
            failed, as long as so many remain, with ranks and options of the survivors. None
            restarts all workers.
        grace: Seconds that scripts have to end after SIGTERM, >= 0.
        framework: Framework whose cluster description the workers get: "tensorflow", "mxnet" or
            "torch", whose variables are those of torchrun.
        servers: Number of parameter servers of mxnet, >= 1; by default 1.
        output: Called with the rank and each line of a script's output, from threads, one call at
            a time. By default the line is printed as ``[rank] line``.
        emulation: Mechanism that slows workers down: "cgroup" (CPU quotas), "duty-cycle"
            (stopping and continuing them), or "auto" (quotas where they are permitted).
        contention: Schedules of the processes that compete with each worker for its core, see
            `Phase`, by worker number modulo their number. A schedule starts with its worker. With
            more workers than cores, each worker gets a CPU quota, by default all the same. None
            starts no such processes.
        devices: GPUs of each worker, as values of CUDA_VISIBLE_DEVICES: "0,1,2" or ["0", "1", "2"]
            gives each of three workers one, "0+1,2+3" each of two workers two, "0,none" the second
            worker none, except with TensorFlow's collectives. "none" hides the GPUs from all
            workers; "all" leaves the variable alone. By default worker i gets GPU i modulo their
            number, or its part of the user's CUDA_VISIBLE_DEVICES; a worker keeps its GPU in
            restarts. Processes beside the workers get no GPU. On several hosts the workers of each
            host divide all of its GPUs. Workers of torch, which choose by LOCAL_RANK as under
            torchrun, see all of them by default.
        hosts: Names or addresses of the workers' hosts, as a list or with commas between them; one
            that is repeated runs several workers. ssh must reach them without a password. Each has
            this Python, this working directory and the script at the same paths.
        rank: Place in `hosts` of the only worker to run, on this machine, where a scheduler starts
            this function once on each host. Restarts are then up to the scheduler.
        port: First port of the processes of each host; by default 20000, and under Slurm one by the
            number of the job.
        env: Names of variables of this process that processes on other hosts get, too, beside those
            of Python, the frameworks, their libraries and lbbsp.
        log_dir: Folder of the output: a file for each worker, server and scheduler, to which each
            attempt adds. None writes none.
        ranks: Ranks of the workers whose lines are printed; None for all. Files contain all lines.

    Returns:
        0 if all workers succeeded; the exit status of the first that failed, or 128 + the signal
        that ended it, in the last attempt; 124 after a timeout; 130 after Ctrl-C, 143 after
        SIGTERM.

    Raises:
        ValueError: An argument is invalid, or there is no such script; then no process has been
            started.
    """
    started = time.monotonic()
    _check(command, timeout, grace)
    cluster = find_hosts(hosts, workers, framework=framework, port=port, rank=rank, env=env)
    workers = require_integer("workers", len(cluster.names) if cluster else workers or 0, 1)
    limits = RestartLimits(max_restarts, elastic)
    check_limits(limits, workers)
    _check_ranks(ranks, workers)
    plan, cores = _shares(speeds, speeds_at, contention, workers)
    emulated = plan is not None or contention is not None
    if cluster is not None:
        _check_hosts(cluster, limits, devices, emulated=emulated)
    if devices is None and framework == "torch" and not emulated:
        devices = "all"
    may_mix = framework != "tensorflow"
    remote = gpus = None
    if cluster is None:
        gpus = assign_devices(devices, workers, emulated=emulated, may_mix=may_mix)
    elif cluster.remote:
        remote = by_ssh(cluster, devices, env, may_mix=may_mix)
    check_command(command)
    if gpus is not None and gpus.note is not None:
        notify(gpus.note)
    folder, logs = (None if path is None else Path(path) for path in (run_dir, log_dir))
    events: SimpleQueue[Event] = SimpleQueue()

    def run(attempt: Attempt) -> Outcome:
        members = attempt.members
        job = job_spec(
            framework, len(members), emulated=emulated, run_dir=folder, servers=servers,
            restart=attempt.number, workers_at_first=workers, hosts=cluster and cluster.of(members),
            devices=None if gpus is None else [gpus.environments[i] for i in members],
        )  # fmt: skip
        if cluster is not None and cluster.rank is not None:
            require_free_ports(job, cluster.rank)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        shares = None if plan is None else plan.of(members)
        changes = () if shares is None else shares.stages[1:]
        placed = places(contention, members, shares, cores)
        with closing(Reaper()) as reaper, closing(
            Output(output or print_line, ranks, logs, attempt.number)
        ) as lines:  # fmt: skip
            throttle = create_throttle(shares, emulation, notify, contended=contention is not None)
            with closing(Supervisor(throttle, reaper, lines, events, started)) as supervisor:
                only = cluster and cluster.rank
                supervisor.start(command, job, placed, only, remote and remote.of(members))
                outcome = supervisor.watch(changes, timeout)
                if outcome.leaving:
                    outcome = supervisor.wait_for_exits(outcome, grace, notify)
        return outcome

    with signal_handlers(events) as signals:
        return run_attempts(run, workers, limits, events, signals, notify)


def _check(command: Sequence[str], timeout: float | None, grace: float) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(
            f"command must be a script and its arguments, got {command!r}: "
            "give a list such as ['train.py', '--epochs', '5']"
        )
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(
            f"timeout must be a positive number of seconds, got {timeout}: "
            "give one, or leave it out for no limit"
        )
    if not (math.isfinite(grace) and grace >= 0):
        raise ValueError(
            f"grace must be a number of seconds >= 0, got {grace}: give the time that a script "
            "needs to write a checkpoint, such as 30"
        )


def _check_ranks(ranks: Collection[int] | None, workers: int) -> None:
    for rank in ranks or ():
        if not 0 <= rank < workers:
            raise ValueError(
                f"ranks must be from 0 to {workers - 1}, got {rank}: name workers whose output is "
                "to be printed"
            )


def _shares(
    speeds: Sequence[float] | None,
    speeds_at: Sequence[tuple[float, Sequence[float]]],
    contention: Contention | None,
    workers: int,
) -> tuple[Schedule | None, Sequence[int]]:
    """Returns the CPU shares of workers, and a core for each if it shares it with neighbours."""
    cores: Sequence[int] = ()
    if contention is not None:
        check_contention(contention)
        cores = own_cores(workers)
        speeds = speeds if speeds is not None or cores else [1.0] * workers
    if speeds is not None:
        return schedule(speeds, speeds_at, workers=workers, cores=available_cores()), cores
    if speeds_at:
        raise ValueError(
            f"speeds_at = {list(speeds_at)} needs the speeds at the start: give speeds as well, "
            f"such as {[1] * workers}"
        )
    return None, cores


def _check_hosts(
    hosts: Hosts, limits: RestartLimits, devices: str | Sequence[str] | None, *, emulated: bool
) -> None:
    """Raises ValueError if options belong to one machine, or to a launcher that starts all."""
    if emulated:
        raise ValueError(
            "speeds and contention are emulated on one machine: omit them, or give the number of "
            "workers instead of hosts"
        )
    if hosts.remote:
        return
    if limits.restarts:
        raise ValueError(
            f"max_restarts = {limits.restarts} needs a launcher of all workers: omit it where a "
            "scheduler starts a launcher for each worker, and let it start all of them again"
        )
    if devices is not None:
        raise ValueError(
            f"devices = {devices!r} needs a launcher of all workers: omit it where a scheduler "
            "starts a launcher for each worker, and let it assign the GPUs (Slurm: --gpus-per-task)"
        )
