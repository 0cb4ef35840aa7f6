r"""Work sharing inside a step: samples that no plan assigns, claimed by workers done early.

No prediction can foresee noise. So of a step's X samples each worker starts with ``1 - f`` of its
planned share, its *main part*. The rest is a common *reserve* of the same step: whoever has
finished claims a part of it, until it is empty; then comes the one all-reduce of the step. Which
samples a step has is thus unchanged, and so is the update, because gradients are sums over samples.
(Relatives: FlexRR, Harlap et al., SoCC 2016, moves work between iterations' workers.)

*Claims* add a size to a counter that all workers share. What the counter was before says where the
part begins, so that each sample is computed once, however claims interleave.

*Sizes of parts* follow weighted factoring (Hummel et al., SPAA 1996): half of the worker's share,
by its speed, of what should be left now. No part is expected to take less than
``sqrt(2 o f T)`` seconds, where T is the step and o the overhead of a part. With parts of t seconds
a worker loses ``o f T / t`` to overheads, and waits about ``t / 2`` for the last part of another
worker; the sum is least for this t.

*The fraction f* is chosen by hindsight (ours): after a step all workers know its plan and the pace
of each worker, so what the step would have taken with any f. All of them compute the same from
exchanged integers, by scalar arithmetic (rule 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from lbbsp_core.policy import Sizes

FRACTIONS: Final = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80)
"""Fractions f among which `Hindsight` chooses, in percent."""

AUTO: Final = "auto"

SLOW_CLAIM_SECONDS: Final = 1.0
"""Time of a claim after which work is no longer shared."""

PART_SECONDS: Final = 0.0025
CLAIM_SECONDS: Final = 0.001
"""Overhead of a part, and time of a claim, that are assumed before one has been measured."""

_MOST_PERCENT: Final = FRACTIONS[-1]


def mode_of(share_work: bool | str | float) -> int | str:
    """Returns how steps share work: a fraction of each step in percent, or `AUTO`.

    Args:
        share_work: True or ``"auto"`` for `AUTO`, False for 0, or a fraction in [0.01, 0.8].

    Raises:
        ValueError: It is something else; names the value and the remedy.

    Example:
        >>> mode_of(True), mode_of(False), mode_of(0.4)
        ('auto', 0, 40)
    """
    if isinstance(share_work, bool) or share_work == AUTO:
        return AUTO if share_work else 0
    percent = 0
    if isinstance(share_work, int | float) and math.isfinite(share_work):
        percent = round(100 * share_work)
    if not 0 < percent <= _MOST_PERCENT:
        raise ValueError(
            'share_work must be True, False, "auto", or a fraction of each step from 0.01 to '
            f"{_MOST_PERCENT / 100}, got {share_work!r}: give one of these"
        )
    return percent


class Split(NamedTuple):
    """Plan of a step with a reserve, in samples.

    Args:
        mains: Main part of each worker, by rank; it starts the step with it.
        reserve: Samples that follow those of all mains.
    """

    mains: Sizes
    reserve: int


def split(sizes: Sequence[int], percent: int, granularity: int = 1) -> Split:
    """Divides a plan into main parts and a reserve of about `percent` of it.

    Main parts are multiples of the granularity, except that of a worker with a remainder, and >= 1
    for a worker that has samples.

    Example:
        >>> split((24, 48, 48), 40)
        Split(mains=(15, 29, 29), reserve=47)
        >>> split((3, 1), 80)
        Split(mains=(1, 1), reserve=2)
    """
    kept = 100 - percent
    grains = (-(-size * kept // (100 * granularity)) * granularity for size in sizes)
    mains = tuple(min(size, grain) for size, grain in zip(sizes, grains, strict=True))
    return Split(mains, sum(sizes) - sum(mains))


class Pace(NamedTuple):
    """How fast a worker is; overheads are slower with it, and hence counted in samples (rule 5).

    Args:
        seconds_per_sample: Seconds of a further sample, > 0.
        step_overhead: Overhead of a step, in samples that take as long.
        part_overhead: Overhead of a claimed part besides its claim, in samples.
    """

    seconds_per_sample: float
    step_overhead: float = 0.0
    part_overhead: float = 0.0

    def main(self, samples: float) -> float:
        """Returns the seconds of a main part."""
        return (self.step_overhead + samples) * self.seconds_per_sample

    def part(self, samples: float) -> float:
        """Returns the seconds of a claimed part."""
        return (self.part_overhead + samples) * self.seconds_per_sample


class Claims:
    """One worker's claims on the reserve of a step: how many samples it asks for, and gets.

    Args:
        sizes: The plan, by rank. By it all workers are expected to need the same time.
        mains: Main parts, by rank.
        rank: Number of this worker.
        step_seconds: Seconds that the step is expected to take.
        claim_seconds: Seconds from a claim to its answer.
        part_overhead: See `Pace`; of this worker.
        granularity: Claims are multiples of it, in samples.

    Attributes:
        samples: Samples that the worker has got.
        parts: Number of parts in which it has got them.

    Example:
        >>> claims = Claims((50, 50), mains=(30, 30), rank=0, step_seconds=0.5)
        >>> claims.want(0.3), claims.take(start=0, size=10, seconds=0.3)
        (10, (0, 10))
        >>> claims.want(0.375), claims.take(start=35, size=5, seconds=0.4)  # 25 went to the other
        (5, (35, 40))
        >>> claims.samples, claims.parts, claims.is_empty
        (15, 2, True)
    """

    def __init__(
        self,
        sizes: Sequence[int],
        mains: Sequence[int],
        rank: int,
        step_seconds: float,
        claim_seconds: float = 0.0,
        part_overhead: float = 0.0,
        granularity: int = 1,
    ) -> None:
        total = sum(sizes)
        self._reserve, self._granularity = total - sum(mains), granularity
        self._main, self._others = mains[rank], (total - sizes[rank]) / step_seconds
        fraction = self._reserve / total
        self._fraction_seconds = fraction * step_seconds
        self._claim_seconds, self._part_overhead = claim_seconds, part_overhead
        # Nobody claims before the main parts should be done.
        self._seen, self._seen_at = 0, (1 - fraction) * step_seconds
        self.samples = self.parts = 0

    @property
    def is_empty(self) -> bool:
        """Whether the reserve is known to be empty."""
        return self._seen >= self._reserve

    def want(self, seconds: float) -> int:
        """Returns the samples to claim now, >= 1, `seconds` after the start of the step."""
        done = max(self._main + self.samples, 1)
        speed = done / max(seconds, 1e-9)  # its own, in this step
        taken = self._others * max(0.0, seconds - self._seen_at)
        left = max(0.0, self._reserve - self._seen - taken)
        overhead = self._claim_seconds + self._part_overhead / speed
        least = speed * shortest_part(self._fraction_seconds, overhead)
        grains = max(left * speed / (speed + self._others) / 2, least) / self._granularity
        return max(1, int(grains)) * self._granularity

    def take(self, start: int, size: int, seconds: float) -> tuple[int, int]:
        """Returns the part that a claim has got: positions of its first sample, and after its last.

        Args:
            start: Value of the counter before the claim.
            size: Samples that were claimed.
            seconds: Time of the answer, after the start of the step.
        """
        begin, end = min(start, self._reserve), min(start + size, self._reserve)
        self._seen, self._seen_at = end, seconds
        self.samples += end - begin
        self.parts += end > begin
        return begin, end


def shortest_part(reserve_seconds: float, overhead_seconds: float) -> float:
    """Returns the seconds that a part should take at least, ``sqrt(2 o f T)``."""
    return math.sqrt(2 * overhead_seconds * reserve_seconds)


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
            own, pace = claims[rank], paces[rank]
            size = own.want(now - half)
            begin, end = own.take(counter, size, now + half)
            counter += size
            if begin == end:
                ends[rank] = now + half
                continue
            ends[rank] = now + half + pace.part(end - begin)
            if not own.is_empty:
                heappush(queue, (ends[rank] + half, rank))
        samples = [main + own.samples for main, own in zip(mains, claims, strict=True)]
        parts = [own.parts for own in claims]
    return Shared(tuple(ends), tuple(samples), tuple(parts))


def together_seconds(sizes: Sequence[int], paces: Sequence[Pace]) -> float:
    """Returns the seconds of a step in which nobody waits, and nothing is claimed."""
    work = sum(sizes) + sum(pace.step_overhead for pace in paces)
    return work / sum(1 / pace.seconds_per_sample for pace in paces)


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
            shortest_part(mean, claim_seconds + each * pace) for each in (state.overhead, overhead)
        )
        if abs(now - before) > self.drift * mean:
            state = state._replace(costs=HindsightState().costs, steps=0, overhead=overhead)
        found = self._seconds(sizes, paces, claim_seconds, mean, granularity)
        bias, hidden, seen = state.bias, state.hidden_seconds, seen or Seen()
        if seen.percent in FRACTIONS[1:]:
            seconds = min(max(seen.seconds, found[0] / 2), found[0] * 2)
            ratio = seconds / found[FRACTIONS.index(seen.percent)]
            bias += (ratio - bias) / self.patience
        else:
            bias += (1 - bias) / (10 * self.memory)  # it is tried again
            hidden += (seen.hidden_seconds - hidden) / self.patience
        steps = min(state.steps + 1, self.memory)
        costs = tuple(
            cost + ((seconds + hidden * (percent > 0)) / found[0] - cost) / steps
            for percent, cost, seconds in zip(FRACTIONS, state.costs, found, strict=True)
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
        found = [estimate(sizes, percent, paces, claim_seconds) for percent in FRACTIONS]
        if min(found) == found[0] or len(sizes) > self.max_replayed:
            return found
        return [
            max(replay(sizes, each, paces, claim_seconds, step_seconds, granularity).seconds)
            for each in FRACTIONS
        ]


class PartCosts(NamedTuple):
    """Overhead of a worker's parts, fitted to the times of those that it has computed.

    A part of n samples takes ``(n + o) s`` seconds, where s is the pace of the main part of the
    same step, so that contention cancels out. The fit is a straight line of ``time / (s n)`` by
    ``1 / n``, through 1, whose slope is the overhead o in samples: relative errors count alike.
    Recent parts weigh more. Where contention begins or ends within a step, times are far from the
    line, and count as if they were at the edge of a band around it (as in Huber's regression).

    Args:
        slope: Slope of the line, >= 0.
        weight: Number of parts, up to a limit; 0: the slope is not known.
        xx: Running mean square of ``1 / n``.

    Example:
        >>> costs = PartCosts()
        >>> for samples in (20, 10, 5, 20, 10, 5) * 5:
        ...     costs = costs.after(samples, (samples + 3) * 0.01, 0.01)
        >>> round(costs.overhead(0.01), 3)
        3.0
    """

    slope: float = 0.0
    weight: float = 0.0
    xx: float = 0.0

    def after(
        self,
        samples: int,
        seconds: float,
        seconds_per_sample: float,
        memory: int = 50,
        band: float = 0.25,
    ) -> PartCosts:
        """Returns the fit after a part of some samples, by the pace of the main part.

        Args:
            samples: Size of the part.
            seconds: Its time, without the claim.
            seconds_per_sample: Pace of the main part.
            memory: Number of parts that count.
            band: Width of the band on each side, relative to the line.
        """
        x, y = 1 / samples, seconds / (samples * seconds_per_sample)
        line = 1 + self.slope * x
        error = min(max(y - line, -band * line), band * line)
        weight = min(self.weight + 1, memory)
        xx = self.xx + (x * x - self.xx) / weight
        return PartCosts(max(0.0, self.slope + x * error / (weight * xx)), weight, xx)

    def overhead(self, seconds_per_sample: float) -> float:
        """Returns the overhead of a part, in samples of this pace; 0 if the pace is not known."""
        if self.weight:
            return self.slope
        return PART_SECONDS / seconds_per_sample if seconds_per_sample else 0.0
