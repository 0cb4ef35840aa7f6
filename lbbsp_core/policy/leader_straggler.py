"""LB-BSP on GPUs, 2020: no profile, samples move from the slowest worker to the fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.policy.base import BatchConstraints, Observation, Sizes
from lbbsp_core.policy.even import Even

_NOBODY = -1


class LeaderStragglerState(NamedTuple):
    """The plan, the window that is being filled, and the last move.

    Args:
        sizes: The plan in force.
        delta: Samples to move next.
        window: Measurements of each worker that make a decision.
        seconds: Sum of busy seconds in the window, by rank.
        counts: Measurements in the window, by rank.
        leader: Who got samples in the last move; -1 before the first.
        straggler: Who gave them.
        streak: Moves in a row that took from the same straggler.
    """

    sizes: Sizes
    delta: int
    window: int
    seconds: tuple[float, ...]
    counts: tuple[int, ...]
    leader: int
    straggler: int
    streak: int


@dataclass(frozen=True, slots=True)
class LeaderStraggler:
    r"""LB-BSP for GPUs as of 2020 (Chen et al., "Semi-Dynamic Load Balancing", SoCC 2020).

    Over a window of iterations, which filters noise, find the *leader* (least mean busy time, of
    those with room below their maximum) and the *straggler* (most mean busy time); then::

        x_leader += delta,   x_straggler -= delta

    When the pair oscillates, delta is halved and the window enlarged. No profile and no curve is
    needed, whatever the shape of the cost.

    Paper: the above. Ours: the pair oscillates where the straggler is the last move's leader, or
    the leader its straggler (with many workers they rarely swap exactly); the window doubles up
    to `longest`; delta stays >= the granularity. And, because a cluster may change after delta
    has become small: a third move in a row from the same straggler doubles delta, up to where it
    began, and halves the window. Steps that ran with another plan do not count.

    Args:
        delta: First number of samples to move, >= 1 (rounded down to the granularity, at least
            one granule). None is a sixteenth of an even batch.
        window: First length of the window, in iterations, >= 1.
        longest: Its longest, >= window.

    Raises:
        ValueError: An option out of range.

    Example:
        >>> from lbbsp_core import Limits
        >>> policy = LeaderStraggler(delta=2, window=1)
        >>> constraints = BatchConstraints(12, (Limits(), Limits()))
        >>> ran = Observation(0, (6, 6), (1.0, 2.0), (), (None, None))
        >>> policy.update(policy.init(constraints), constraints, ran).sizes
        (8, 4)
    """

    uses_costs: ClassVar[bool] = False

    delta: int | None = None
    window: int = 4
    longest: int = 32

    def __post_init__(self) -> None:
        for name, least in (("delta", 1), ("window", 1), ("longest", self.window)):
            value = getattr(self, name)
            if value is not None and (value < least or value != int(value)):
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")

    def init(self, constraints: BatchConstraints) -> LeaderStragglerState:
        """Even, with the first delta and window."""
        sizes = Even().init(constraints).sizes
        nobody = (_NOBODY, _NOBODY, 0)
        return _begin(sizes, self._first_delta(constraints), self.window, *nobody)

    def update(
        self, state: LeaderStragglerState, constraints: BatchConstraints, observation: Observation
    ) -> LeaderStragglerState:
        """Fills the window; moves samples once it is full."""
        if observation.sizes != state.sizes:
            return state
        state = _counted(state, observation)
        if min(state.counts) < state.window:
            return state
        pair = _pair(state, constraints)
        if pair is None:
            return _begin(state.sizes, state.delta, state.window, _NOBODY, _NOBODY, 0)
        return self._moved(self._tuned(state, constraints, *pair), constraints, *pair)

    def _first_delta(self, constraints: BatchConstraints) -> int:
        even = constraints.global_batch_size // (16 * constraints.workers)
        return _granules(even if self.delta is None else self.delta, constraints.granularity)

    def _tuned(
        self,
        state: LeaderStragglerState,
        constraints: BatchConstraints,
        leader: int,
        straggler: int,
    ) -> LeaderStragglerState:
        """Delta, window and streak for this move."""
        delta, window = state.delta, state.window
        if straggler == state.leader or leader == state.straggler:
            delta, window, streak = delta // 2, min(2 * window, self.longest), 1
        else:
            streak = state.streak + 1 if straggler == state.straggler else 1
            if streak >= 3:
                delta = min(2 * delta, self._first_delta(constraints))
                window = max(window // 2, self.window)
        delta = _granules(delta, constraints.granularity)
        return state._replace(delta=delta, window=window, streak=streak)

    def _moved(
        self,
        state: LeaderStragglerState,
        constraints: BatchConstraints,
        leader: int,
        straggler: int,
    ) -> LeaderStragglerState:
        room = _room(state.sizes[leader], constraints, leader)
        moved = min(state.delta, room, _spare(state.sizes[straggler], constraints, straggler))
        sizes = list(state.sizes)
        sizes[leader] += moved
        sizes[straggler] -= moved
        return _begin(tuple(sizes), state.delta, state.window, leader, straggler, state.streak)


def _begin(
    sizes: Sizes, delta: int, window: int, leader: int, straggler: int, streak: int
) -> LeaderStragglerState:
    """A state with an empty window."""
    seconds, counts = (0.0,) * len(sizes), (0,) * len(sizes)
    return LeaderStragglerState(sizes, delta, window, seconds, counts, leader, straggler, streak)


def _counted(state: LeaderStragglerState, seen: Observation) -> LeaderStragglerState:
    counts = [seen.measured(rank) for rank in range(len(state.sizes))]
    return state._replace(
        seconds=tuple(
            old + t if one else old
            for old, t, one in zip(state.seconds, seen.busy_seconds, counts, strict=True)
        ),
        counts=tuple(old + one for old, one in zip(state.counts, counts, strict=True)),
    )


def _pair(state: LeaderStragglerState, constraints: BatchConstraints) -> tuple[int, int] | None:
    """Leader and straggler of a full window; None where there is nothing to move between them."""
    means = [total / count for total, count in zip(state.seconds, state.counts, strict=True)]
    ranks = range(len(means))
    straggler = max(ranks, key=lambda rank: means[rank])
    able = [rank for rank in ranks if _room(state.sizes[rank], constraints, rank)]
    if not able or not _spare(state.sizes[straggler], constraints, straggler):
        return None
    leader = min(able, key=lambda rank: means[rank])
    return (leader, straggler) if means[leader] < means[straggler] else None


def _room(size: int, constraints: BatchConstraints, rank: int) -> int:
    """Samples that a worker may still take, in whole granules."""
    most = constraints.limits[rank].maximum
    room = (constraints.global_batch_size if most is None else most) - size
    return room // constraints.granularity * constraints.granularity


def _spare(size: int, constraints: BatchConstraints, rank: int) -> int:
    """Samples that a worker may still give, in whole granules."""
    return (
        (size - constraints.limits[rank].minimum)
        // constraints.granularity
        * constraints.granularity
    )


def _granules(samples: int, granularity: int) -> int:
    """Rounded down to whole granules, but at least one."""
    return max(samples // granularity, 1) * granularity
