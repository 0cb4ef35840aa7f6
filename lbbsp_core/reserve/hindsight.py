"""How much of a step is shared: what past steps would have taken with each fraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lbbsp_core.reserve.claims import FRACTIONS, Claims, shortest_part, split
from lbbsp_core.reserve.pace import Pace, together_seconds


class Shared(NamedTuple):
    """What workers do in a step with a reserve, by rank.

    Args:
        seconds: Time at which each worker has done its last part.
        samples: Samples of each worker.
        parts: Number of parts that each worker has claimed.
    """

    seconds: tuple[float, ...]
    samples: tuple[int, ...]
    parts: tuple[int, ...]


def replay(
    sizes: Sequence[int],
    percent: int,
    paces: Sequence[Pace],
    claim_seconds: float = 0.0,
    step_seconds: float | None = None,
    granularity: int = 1,
) -> Shared:
    """Returns what a step does under a plan with a reserve, claim by claim, in virtual time.

    Args:
        sizes: The plan, by rank.
        percent: Fraction of the reserve.
        paces: Paces of the workers as they turn out, by rank.
        claim_seconds: Seconds from a claim to its answer.
        step_seconds: Seconds that the workers expect. Defaults to those without any wait.
        granularity: Main parts and claims are multiples of it, in samples.

    Example:
        >>> replay((50, 50), 0, [Pace(0.01), Pace(0.02)]).seconds
        (0.5, 1.0)
        >>> shared = replay((50, 50), 40, [Pace(0.01), Pace(0.02)])
        >>> shared.samples, round(max(shared.seconds), 3)
        ((65, 35), 0.7)
    """
    mains, reserve = split(sizes, percent, granularity)
    ends = list(map(Pace.main, paces, mains))
    samples, parts = [*mains], [0] * len(mains)
    if reserve:
        seconds = step_seconds or together_seconds(sizes, paces)
        claims = [
            Claims(sizes, mains, rank, seconds, claim_seconds, pace.part_overhead, granularity)
            for rank, pace in enumerate(paces)
        ]
        counter, half = 0, claim_seconds / 2
        queue = [(end + half, rank) for rank, end in enumerate(ends)]  # when a claim is counted
        heapify(queue)
        while queue:
            now, rank = heappop(queue)
            claimant, pace = claims[rank], paces[rank]
            size = claimant.next_size(now - half)
            begin, end = claimant.take(counter, size, now + half)
            counter += size
            if begin == end:
                ends[rank] = now + half
                continue
            ends[rank] = now + half + pace.part(end - begin)
            if not claimant.is_empty:
                heappush(queue, (ends[rank] + half, rank))
        samples = [main + claimant.samples for main, claimant in zip(mains, claims, strict=True)]
        parts = [claimant.parts for claimant in claims]
    return Shared(tuple(ends), tuple(samples), tuple(parts))


def estimate(
    sizes: Sequence[int], percent: int, paces: Sequence[Pace], claim_seconds: float = 0.0
) -> float:
    """Returns about the seconds of a step with a reserve, without going through its claims: O(N).

    All workers end together, but for the overhead of a part and the wait for the last one.
    """
    mains, reserve = split(sizes, percent)
    longest = max(map(Pace.main, paces, mains))
    if not reserve:
        return longest
    power = sum(1 / pace.seconds_per_sample for pace in paces)
    overhead = claim_seconds + sum(pace.part_overhead for pace in paces) / power
    least = shortest_part(reserve / power, overhead)
    return max(longest, together_seconds(sizes, paces) + overhead + 0.75 * least)


class HindsightState(NamedTuple):
    """State of a `Hindsight`.

    Args:
        percent: Fraction that was chosen last.
        costs: For each of the fractions, the running mean of the seconds of steps relative to
            those without a reserve.
        steps: Number of steps in the means.
        bias: Running mean of the seconds of steps with a reserve, relative to replays.
        overhead: Mean overhead of a part by which the costs were computed, in samples.
        step_seconds: Running mean of the seconds of steps in which nobody would wait.
        hidden_seconds: Running mean of the communication that steps without a reserve hide.
    """

    percent: int = 0
    costs: tuple[float, ...] = (1.0,) * len(FRACTIONS)
    steps: int = 0
    bias: float = 1.0
    overhead: float = 0.0
    step_seconds: float = 0.0
    hidden_seconds: float = 0.0


class Seen(NamedTuple):
    """What a step was.

    Args:
        percent: Fraction of its reserve.
        seconds: Busy seconds of its slowest worker.
        hidden_seconds: Communication that was hidden behind computing, as no step with a reserve
            can: its gradients are known when the last part is.
    """

    percent: int = 0
    seconds: float = 0.0
    hidden_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Chooses the fraction of the reserve that would have been best lately.

    Args:
        memory: Steps over which costs are averaged.
        first_gain: Part of a step that a reserve must save before steps begin to have one, because
            a train step may have to be compiled for it.
        min_gain: Part of a step that it must save after that.
        patience: Steps that must be known before one is used.
        drift: Change of the shortest part, relative to the step, after which earlier costs say
            nothing, because parts cost more or less than was known.
        max_replayed: Workers above which steps are estimated, not replayed.

    Example:
        >>> hindsight, state = Hindsight(), HindsightState()
        >>> for step in range(20):  # each worker is sometimes three times as slow
        ...     slow = step % 2
        ...     paces = [Pace(0.03 if rank == slow else 0.01, part_overhead=0.2) for rank in (0, 1)]
        ...     state = hindsight.update(state, (50, 50), paces, 0.001)
        >>> state.percent
        50
    """

    memory: int = 30
    first_gain: float = 0.02
    min_gain: float = 0.005
    patience: int = 5
    drift: float = 0.05
    max_replayed: int = 32

    def update(
        self,
        state: HindsightState,
        sizes: Sequence[int],
        paces: Sequence[Pace],
        claim_seconds: float,
        granularity: int = 1,
        seen: Seen | None = None,
    ) -> HindsightState:
        """Returns the state after a step.

        Args:
            state: State before it.
            sizes: Its plan, by rank.
            paces: Paces of the workers in it, by rank.
            claim_seconds: Seconds of a claim.
            granularity: See `split`.
            seen: What it was; None: nothing is known of that.
        """
        overhead = sum(pace.part_overhead for pace in paces) / len(paces)
        if not state.steps:
            state = state._replace(overhead=overhead)
        together = together_seconds(sizes, paces)
        mean = state.step_seconds or together
        pace = together / sum(sizes) * len(sizes)
        before, now = (
            shortest_part(mean, claim_seconds + part_overhead * pace)
            for part_overhead in (state.overhead, overhead)
        )
        if abs(now - before) > self.drift * mean:
            state = state._replace(costs=HindsightState().costs, steps=0, overhead=overhead)
        estimates = self._seconds(sizes, paces, claim_seconds, mean, granularity)
        bias, hidden, seen = state.bias, state.hidden_seconds, seen or Seen()
        if seen.percent in FRACTIONS[1:]:
            seconds = min(max(seen.seconds, estimates[0] / 2), estimates[0] * 2)
            ratio = seconds / estimates[FRACTIONS.index(seen.percent)]
            bias += (ratio - bias) / self.patience
        else:
            bias += (1 - bias) / (10 * self.memory)  # it is tried again
            hidden += (seen.hidden_seconds - hidden) / self.patience
        steps = min(state.steps + 1, self.memory)
        costs = tuple(
            cost + ((seconds + hidden * (percent > 0)) / estimates[0] - cost) / steps
            for percent, cost, seconds in zip(FRACTIONS, state.costs, estimates, strict=True)
        )
        best = min(range(1, len(FRACTIONS)), key=costs.__getitem__)
        gain = self.min_gain if state.percent else self.first_gain
        pays = steps >= self.patience and costs[best] * max(1.0, bias) < 1 - gain
        percent = FRACTIONS[best] if pays else 0
        mean += (together - mean) / self.patience
        return HindsightState(percent, costs, steps, bias, state.overhead, mean, hidden)

    def _seconds(
        self,
        sizes: Sequence[int],
        paces: Sequence[Pace],
        claim_seconds: float,
        step_seconds: float,
        granularity: int,
    ) -> list[float]:
        """Returns the seconds of a step for each of the fractions."""
        estimates = [estimate(sizes, percent, paces, claim_seconds) for percent in FRACTIONS]
        if min(estimates) == estimates[0] or len(sizes) > self.max_replayed:
            return estimates
        return [
            max(replay(sizes, percent, paces, claim_seconds, step_seconds, granularity).seconds)
            for percent in FRACTIONS
        ]
