"""Program that competes with a worker for its core: it uses CPU time on a schedule.

It is started by its path with the name of a JSON file, and runs until it is ended. The file holds

- ``started``: the start of the schedule, on the monotonic clock that all processes share;
- ``phases``: pairs of a duration in seconds and a demand, a fraction of the worker's core; the
  schedule starts again when it ends;
- ``shares``: pairs of a time on the same clock, and the fraction of a real core that the worker's
  core is from then on (less than 1 if speeds are emulated).
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

CYCLE_SECONDS = 0.02

Pairs = Sequence[tuple[float, float]]


class Demand:
    """CPU time that a schedule asks for: pairs of seconds, > 0, and a demand in [0, 1]."""

    def __init__(self, phases: Pairs) -> None:
        self._ends = list(accumulate(seconds for seconds, _ in phases))
        self._until = list(accumulate(seconds * demand for seconds, demand in phases))
        self._demands = [demand for _, demand in phases]

    def until(self, seconds: float) -> float:
        """Returns the CPU seconds asked for in the first ``seconds`` of the repeated schedule."""
        rounds, offset = divmod(seconds, self._ends[-1])
        place = min(bisect_right(self._ends, offset), len(self._ends) - 1)
        remaining = max(self._ends[place] - offset, 0.0) * self._demands[place]
        return rounds * self._until[-1] + self._until[place] - remaining


class Account:
    """CPU time that is due in each cycle.

    Demand that cannot be met, because the worker needs the core too, is kept for one cycle at most:
    a neighbour whose pause has started must not spin.
    """

    def __init__(self, phases: Pairs, shares: Pairs, started: float, used: float = 0.0) -> None:
        self._demand, self._started = Demand(phases), started
        self._times = [moment for moment, _ in shares]
        self._shares = [share for _, share in shares]
        self._until, self._goal = 0.0, used

    def goal(self, now: float, used: float) -> float:
        """Returns the CPU seconds that this process should have used when the cycle ends."""
        until = max(now + CYCLE_SECONDS - self._started, 0.0)
        demand = self._demand.until(until) - self._demand.until(self._until)
        share = self._shares[max(bisect_right(self._times, now) - 1, 0)]
        self._goal = min(self._goal + share * demand, used + share * CYCLE_SECONDS)
        self._until = until
        return self._goal


def main(path: str) -> None:
    """Uses CPU time until this process is ended."""
    with open(path, encoding="utf-8") as stream:
        account = Account(used=time.process_time(), **json.load(stream))
    while True:
        start = time.monotonic()
        goal, end = account.goal(start, time.process_time()), start + CYCLE_SECONDS
        while time.process_time() < goal and time.monotonic() < end:
            pass
        time.sleep(max(end - time.monotonic(), 0.0))


if __name__ == "__main__":
    main(sys.argv[1])
