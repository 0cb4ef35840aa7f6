"""Contention on real processes: neighbours that compete with each worker for its core.

A neighbour is a process that uses CPU time on a schedule (see ``_neighbour``), on the core of its
worker or under the worker's CPU quota. The kernel divides the core fairly between the worker and
its neighbours: beside n neighbours that ask for all of it, a worker gets 1 / (n + 1).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from lbbsp_core.launch import _neighbour
from lbbsp_core.launch.cpu_shares import Schedule
from lbbsp_core.launch.throttle import available_cores

MAX_NEIGHBOURS: Final = 4
HOUR: Final = 3600.0

MEAN_SECONDS: Final = (0.8, 4.0)
"""Smallest and largest mean duration of the phases of `bursty`."""


class Phase(NamedTuple):
    """Part of a schedule.

    Args:
        seconds: Duration, > 0.
        demands: Demand of each neighbour, a fraction of the worker's core in [0, 1]. Neighbours
            without a value pause.
    """

    seconds: float
    demands: tuple[float, ...] = ()


Contention: TypeAlias = Sequence[Sequence[Phase]]
"""Schedules by worker number; worker i follows schedule i modulo their number."""


class Place(NamedTuple):
    """Where a worker and its neighbours run, and what the neighbours do."""

    phases: Sequence[Phase] = ()  # empty: there are no neighbours
    # Pairs of seconds since the start of the job, and the worker's share of a core from then on.
    shares: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    cores: tuple[int, ...] = ()  # empty: all

    @property
    def neighbours(self) -> int:
        """Number of neighbours."""
        return max((len(phase.demands) for phase in self.phases), default=0)

    def command(self, neighbour: int, file: Path, started: float, job: float) -> list[str]:
        """Writes the schedule of one neighbour, and returns the arguments of Python that run it."""
        phases = [(s, sum(demands[neighbour : neighbour + 1])) for s, demands in self.phases]
        shares = [(job + seconds, share) for seconds, share in self.shares]
        content = {"started": started, "phases": phases, "shares": shares}
        file.write_text(json.dumps(content), encoding="ascii")
        return ["-I", "-S", _neighbour.__file__, str(file)]


def check_contention(contention: Contention) -> None:
    """Raises ValueError if the schedules are empty or have invalid values."""
    if not contention or not all(contention):
        raise ValueError(
            "contention must contain at least one schedule, with at least one phase each: give "
            "phases, or None for no neighbours"
        )
    for phase in (phase for phases in contention for phase in phases):
        valid = math.isfinite(phase.seconds) and phase.seconds > 0
        if not (valid and all(0 <= demand <= 1 for demand in phase.demands)):
            raise ValueError(
                f"contention must have phases of more than 0 seconds and demands from 0 to 1, got "
                f"{phase}: correct it"
            )
        if len(phase.demands) > MAX_NEIGHBOURS:
            raise ValueError(
                f"contention must have at most {MAX_NEIGHBOURS} neighbours of a worker, got "
                f"{phase}: leave some out"
            )


def own_cores(workers: int) -> list[int]:
    """Returns one core per worker, or an empty list if there are more workers than cores.

    On a core of their own, a worker and its neighbours compete with each other alone, and the
    worker's drivers can observe it.
    """
    return sorted(os.sched_getaffinity(0))[:workers] if workers <= available_cores() else []


def places(
    contention: Contention | None,
    members: Sequence[int],
    plan: Schedule | None,
    cores: Sequence[int],
) -> list[Place]:
    """Returns the place of each worker; without contention it is the whole machine.

    Schedules and cores are by the workers' numbers in the first attempt, `members` by rank, CPU
    shares by rank. Without cores they run on all, and each worker shares its quota with its
    neighbours.
    """
    if contention is None:
        return [Place()] * len(members)
    worker_places = []
    for rank, member in enumerate(members):
        place = Place(contention[member % len(contention)], cores=tuple(cores[member:][:1]))
        if plan is not None:
            place = place._replace(shares=tuple((s, shares[rank]) for s, shares in plan.stages))
        worker_places.append(place)
    return worker_places


def replayed(rows: Iterable[tuple[float, float]]) -> list[Phase]:
    """Returns a schedule that replays recorded CPU time of other processes.

    One neighbour asks for up to 100 percent of the core, two for up to 200, in equal parts. More
    than 100 percent times `MAX_NEIGHBOURS` counts as that.

    Example:
        >>> replayed([(0.5, 40.0), (0.2, 150.0), (0.1, 0.0)])[1]
        Phase(seconds=0.2, demands=(0.75, 0.75))
    """
    phases = []
    for seconds, percent in rows:
        cores = min(max(percent / 100, 0.0), float(MAX_NEIGHBOURS))
        neighbours = math.ceil(cores)
        phases.append(Phase(seconds, (cores / max(neighbours, 1),) * neighbours))
    return phases


def bursty(worker: int, seed: int = 0, seconds: float = HOUR) -> list[Phase]:
    """Returns a schedule in which one or two neighbours start and stop at random.

    Durations are exponential. The means of a worker's pauses and of its bursts are drawn uniformly
    from `MEAN_SECONDS`, and each burst has one or two neighbours, which ask for the whole core. A
    schedule lasts at least `seconds`, and then starts again.
    """
    rng = np.random.default_rng([seed, worker])
    pause, burst = rng.uniform(*MEAN_SECONDS, 2)
    phases: list[Phase] = []
    while seconds > 0:
        phases.append(Phase(float(rng.exponential(pause)) + 1e-3))
        phases.append(Phase(float(rng.exponential(burst)) + 1e-3, (1.0,) * int(rng.integers(1, 3))))
        seconds -= phases[-2].seconds + phases[-1].seconds
    return phases
