"""Checks of the contracts that every predictor, policy and synchroniser satisfies.

A test of a new one needs one line::

    def test_mine() -> None:
        check_predictor(Mine(window=8))
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import Affine, Cost
from lbbsp_core.policy import BatchConstraints, Even, Observation, Policy, PolicyState, Sizes
from lbbsp_core.predict import Predictor
from lbbsp_core.sim.events import Change, play, schedule
from lbbsp_core.sync import SyncDecision, Synchroniser
from lbbsp_core.types import Limits, Measurement

_SCALES = (1e-3, 1.0, 1e6)  # samples per second: a large model on a CPU, and a tiny one on a GPU
_HORIZONS = (1, 2, 3, 8)
_SLACK = 64  # bytes by which a pickled state may grow: counters get longer

S = TypeVar("S")
P = TypeVar("P", bound=PolicyState)
T = TypeVar("T")

# Contracts


def check_predictor(
    predictor: Predictor, *, drivers: int = 0, arrays: bool = False, updates: int = 2000
) -> None:
    """Checks the contract of `Predictor`.

    The predictor must be a frozen value that compares, hashes, pickles and prints its
    parameters; `init`, `update` and `predict` must change neither it nor a state; a pickled state
    must replay to the same bits; predictions must be NaN before the first update, then finite and
    > 0 at any horizon, over jumps, outliers and constant stretches; a state must not grow.

    Args:
        predictor: Predictor to check.
        drivers: Number of driving factors in each measurement.
        arrays: Whether it also takes arrays of shape ``(workers,)``, elementwise.
        updates: Length of the series over which a state may not grow; its first half fills
            windows.

    Raises:
        AssertionError: The contract is broken; names the rule and the value.

    Example:
        >>> from lbbsp_core import Ema
        >>> check_predictor(Ema(0.2), arrays=True)
    """
    _check_value(predictor)
    _check_unmeasured(predictor, drivers)
    for seed, scale in enumerate(_SCALES):
        _check_predictions(predictor, list(_series(300, seed, scale, drivers)))
    _check_transitions(predictor, list(_series(40, 3, 1.0, drivers)))
    _check_replay(predictor, list(_series(120, 4, 1.0, drivers)))
    _check_bounded(predictor, list(_series(updates, 5, 1.0, drivers)))
    if arrays:
        _check_arrays(predictor, [list(_series(60, 6 + worker, 1.0)) for worker in range(3)])


def check_policy(policy: Policy, *clusters: BatchConstraints, steps: int = 80) -> None:
    """Checks the contract of `Policy`.

    The policy must be a frozen value that compares, hashes, pickles and prints its parameters;
    `init` and `update` must give plans of the global batch size, within limits and granularity,
    whatever is observed: unknown costs, excluded ranks, plans of earlier and of short steps;
    neither may change the policy or a state; the same observations must give the same plans, also
    from a state that was stored as JSON; a state must not grow. `is_static` must be False if the
    sizes ever change, and `uses_costs` must be True if they depend on predicted costs. If
    `accepts_narrower_limits` is True, each plan must be within limits that become narrower and
    wider during the run, also while costs are unknown.

    Args:
        policy: Policy to check.
        clusters: Constraints to plan for; by default several, of 1 to 4 workers.
        steps: Observations for each cluster.

    Raises:
        AssertionError: The contract is broken; names the rule and the plan.

    Example:
        >>> from lbbsp_core import LoadBalanced
        >>> check_policy(LoadBalanced(min_gain=0.0))
    """
    _check_value(policy)
    _check_flags(policy, "uses_costs", "is_static", "needs_common_steps", "accepts_narrower_limits")
    for seed, cluster in enumerate(clusters or _CLUSTERS):
        _check_policy_run(policy, random.Random(seed), [cluster] * (steps + 1))
        if policy.accepts_narrower_limits:
            _check_policy_run(policy, random.Random(seed), _narrowed(cluster, seed, steps))


def check_plan(sizes: Sizes, cluster: BatchConstraints) -> None:
    """Checks that `sizes` is a plan for `cluster`: its sum, limits and granularity.

    Args:
        sizes: Samples of each worker, by rank.
        cluster: Constraints of the plan.

    Raises:
        AssertionError: A constraint is violated; names the constraint and the plan.

    Example:
        >>> check_plan((8, 16), BatchConstraints(24, (Limits(), Limits()), granularity=8))
    """
    shown = f"the plan {sizes!r}"
    _require(
        isinstance(sizes, tuple) and all(type(size) is int for size in sizes),
        f"{shown} must be a tuple of Python's int: it is compared by its text, and recorded",
    )
    _require(len(sizes) == cluster.workers, f"{shown} must have {cluster.workers} sizes")
    _require(
        sum(sizes) == cluster.global_batch_size, f"{shown} must sum to {cluster.global_batch_size}"
    )
    for size, bounds in zip(sizes, cluster.limits, strict=True):
        _require(bounds.allow(size), f"{shown} must keep {bounds}")
    remainders = sum(size % cluster.granularity != 0 for size in sizes)
    _require(
        remainders <= (cluster.global_batch_size % cluster.granularity != 0),
        f"{shown} must be in multiples of {cluster.granularity}, but for one worker's remainder",
    )


def check_synchroniser(
    synchroniser: Synchroniser, *, max_lead: float = math.inf, pushes: int = 200
) -> None:
    """Checks the contract of `Synchroniser`, in virtual time.

    The synchroniser must be a frozen value that compares, hashes, pickles and prints its
    parameters; no call may change it or a state; the same events must give the same decisions,
    also from a pickled state; a worker must run whenever one is active (no deadlock), also when
    workers leave and join; every push must enter the model once, before its worker proceeds; no
    worker may start an iteration too far ahead; impossible events must be refused. `keeps_pushes`
    must be True if and only if some push does not enter the model on arrival.

    Args:
        synchroniser: Synchroniser to check.
        max_lead: Maximum lead over the slowest worker at the start of an iteration, in
            iterations since the last barrier (an update from the gradients of all workers).
        pushes: Pushes for each cluster, of 1 to 7 workers.

    Raises:
        AssertionError: The contract is broken; names the rule and the decision.

    Example:
        >>> from lbbsp_core import SSP
        >>> check_synchroniser(SSP(3), max_lead=3)
    """
    _check_value(synchroniser)
    _check_flags(synchroniser, "keeps_pushes")
    kept = 0
    for seed in range(8):
        source, workers = random.Random(seed), (1, 2, 3, 7)[seed % 4]
        monitor = _Monitor(synchroniser, max_lead)
        changes = _changes(source, workers) if seed >= 2 else ()
        played = play(monitor, _noisy_seconds(source), workers=workers, changes=changes)
        deque(islice(played, pushes), maxlen=0)
        monitor.check_replay()
        kept += monitor.kept_pushes
        _check_all_enter(synchroniser, _noisy_seconds(source), workers)
    _require(
        kept > 0 or not synchroniser.keeps_pushes,
        f"{synchroniser!r} aggregates every push on arrival: keeps_pushes must be False",
    )
    _check_refusals(synchroniser)


# Parts of the contracts


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _unchanged(what: str, state: object, call: Callable[[], T]) -> T:
    """Returns the result of `call`, which must leave `state` unchanged."""
    before = pickle.dumps(state)
    result = call()
    _require(pickle.dumps(state) == before, f"{what} changed the state it was given")
    return result


def _check_flags(thing: object, *names: str) -> None:
    for name in names:
        value = getattr(thing, name, None)
        _require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")


def _check_value(thing: Any) -> None:
    """Checks that `thing` is a frozen dataclass that compares, hashes, pickles and prints."""
    name = type(thing).__name__
    frozen = getattr(getattr(thing, "__dataclass_params__", None), "frozen", False)
    _require(frozen, f"{name} must be a frozen dataclass")
    twin = pickle.loads(pickle.dumps(thing))
    _require(twin == thing, f"{thing!r} must equal its pickled copy {twin!r}")
    _require(hash(twin) == hash(thing), f"{thing!r} must hash like its pickled copy")
    for field in dataclasses.fields(thing):
        if not field.init:  # no option
            continue
        shown = f"{field.name}={getattr(thing, field.name)!r}"
        _require(shown in repr(thing), f"repr must show {shown}, got {thing!r}")


def _series(length: int, seed: int, scale: float, drivers: int = 0) -> Iterator[Measurement]:
    """Yields speeds around `scale`: noise, new levels, outliers, and a constant stretch."""
    source = random.Random(seed)
    level = 1.0
    for step in range(length):
        if source.random() < 0.03:
            level = min(max(level * source.choice((0.25, 0.5, 2.0, 4.0)), 1 / 16), 16.0)
        speed = scale * level
        if step % 100 < 70:
            speed *= source.uniform(0.9, 1.1)
            speed *= source.choice((0.02, 50.0)) if source.random() < 0.02 else 1.0
        samples = source.randint(1, 64)
        factors = tuple(source.uniform(0.0, 100.0) for _ in range(drivers))
        yield Measurement(samples, samples / speed, factors)


def _check_unmeasured(predictor: Predictor, drivers: int) -> None:
    for horizon in _HORIZONS:
        unknown = predictor.predict(predictor.init(), (50.0,) * drivers, horizon)
        _require(
            isinstance(unknown, float) and math.isnan(unknown),
            f"{predictor!r} must predict NaN before the first update, got {unknown!r}",
        )


def _check_predictions(predictor: Predictor, series: Sequence[Measurement]) -> None:
    state = predictor.init()
    for step, measurement in enumerate(series):
        state = predictor.update(state, measurement)
        for horizon in _HORIZONS:
            speed = predictor.predict(state, measurement.drivers, horizon)
            _require(
                isinstance(speed, float) and 0.0 < speed < math.inf,
                f"{predictor!r} must predict a finite float > 0, got {speed!r} after "
                f"{step + 1} updates at horizon {horizon}; the last speed was "
                f"{measurement.samples_per_second:g}",
            )


def _check_transitions(predictor: Predictor, series: Sequence[Measurement]) -> None:
    """Checks that calls are pure and that `predict` does not influence what is learned."""
    itself = pickle.dumps(predictor)
    state = silent = predictor.init()
    for measurement in series:
        ask = partial(predictor.predict, state, measurement.drivers, 2)
        first, second = _unchanged("predict", state, ask), ask()
        _require(_same(first, second), f"predict gave {first!r}, then {second!r}: it is not pure")
        state = _unchanged("update", state, partial(predictor.update, state, measurement))
        silent = predictor.update(silent, measurement)
    _require(pickle.dumps(predictor) == itself, f"a call changed {predictor!r} itself")
    drivers = series[-1].drivers
    asked, unasked = predictor.predict(state, drivers), predictor.predict(silent, drivers)
    _require(_same(asked, unasked), f"predict changed what is learned: {asked!r}, {unasked!r}")


def _check_replay(predictor: Predictor, series: Sequence[Measurement]) -> None:
    half = len(series) // 2
    _, saved = _drive(predictor, predictor.init(), series[:half])
    pickled = pickle.dumps(saved)
    expected, _ = _drive(predictor, saved, series[half:])
    _drive(predictor, predictor.init(), series[::-1])  # another worker's series in between
    twin = pickle.loads(pickle.dumps(predictor))
    for title, again in (("the same", predictor), ("a pickled", twin)):
        replayed, _ = _drive(again, pickle.loads(pickled), series[half:])
        for step, (old, new) in enumerate(zip(expected, replayed, strict=True)):
            _require(
                _same(old, new),
                f"{title} {predictor!r} must replay a pickled state to the same bits: {old!r} "
                f"became {new!r} at step {step}",
            )


def _check_bounded(predictor: Predictor, series: Sequence[Measurement]) -> None:
    half = len(series) // 2
    _, state = _drive(predictor, predictor.init(), series[:half])
    early = len(pickle.dumps(state))
    _, state = _drive(predictor, state, series[half:])
    late = len(pickle.dumps(state))
    _require(
        late <= early + _SLACK,
        f"the state of {predictor!r} must stay bounded: {early} bytes pickled after {half} "
        f"updates, {late} after {len(series)}",
    )


def _check_arrays(predictor: Predictor, workers: Sequence[Sequence[Measurement]]) -> None:
    joint = [
        Measurement(
            np.array([one.samples for one in row], dtype=float),
            np.array([one.busy_seconds for one in row]),
        )
        for row in zip(*workers, strict=True)
    ]
    together, _ = _drive(predictor, predictor.init(), joint)
    alone = [_drive(predictor, predictor.init(), series)[0] for series in workers]
    for step, (got, *expected) in enumerate(zip(together, *alone, strict=True)):
        _require(
            np.allclose(got, expected, rtol=1e-9, atol=0.0, equal_nan=True),
            f"{predictor!r} must treat arrays elementwise: got {got!r} at step {step}, one by "
            f"one {expected!r}",
        )


def _drive(
    predictor: Predictor, state: object, series: Sequence[Measurement]
) -> tuple[list[npt.ArrayLike], object]:
    """Returns the predictions before each update, and the last state."""
    predictions: list[npt.ArrayLike] = []
    for measurement in series:
        predictions.append(predictor.predict(state, measurement.drivers))
        state = predictor.update(state, measurement)
    return predictions, state


def _same(one: npt.ArrayLike, other: npt.ArrayLike) -> bool:
    return bool(np.array_equal(one, other, equal_nan=True))


_CHANGES = (0, 0, 1, 4, 16, 1000)  # samples by which limits differ from the even plan

_CLUSTERS = (
    BatchConstraints(64, (Limits(),) * 4),
    BatchConstraints(10, (Limits(1, 6), Limits(2), Limits(1))),
    BatchConstraints(100, (Limits(8, 64), Limits(8), Limits(16, 48)), granularity=8),
    BatchConstraints(
        96, (Limits(1, 48), Limits(1, 32), Limits(1, 16)), granularity=16
    ),  # one plan only
    BatchConstraints(3, (Limits(),) * 3),
    BatchConstraints(7, (Limits(),)),
)


def _narrowed(cluster: BatchConstraints, seed: int, steps: int) -> list[BatchConstraints]:
    """Returns constraints of `init` and of each step, with limits around the even plan."""
    source, even, given = random.Random(seed), Even().init(cluster).sizes, [cluster]
    for _ in range(steps):
        if source.random() < 0.3:
            limits = map(partial(_around, source), even, cluster.limits)
            given.append(dataclasses.replace(cluster, limits=tuple(limits)))
        else:
            given.append(given[-1])
    return given


def _around(source: random.Random, size: int, bounds: Limits) -> Limits:
    """Returns limits within others that allow a size, and none or some other sizes."""
    low, high = size - source.choice(_CHANGES), size + source.choice(_CHANGES)
    high = high if bounds.maximum is None else min(high, bounds.maximum)
    return Limits(max(low, bounds.minimum), high)


def _check_policy_run(
    policy: Policy[P], source: random.Random, given: Sequence[BatchConstraints]
) -> None:
    """Checks a run under the constraints of `init` and of each step."""
    before = pickle.dumps(policy)
    states, observations = _run_policy(policy, given, source)
    _require(pickle.dumps(policy) == before, f"init or update changed {policy!r} itself")
    _check_policy_replay(policy, given, states, observations)
    _check_policy_flags(policy, given, states, observations)
    _check_policy_states(policy, states)


def _run_policy(
    policy: Policy[P], given: Sequence[BatchConstraints], source: random.Random
) -> tuple[list[P], list[Observation]]:
    """Runs `policy` in a loop; returns its states, the first one included, and observations."""
    first, *later = given
    states, observations = [policy.init(first)], []
    check_plan(states[0].sizes, first)
    speeds = [source.uniform(10.0, 100.0) for _ in first.limits]
    for step, cluster in enumerate(later):
        speeds = [v * source.choice((0.4, 2.5)) if source.random() < 0.1 else v for v in speeds]
        used = states[max(0, len(states) - source.randint(1, 3))].sizes
        observation = _observe(source, step, used, speeds)
        update = partial(policy.update, states[-1], cluster, observation)
        states.append(_unchanged("update", states[-1], update))
        check_plan(states[-1].sizes, cluster)
        observations.append(observation)
    return states, observations


def _observe(
    source: random.Random, step: int, sizes: Sizes, speeds: Sequence[float]
) -> Observation:
    """Observes a step of `sizes`, or a short one, with some or all workers unmeasured."""
    if source.random() < 0.1:
        sizes = tuple(max(1, size // 2) for size in sizes)
    chance = source.choice((0.0, 0.0, 0.0, 0.3, 1.0)) if step else 1.0
    curves = [Affine(4.0 / v, 1.0 / v) for v in speeds]
    excluded = tuple(rank for rank in range(len(speeds)) if source.random() < chance)
    costs: tuple[Cost | None, ...] = tuple(
        None if rank in excluded and source.random() < 0.5 else curve
        for rank, curve in enumerate(curves)
    )
    if chance == 1.0:
        costs = (None,) * len(speeds)
    busy = tuple(
        0.0
        if rank in excluded and source.random() < 0.5
        else curve(size) * source.uniform(0.9, 1.1)
        for rank, (curve, size) in enumerate(zip(curves, sizes, strict=True))
    )
    return Observation(step, sizes, busy, excluded, costs, last_of_epoch=source.random() < 0.2)


def _check_policy_flags(
    policy: Policy[P],
    given: Sequence[BatchConstraints],
    states: Sequence[P],
    observations: Sequence[Observation],
) -> None:
    """Checks `is_static` and `uses_costs` against what the policy did."""
    if policy.is_static:
        changed = [state.sizes for state in states if state.sizes != states[0].sizes]
        _require(
            not changed,
            f"{policy!r} changes its sizes from {states[0].sizes} to {changed[:1]}: is_static must "
            "be False",
        )
    if policy.uses_costs:
        return
    state = states[0]
    for seen, cluster, expected in zip(observations, given[1:], states[1:], strict=True):
        unknown = (None,) * len(seen.sizes)
        state = policy.update(state, cluster, dataclasses.replace(seen, costs=unknown))
        _require(
            state.sizes == expected.sizes,
            f"{policy!r} plans {expected.sizes} with predicted costs and {state.sizes} without at "
            f"step {seen.step}: uses_costs must be True",
        )


def _check_policy_states(policy: Policy, states: Sequence[PolicyState]) -> None:
    half = max(len(pickle.dumps(state)) for state in states[: len(states) // 2])
    late = max(len(pickle.dumps(state)) for state in states)
    allowed = half + _SLACK * len(states[0].sizes)
    _require(late <= allowed, f"the state of {policy!r} must stay small: {half}, {late} bytes")


def _restored(state: T) -> T:
    """Returns the state after a round trip through JSON, as a checkpoint stores it."""
    restored: Callable[..., T] = type(state)
    return restored(*_to_tuples(json.loads(json.dumps(state))))


def _to_tuples(value: Any) -> Any:
    """Returns `value` with all lists, which JSON makes of tuples, as tuples again."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _check_policy_replay(
    policy: Policy[P],
    given: Sequence[BatchConstraints],
    states: Sequence[P],
    observations: Sequence[Observation],
) -> None:
    twin: Policy[P] = pickle.loads(pickle.dumps(policy))
    for first in (0, len(observations) // 2):
        state = _restored(states[first]) if first else twin.init(given[0])
        later = zip(observations[first:], given[first + 1 :], states[first + 1 :], strict=True)
        for seen, cluster, expected in later:
            state = twin.update(state, cluster, seen)
            _require(
                state.sizes == expected.sizes,
                f"{policy!r} must decide the same from the same observations, got {state.sizes} "
                f"after {expected.sizes} at step {seen.step} of a replay",
            )


class _Monitor(Generic[S]):
    """A synchroniser that passes all events on to another one and checks its decisions."""

    keeps_pushes: ClassVar[bool] = True

    def __init__(self, inner: Synchroniser[S], max_lead: float) -> None:
        self._inner, self._max_lead = inner, max_lead
        self._pickled = pickle.dumps(inner)
        self._counts: dict[int, int] = {}  # pushes of each active worker since the last barrier
        self._running: set[int] = set()
        self._kept: set[int] = set()  # workers with a push that has not entered the model
        self._calls: list[tuple[str, S, int, float, tuple[S, SyncDecision]]] = []
        self.kept_pushes = 0

    def init(self, workers: int, now: float = 0.0) -> S:
        self._counts = dict.fromkeys(range(workers), 0)
        self._running = set(self._counts)
        return self._inner.init(workers, now)

    def push(self, state: S, worker: int, now: float) -> tuple[S, SyncDecision]:
        self._running.remove(worker)
        self._kept.add(worker)
        self._counts[worker] += 1
        after, decision = self._call("push", state, worker, now)
        _require(
            self._inner.keeps_pushes or decision.aggregate == (worker,),
            f"the push of worker {worker} was answered by {decision!r}: keeps_pushes must be True",
        )
        self.kept_pushes += worker not in decision.aggregate
        return after, decision

    def finish(self, state: S, worker: int, now: float) -> tuple[S, SyncDecision]:
        self._running.discard(worker)
        del self._counts[worker]
        return self._call("finish", state, worker, now)

    def join(self, state: S, worker: int, now: float) -> tuple[S, SyncDecision]:
        self._kept.discard(worker)
        self._counts[worker] = min(self._counts.values(), default=0)
        return self._call("join", state, worker, now)

    def _call(self, name: str, state: S, worker: int, now: float) -> tuple[S, SyncDecision]:
        transition = partial(_transition(self._inner, name), state, worker, now)
        after, decision = _unchanged(name, state, transition)
        self._calls.append((name, state, worker, now, (after, decision)))
        self._check(f"after {name} of worker {worker}, {decision!r}", decision)
        return after, decision

    def _check(self, shown: str, decision: SyncDecision) -> None:
        aggregate, release = set(decision.aggregate), set(decision.release)
        for ranks in decision:
            _require(
                isinstance(ranks, tuple) and list(ranks) == sorted(set(ranks)),
                f"{shown} must hold tuples of different ranks in order",
            )
        _require(aggregate <= self._kept, f"{shown} must aggregate kept pushes {self._kept} only")
        self._kept -= aggregate
        if aggregate >= self._counts.keys():
            self._counts = dict.fromkeys(self._counts, 0)
        waiting = self._counts.keys() - self._running
        _require(release <= waiting, f"{shown} must release waiting workers {waiting} only")
        _require(not release & self._kept, f"{shown} must not release workers with kept pushes")
        self._running |= release
        for worker in release:
            lead = self._counts[worker] - min(self._counts.values())
            _require(
                lead <= self._max_lead,
                f"{shown} must keep leads within {self._max_lead}, got {lead} for worker {worker}",
            )
        _require(bool(self._running) or not self._counts, f"{shown} leaves all workers waiting")

    def check_replay(self) -> None:
        """Checks that a copy decides the same from the middle of the run on."""
        _require(pickle.dumps(self._inner) == self._pickled, f"a call changed {self._inner!r}")
        calls = self._calls[len(self._calls) // 2 :]
        twin, state = pickle.loads(pickle.dumps((self._inner, calls[0][1])))
        for name, _, worker, now, expected in calls:
            again = _transition(twin, name)(state, worker, now)
            _require(
                again == expected,
                f"{self._inner!r} must decide the same from the same events, got {again[1]!r} "
                f"after {expected[1]!r} at {name} of worker {worker} of a replay",
            )
            state = again[0]


def _transition(
    synchroniser: Synchroniser[S], name: str
) -> Callable[[S, int, float], tuple[S, SyncDecision]]:
    methods = {
        "push": synchroniser.push,
        "finish": synchroniser.finish,
        "join": synchroniser.join,
    }
    return methods[name]


def _noisy_seconds(source: random.Random) -> Callable[[int, int], float]:
    """Returns busy times of unequal workers with outliers; in half of the runs many are equal."""
    equal = source.random() < 0.5
    means = [source.choice((1.0, 1.0, 2.0, 3.5)) for _ in range(32)]

    def seconds(worker: int, iteration: int) -> float:
        noise = source.choice((1.0, 1.0, 2.0)) if equal else source.uniform(0.8, 1.3)
        return means[worker % 32] * noise * (10.0 if source.random() < 0.02 else 1.0)

    return seconds


def _changes(source: random.Random, workers: int) -> Iterator[Change]:
    """Yields workers that leave, sometimes until none is active, and join, some of them new."""
    active, time, known = set(range(workers)), 0.0, workers
    for _ in range(40):
        time += source.choice((0.0, 0.5, 3.0))
        if active and source.random() < 0.5:
            worker = source.choice(sorted(active))
            active.remove(worker)
            yield Change(time, worker)
        else:
            worker = source.choice(sorted(set(range(known + 1)) - active))
            active.add(worker)
            known = max(known, worker + 1)
            yield Change(time, worker, joins=True)


def _check_all_enter(
    synchroniser: Synchroniser, seconds: Callable[[int, int], float], workers: int
) -> None:
    """Checks that no push is lost of workers that leave after their last iteration."""
    run = schedule(synchroniser, seconds, workers=workers, iterations=15)
    _require(len(run.update) == 15 * workers, f"{synchroniser!r} must let all workers finish")
    lost = int((run.update < 0).sum())
    _require(
        not lost,
        f"{synchroniser!r} must aggregate every push, but {lost} of them never entered the model",
    )


def _check_refusals(synchroniser: Synchroniser) -> None:
    start = synchroniser.init(2)
    departed, _ = synchroniser.finish(start, 1, 1.0)
    state, decision = start, SyncDecision(release=(0,))
    for push in range(50):  # until worker 0 waits for worker 1, if it ever does
        if 0 in decision.release:
            state, decision = synchroniser.push(state, 0, 1.0 + push)
    cases = [("push", start, 2), ("push", start, -1), ("push", departed, 1)]
    cases += [("finish", departed, 1), ("finish", start, 2), ("join", start, 1), ("join", start, 3)]
    if 0 not in decision.release:
        cases.append(("push", state, 0))
    for name, before, worker in cases:
        try:
            _transition(synchroniser, name)(before, worker, 100.0)
        except ValueError:
            continue
        raise AssertionError(f"{synchroniser!r} must refuse to {name} worker {worker} in {before}")
