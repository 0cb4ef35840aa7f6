"""LB-BSP on GPUs, 2020: moves samples from the slowest worker to the fastest, without a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.policy.base import Observation, Policy
from lbbsp_core.policy.constraints import BatchConstraints, Sizes
from lbbsp_core.policy.even import Even
from lbbsp_core.validate import require_integer

_NO_WORKER = -1


class LeaderStragglerState(NamedTuple):
    """Plan in force, measurements in the current window, and the last move.

    Args:
        sizes: Plan in force.
        delta: Samples to move next.
        window: Measurements of each worker before a decision.
        seconds: Sum of busy times in the window by rank, in seconds.
        counts: Measurements in the window, by rank.
        leader: Rank that received samples in the last move; -1 before the first move.
        straggler: Rank that gave them; -1 before the first move.
        streak: Consecutive moves that took from the same straggler.
    """

    sizes: Sizes
    delta: int
    window: int
    seconds: tuple[float, ...]
    counts: tuple[int, ...]
    leader: int = _NO_WORKER
    straggler: int = _NO_WORKER
    streak: int = 0


@dataclass(frozen=True, slots=True)
class LeaderStraggler(Policy[LeaderStragglerState]):
    r"""LB-BSP for GPUs as of 2020 (Chen et al., "Semi-Dynamic Load Balancing", SoCC 2020).

    Over a window of iterations, which filters noise, find the *leader* (smallest mean busy time
    among the workers below their maximum) and the *straggler* (largest mean busy time); then::

        x_leader += delta,   x_straggler -= delta

    When the pair oscillates, halve delta and enlarge the window. Neither a profile nor a cost
    curve is needed.

    Paper: the above. Ours: the pair oscillates if the straggler is the leader of the last move,
    or the leader is its straggler (with many workers they rarely swap exactly); the window
    doubles up to `longest`; delta stays >= the granularity. Also ours, because a cluster may
    change after delta has become small: a third consecutive move from the same straggler doubles
    delta, up to its first value, and halves the window. Steps that ran with another plan do not
    count.

    Args:
        delta: First number of samples to move, an integer >= 1, rounded down to a multiple of
            the granularity, but at least one granule. None: a sixteenth of an even batch.
        window: First length of the window, in iterations, an integer >= 1.
        longest: Maximum length of the window, in iterations, an integer >= window.

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> from lbbsp_core import Limits
        >>> policy = LeaderStraggler(delta=2, window=1)
        >>> constraints = BatchConstraints(12, (Limits(), Limits()))
        >>> ran = Observation(0, (6, 6), (1.0, 2.0), (), (None, None))
        >>> policy.update(policy.init(constraints), constraints, ran).sizes
        (8, 4)
    """

    needs_common_steps: ClassVar[bool] = True

    delta: int | None = None
    window: int = 4
    longest: int = 32

    def __post_init__(self) -> None:
        for name, minimum in (("delta", 1), ("window", 1), ("longest", self.window)):
            if (value := getattr(self, name)) is not None:
                require_integer(name, value, minimum)

    def init(self, constraints: BatchConstraints) -> LeaderStragglerState:
        """Returns the even plan, with the first delta and window."""
        sizes = Even().init(constraints).sizes
        seconds, counts = (0.0,) * len(sizes), (0,) * len(sizes)
        delta = self._first_delta(constraints)
        return LeaderStragglerState(sizes, delta, self.window, seconds, counts)

    def update(
        self, state: LeaderStragglerState, constraints: BatchConstraints, observation: Observation
    ) -> LeaderStragglerState:
        """Adds the step to the window; moves samples once the window is full."""
        if observation.sizes != state.sizes:
            return state
        state = state._replace(
            seconds=observation.added(state.seconds, observation.busy_seconds),
            counts=observation.added(state.counts, (1,) * len(state.counts)),
        )
        if min(state.counts) < state.window:
            return state
        leader, straggler = _pair(state, constraints)
        none = (0,) * len(state.counts)
        state = state._replace(seconds=(0.0,) * len(none), counts=none)
        if leader == _NO_WORKER:
            return state._replace(leader=leader, straggler=straggler, streak=0)
        first_delta = self._first_delta(constraints)
        delta, window, streak = self._tuned(state, first_delta, leader, straggler)
        delta = _granules(delta, constraints.granularity)
        sizes = list(state.sizes)
        moved = min(delta, _room(state, constraints, leader), _spare(state, constraints, straggler))
        sizes[leader] += moved
        sizes[straggler] -= moved
        return LeaderStragglerState(
            tuple(sizes), delta, window, state.seconds, none, leader, straggler, streak
        )

    def _first_delta(self, constraints: BatchConstraints) -> int:
        even = constraints.global_batch_size // (16 * constraints.workers)
        return _granules(even if self.delta is None else self.delta, constraints.granularity)

    def _tuned(
        self, state: LeaderStragglerState, first_delta: int, leader: int, straggler: int
    ) -> tuple[int, int, int]:
        """Returns delta, the window, and the moves in a row from the straggler."""
        delta, window = state.delta, state.window
        if straggler == state.leader or leader == state.straggler:
            delta, window, streak = delta // 2, min(2 * window, self.longest), 1
        else:
            streak = state.streak + 1 if straggler == state.straggler else 1
            if streak >= 3:
                delta = min(2 * delta, first_delta)
                window = max(window // 2, self.window)
        return delta, window, streak


def _pair(state: LeaderStragglerState, constraints: BatchConstraints) -> tuple[int, int]:
    """Returns leader and straggler of a full window; no workers if no sample can be moved."""
    means = [total / count for total, count in zip(state.seconds, state.counts, strict=True)]
    ranks = range(len(means))
    straggler = max(ranks, key=means.__getitem__)
    below_maximum = [rank for rank in ranks if _room(state, constraints, rank)]
    leader = min(below_maximum, key=means.__getitem__, default=straggler)
    if means[leader] < means[straggler] and _spare(state, constraints, straggler):
        return leader, straggler
    return _NO_WORKER, _NO_WORKER


def _room(state: LeaderStragglerState, constraints: BatchConstraints, rank: int) -> int:
    """Returns how many more samples a worker may take, in whole granules."""
    maximum = constraints.limits[rank].maximum
    room = (constraints.global_batch_size if maximum is None else maximum) - state.sizes[rank]
    return room // constraints.granularity * constraints.granularity


def _spare(state: LeaderStragglerState, constraints: BatchConstraints, rank: int) -> int:
    """Returns how many samples a worker may give away, in whole granules."""
    spare = state.sizes[rank] - constraints.limits[rank].minimum
    return spare // constraints.granularity * constraints.granularity


def _granules(samples: int, granularity: int) -> int:
    """Returns `samples` rounded down to whole granules, but at least one granule."""
    return max(samples // granularity, 1) * granularity
