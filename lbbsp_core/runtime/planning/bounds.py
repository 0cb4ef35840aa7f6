"""What bounds a batch besides the options of the user: a chain of functions.

Each of them takes constraints and a `Situation`, and returns constraints that are narrower, or the
same. The `FIXED` ones are known once the workers have exchanged their facts; the `MOVING` ones
differ from step to step: `ShortSteps` is the state of one of them. All workers have the same
situation, and so the same constraints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from lbbsp_core.cost import Proportional
from lbbsp_core.policy import BatchConstraints, FirstUses, Policy, Sizes, bound_growth
from lbbsp_core.runtime.exchange.protocol import PeerInfo
from lbbsp_core.runtime.planning.short_steps import ShortSteps
from lbbsp_core.types import Limits

_TIMES: Final = 2  # an even share, by default
_GPU_GRANULARITY: Final = 8
# Tensor cores compute in tiles: matrices of 16-bit numbers are best in multiples of 8 (NVIDIA,
# Matrix Multiplication Background User's Guide).

_FEWEST_GRANULES: Final = 8  # of an even share, so that batches can still follow speeds


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """What bounds a worker's batches besides the options of the user; by default nothing does.

    Args:
        parts: Parts into which each worker cuts its batch, >= 1; a batch has samples for each.
        granularity: Samples of which batches are multiples on this worker's device, >= 1; all
            workers use the largest one that leaves a plan.
        shows_memory: Whether the driving factor `MEMORY_OF_GPU` of this worker bounds its batch.
        default_maximum: Whether a batch is at most twice its even share where its user gives no
            limits and its memory is not known.
        short_step_seconds: Seconds of a step, >= 0, below which batches stay near even shares.
        first_uses: Whether a first step with a batch size may take longer than the next ones, and
            need more memory than there is.
    """

    parts: int = 1
    granularity: int = 1
    shows_memory: bool = False
    default_maximum: bool = False
    short_step_seconds: float = 0.0
    first_uses: bool = False


class Situation(NamedTuple):
    """Facts on which bounds depend, the same on all workers.

    Args:
        policy: Policy of the run.
        peers: Facts of each worker, by rank.
        are_limits_given: Whether the user gives limits.
        bounds: What bounds batches, the same on all workers but for facts of their devices.
        first_uses: What is known of the batches of each worker, by rank; empty: nothing is.
        sizes: Plan in force.
        memory_percent: Percent of each device's memory in use; empty or None: it is unknown.
        short_steps: Time of steps.
    """

    policy: Policy
    peers: tuple[PeerInfo, ...]
    are_limits_given: bool = False
    bounds: BatchBounds = BatchBounds()
    first_uses: tuple[FirstUses, ...] = ()
    sizes: Sizes = ()
    memory_percent: Sequence[float | None] = ()
    short_steps: ShortSteps | None = None


Bound: TypeAlias = Callable[[BatchConstraints, Situation], BatchConstraints]
Trace: TypeAlias = dict[str, BatchConstraints]
"""Constraints after each bound, by the name of its function, in the order of the chain."""


def parts(constraints: BatchConstraints, now: Situation) -> BatchConstraints:
    """Gives each batch a sample for each of its parts."""
    least = now.bounds.parts
    limits = (replace(old, minimum=max(old.minimum, least)) for old in constraints.limits)
    return _with_limits(constraints, limits)


def memory(constraints: BatchConstraints, now: Situation) -> BatchConstraints:
    """Bounds the parts of a batch by the memory that a worker's profile knows."""
    limits = list(constraints.limits)
    for rank, peer in enumerate(now.peers):
        if peer.max_batch is not None:
            most = peer.max_batch * now.bounds.parts
            maximum = limits[rank].maximum
            limits[rank] = replace(limits[rank], maximum=min(most, maximum or most))
    return _with_limits(constraints, limits)


def granules(constraints: BatchConstraints, now: Situation) -> BatchConstraints:
    """Makes batches multiples of the largest granularity of a device, if there is a plan then."""
    largest = max(peer.granularity for peer in now.peers)
    if largest <= constraints.granularity:
        return constraints
    coarse = replace(constraints, granularity=largest)
    return coarse if has_plan(coarse) else constraints


def default_maximum(constraints: BatchConstraints, now: Situation) -> BatchConstraints:
    """Bounds batches of unknown memory.

    Ours: a batch that is many times what the user has tried may exceed the memory. Without `limits`
    a batch is therefore at most twice its even share, see `usual_maximum`. N such batches have at
    least X samples; where the memory of some workers holds less, see `with_cap`. Neither a single
    worker nor shares that the user has chosen are bounded.
    """
    peers = constraints.workers - 1
    if not now.bounds.default_maximum or now.are_limits_given or now.policy.is_static or not peers:
        return constraints
    cap = usual_maximum(constraints)
    excludes_plans = cap < constraints.global_batch_size - peers
    return with_cap(constraints, cap) if excludes_plans else constraints


def growth(constraints: BatchConstraints, now: Situation) -> BatchConstraints:
    """Bounds batches by those that have been run, see `bound_growth`."""
    if now.policy.is_static or not now.first_uses:
        return constraints
    percent = now.memory_percent or (None,) * constraints.workers
    return bound_growth(
        constraints,
        now.first_uses,
        now.sizes,
        [now.are_limits_given or peer.max_batch is not None for peer in now.peers],
        [x if peer.shows_memory else None for x, peer in zip(percent, now.peers, strict=True)],
    )


def short_steps(constraints: BatchConstraints, now: Situation) -> BatchConstraints:
    """Keeps batches near even shares in short steps, see `ShortSteps`."""
    if now.short_steps is None or not now.policy.accepts_narrower_limits:
        return constraints
    return now.short_steps.narrow(constraints)


FIXED: Final[tuple[Bound, ...]] = (parts, memory, granules, default_maximum)
MOVING: Final[tuple[Bound, ...]] = (growth, short_steps)


def narrow(constraints: BatchConstraints, now: Situation, bounds: Sequence[Bound]) -> Trace:
    """Returns the constraints after each bound of a chain."""
    trace = {}
    for bound in bounds:
        trace[bound.__name__] = constraints = bound(constraints, now)
    return trace


def last(trace: Trace) -> BatchConstraints:
    """Returns the constraints after all bounds."""
    return next(reversed(trace.values()))


class BoundsChain:
    """Constraints of plans: those of the user's options, narrowed by one bound after another.

    Args:
        options: Constraints by the options of the user.
        situation: Facts on which bounds depend, but for the time of steps, which starts here.

    Attributes:
        situation: Facts on which the `FIXED` bounds depend.
        parts: Parts into which each worker cuts its batch.
        short_steps: Time of steps.
        trace: Constraints after each of the `FIXED` bounds.
        constraints: Constraints of all plans; the next plan may have narrower ones.
        initial: Constraints before the facts of the peers were known.
        required: Constraints without the default maximum. A policy of the user need not keep that,
            and it says nothing of what has run before.
        default_maximum: Largest batch of a worker whose memory is not known; None: there is no such
            bound.
        is_maximum_raised: Whether other workers' maxima leave no plan within `usual_maximum`.
    """

    def __init__(self, options: BatchConstraints, situation: Situation) -> None:
        self._options, self.parts = options, situation.bounds.parts
        self.short_steps = ShortSteps(situation.bounds.short_step_seconds)
        self.situation = situation._replace(short_steps=self.short_steps)
        self.trace: Trace = {}
        self.use_peers(situation.peers)
        self.initial = self.constraints

    def use_peers(self, peers: tuple[PeerInfo, ...]) -> bool:
        """Narrows plans by the facts of the workers; returns whether that changes constraints."""
        self.situation = self.situation._replace(peers=peers)
        before, self.trace = self.trace, narrow(self._options, self.situation, FIXED)
        self.constraints = last(self.trace)
        name = default_maximum.__name__
        self.required = last({bound: self.trace[bound] for bound in self.trace if bound != name})
        pairs = zip(self.required.limits, self.constraints.limits, strict=True)
        self.default_maximum = next((new.maximum for old, new in pairs if old != new), None)
        self.is_maximum_raised = (self.default_maximum or 0) > usual_maximum(self.constraints)
        return self.trace != before

    def allow(self, plans: Iterable[Sizes]) -> bool:
        """Returns whether plans that are decided may stay.

        Noise of layers depends on plans: those that have run are to stay.
        """
        return all(map(self.required.allow, plans))

    def of_next_plan(
        self, first_uses: tuple[FirstUses, ...], sizes: Sizes, memory: Sequence[float | None]
    ) -> BatchConstraints:
        """Returns the constraints of the next plan, see `Situation`."""
        now = self.situation._replace(first_uses=first_uses, sizes=sizes, memory_percent=memory)
        return last(narrow(self.constraints, now, MOVING))


def usual_maximum(constraints: BatchConstraints) -> int:
    """Returns twice the even share, rounded up to the granularity.

    Example:
        >>> from lbbsp_core import Limits
        >>> usual_maximum(BatchConstraints(102, (Limits(),) * 4, granularity=8))
        56
    """
    samples = _TIMES * -(-constraints.global_batch_size // constraints.workers)
    return -(-samples // constraints.granularity) * constraints.granularity


def with_cap(constraints: BatchConstraints, cap: int) -> BatchConstraints:
    """Returns constraints in which the cap bounds workers without a maximum.

    If the maxima of the other workers leave no plan within the cap, it is raised to the smallest
    number for which there is one. If there is no plan without the cap either, returns the
    constraints as given.

    Example:
        >>> from lbbsp_core import Limits
        >>> constraints = BatchConstraints(96, (Limits(1, 10), Limits(1, 10), Limits()))
        >>> with_cap(constraints, 64).limits[2].maximum
        76
    """

    def within(cap: int) -> BatchConstraints:
        limits = (
            replace(old, maximum=max(cap, old.minimum)) if old.maximum is None else old
            for old in constraints.limits
        )
        return _with_limits(constraints, limits)

    if has_plan(within(cap)):
        return within(cap)
    if not has_plan(constraints):
        return constraints
    larger = range(cap + 1, constraints.global_batch_size)
    return within(cap + 1 + bisect_left(larger, True, key=lambda n: has_plan(within(n))))


def has_plan(constraints: BatchConstraints) -> bool:
    """Returns whether any plan satisfies the constraints."""
    try:
        constraints.plan([Proportional(1.0)] * constraints.workers)
    except ValueError:
        return False
    return True


def default_granularity(on_gpu: bool, workers: int, global_batch_size: int) -> int:
    """Returns the granularity that suits a worker's device.

    Example:
        >>> [default_granularity(True, workers, 512) for workers in (8, 10)]
        [8, 1]
    """
    smallest = _FEWEST_GRANULES * _GPU_GRANULARITY * workers
    return _GPU_GRANULARITY if on_gpu and workers > 1 and global_batch_size >= smallest else 1


def _with_limits(constraints: BatchConstraints, limits: Iterable[Limits]) -> BatchConstraints:
    return replace(constraints, limits=tuple(limits))
