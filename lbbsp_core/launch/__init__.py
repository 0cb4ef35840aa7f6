"""Local worker processes, on request as unequal as the machines of a real cluster.

command, speeds ──> environments, shares ──> processes held to quotas ──> one exit status
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

from lbbsp_core.launch.cluster import Cluster, environments
from lbbsp_core.launch.cpu_shares import Schedule, schedule
from lbbsp_core.launch.supervise import Outcome, Supervisor, handlers
from lbbsp_core.launch.throttle import Emulation, Throttle, Unthrottled, available_cores, choose
from lbbsp_core.processes.child import Event, Output
from lbbsp_core.processes.reaper import Guard

__all__ = ["launch"]


def launch(
    command: Sequence[str],
    *,
    workers: int,
    speeds: Sequence[float] | None = None,
    speeds_at: Sequence[tuple[float, Sequence[float]]] = (),
    run_dir: Path | None = None,
    timeout: float | None = None,
    framework: str = "tensorflow",
    servers: int | None = None,
    output: Callable[[int, str], None] | None = None,
    emulation: Emulation = "auto",
) -> int:
    """Run a script as a job of local worker processes, and wait for its end.

    The first worker that fails ends the job. Nothing outlives the call: no process, no cgroup.
    With ``speeds``, worker i gets ``speeds[i] / speeds[j]`` times the CPU time of worker j, and
    never more than the machine has for all together.

    Args:
        command: the script and its arguments, run by this Python: in every worker, or once where
            tensorflow has servers.
        workers: how many, >= 1.
        speeds: relative speeds, one per worker, > 0; None holds nobody back.
        speeds_at: pairs of seconds since the start and the speeds from then on.
        run_dir: where the run's files go; created, and handed to the workers as LBBSP_RUN_DIR.
        timeout: seconds, for the whole job.
        framework: whose cluster description the workers are given.
        servers: parameter servers. mxnet has one by default. tensorflow has none by default, and
            trains in step; with servers the script runs once, as the chief of a
            ``ParameterServerStrategy``, and the workers serve it.
        output: called with the rank (a chief's is 0) and each line of a script's output, one call
            at a time, from threads; by default the line is printed as ``[rank] line``, or
            ``[chief] line``.
        emulation: by what means workers are held back: "cgroup" quotas, a "duty-cycle" of
            stopping and continuing them, or the best there is ("auto").

    Returns:
        0 if all workers ended well; the exit status of the first that did not, or 128 + the signal
        that ended it; 124 after a timeout; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        ValueError: for arguments that make no sense; no process has been started then.
    """
    started = time.monotonic()
    _check(command, workers, timeout)
    plan = _plan(speeds, speeds_at, workers)
    cluster = environments(
        framework, workers, emulated=plan is not None, run_dir=run_dir, servers=servers
    )
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
    if output is None:
        output = print_line if cluster.coordinator is None else _print_line_of_chief
    outcome, last_words = _run(command, cluster, plan, emulation, output, started, timeout)
    for line in last_words:
        print(f"[{outcome.culprit_name}] {line}", file=sys.stderr)
    if outcome.message is not None:
        say(outcome.message)
    return outcome.status


def _run(
    command: Sequence[str],
    cluster: Cluster,
    plan: Schedule | None,
    emulation: Emulation,
    output: Output,
    started: float,
    timeout: float | None,
) -> tuple[Outcome, list[str]]:
    """Run the job; return how it went, and the last words of the worker at fault."""
    events: SimpleQueue[Event] = SimpleQueue()
    with handlers(events), closing(Guard()) as guard:
        supervisor = Supervisor(_throttle(plan, emulation), guard, output, events)
        outcome = None
        try:
            supervisor.start(command, cluster)
            changes = plan.stages[1:] if plan is not None else ()
            outcome = supervisor.watch(changes, started, timeout)
        finally:
            supervisor.end(patient=outcome is not None and outcome.status == 0)
        if outcome.culprit is not None:
            return outcome, supervisor.last_words(outcome.culprit)
        if outcome.status == 0:
            supervisor.check_output()
        return outcome, []


def _check(command: Sequence[str], workers: int, timeout: float | None) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(
            f"command must be a script and its arguments, got {command!r}: "
            "give a list such as ['train.py', '--epochs', '5']"
        )
    if workers != int(workers) or workers < 1:
        raise ValueError(f"workers must be an integer >= 1, got {workers!r}: start at least one")
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(
            f"timeout must be a positive number of seconds, got {timeout}: "
            "give one, or None to wait for as long as it takes"
        )


def _plan(
    speeds: Sequence[float] | None,
    speeds_at: Sequence[tuple[float, Sequence[float]]],
    workers: int,
) -> Schedule | None:
    """The shares of all stages; None where the workers run free."""
    if speeds is not None:
        return schedule(speeds, speeds_at, workers=workers, cores=available_cores())
    if speeds_at:
        raise ValueError(
            f"speeds_at = {list(speeds_at)} needs the speeds at the start: give speeds as well, "
            f"such as {[1] * workers}"
        )
    return None


def _throttle(plan: Schedule | None, emulation: Emulation) -> Throttle:
    if plan is None:
        return Unthrottled()
    return choose(emulation, plan.stages[0].shares, plan.period_us, say)


def print_line(rank: int | str, line: str) -> None:
    """Print a worker's line in one piece, whatever the encoding of our own output."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"[{rank}] {line}\n".encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def _print_line_of_chief(_rank: int, line: str) -> None:
    print_line("chief", line)


def say(text: str) -> None:
    """Tell the user something that no worker said."""
    print(f"lbbsp launch: {text}", file=sys.stderr, flush=True)
