"""Contracts that every predictor, policy and synchroniser keeps, and fakes: ours, and yours.

A new one joins with one line::

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
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial, reduce
from itertools import islice
from typing import Any

import numpy as np

from lbbsp_core.cost import Affine, Cost
from lbbsp_core.policy import BatchConstraints, Observation, Policy, Sizes
from lbbsp_core.predict import Predictor
from lbbsp_core.runtime.balancer import Balancer
from lbbsp_core.runtime.protocol import WIDTH, Row, StepMessage, decode, encode
from lbbsp_core.sim.events import Change, play, schedule
from lbbsp_core.sync import SyncDecision, Synchroniser
from lbbsp_core.types import Limits, Measurement

_SCALES = (1e-3, 1.0, 1e6)  # samples per second: a large model on a CPU, and a tiny one on a GPU
_HORIZONS = (1, 2, 3, 8)
_SLACK = 64  # bytes by which a pickled state may grow: counters get longer

# Contracts


def check_predictor(
    predictor: Predictor, *, drivers: int = 0, arrays: bool = False, updates: int = 2000
) -> None:
    """Checks the contract of `Predictor`.

    That it is a frozen value which compares, hashes, pickles and prints its parameters; that
    `init`, `update` and `predict` change neither it nor a state; that a pickled state replays
    to the same bits; that predictions are NaN before the first update, then finite and > 0 at
    any horizon, over jumps, outliers and constant stretches; that a state does not grow.

    Args:
        predictor: The one to check.
        drivers: Driving factors in each measurement.
        arrays: Whether it also takes arrays of shape ``(workers,)``, elementwise.
        updates: Length of the series over which a state may not grow; its first half is for
            filling windows.

    Raises:
        AssertionError: Saying what is broken, and by which value.

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

    That it is a frozen value which compares, hashes, pickles and prints its parameters; that
    `init` and `update` give plans of the global batch size, within limits and granularity,
    whatever is observed: costs unknown, ranks held, plans of earlier and of short steps; that
    neither changes the policy or a state; that the same observations give the same plans, also
    from a state that was kept as JSON; that a state does not grow.

    Args:
        policy: The one to check.
        clusters: What to plan for; by default several, of 1 to 4 workers.
        steps: Observations for each cluster.

    Raises:
        AssertionError: Saying what is broken, and by which plan.

    Example:
        >>> from lbbsp_core import LoadBalanced
        >>> check_policy(LoadBalanced(min_gain=0.0))
    """
    _check_value(policy)
    uses_costs = getattr(policy, "uses_costs", None)
    _require(isinstance(uses_costs, bool), f"uses_costs must be True or False, got {uses_costs!r}")
    for seed, cluster in enumerate(clusters or _CLUSTERS):
        before = pickle.dumps(policy)
        states, observations = _run_policy(policy, cluster, random.Random(seed), steps)
        _require(pickle.dumps(policy) == before, f"init or update changed {policy!r} itself")
        _check_policy_replay(policy, cluster, states, observations)
        _check_policy_states(policy, states)


def check_plan(sizes: Sizes, cluster: BatchConstraints) -> None:
    """Checks that `sizes` is a plan of `cluster`: sum, limits and granularity kept.

    Raises:
        AssertionError: Naming the constraint and the plan.
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
        most = math.inf if bounds.maximum is None else bounds.maximum
        _require(bounds.minimum <= size <= most, f"{shown} must keep {bounds}")
    odd = sum(size % cluster.granularity != 0 for size in sizes)
    _require(
        odd <= (cluster.global_batch_size % cluster.granularity != 0),
        f"{shown} must be in multiples of {cluster.granularity}, but for one worker's remainder",
    )


def check_synchroniser(
    synchroniser: Synchroniser, *, max_lead: float = math.inf, pushes: int = 200
) -> None:
    """Checks the contract of `Synchroniser`, in virtual time.

    That it is a frozen value which compares, hashes, pickles and prints its parameters; that no
    call changes it or a state; that the same events give the same decisions, also from a
    pickled state; that somebody runs whenever somebody is there (nobody waits for ever), workers
    that leave and join included; that every push enters the model once, and before its worker
    goes on; that nobody begins an iteration too far ahead; that events which cannot be are
    refused.

    Args:
        synchroniser: The one to check.
        max_lead: The greatest lead over the slowest worker with which an iteration may begin,
            counted in iterations since the last barrier (an update from everybody's gradients).
        pushes: For each cluster, of 1 to 7 workers.

    Raises:
        AssertionError: Saying what is broken, and by which decision.

    Example:
        >>> from lbbsp_core import SSP
        >>> check_synchroniser(SSP(3), max_lead=3)
    """
    _check_value(synchroniser)
    for seed in range(8):
        source, workers = random.Random(seed), (1, 2, 3, 7)[seed % 4]
        watch = _Watch(synchroniser, max_lead)
        changes = _changes(source, workers) if seed >= 2 else ()
        played = play(watch, _unsteady(source), workers=workers, changes=changes)
        deque(islice(played, pushes), maxlen=0)
        watch.check_replay()
        _check_all_enter(synchroniser, _unsteady(source), workers)
    _check_refusals(synchroniser)


# Fakes


class FakeClock:
    """Nanoseconds that pass only when told to, for `BusyTimer` and its like.

    Args:
        nanoseconds: Where it begins.

    Example:
        >>> clock = FakeClock()
        >>> clock.advance(1.5)
        >>> clock()
        1500000000
    """

    def __init__(self, nanoseconds: int = 0) -> None:
        self._now = nanoseconds

    def __call__(self) -> int:
        """The time, in nanoseconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Lets time pass; a negative time is a clock that steps back."""
        self._now += round(seconds * 1e9)


def exchange_in_process(
    balancers: Sequence[Balancer],
    busy_seconds: Sequence[float],
    wall_seconds: float | None = None,
    *,
    excluded: Collection[int] = (),
    stop: Collection[int] = (),
    drivers: Sequence[tuple[float, ...]] | None = None,
) -> tuple[StepMessage, ...]:
    """One step of several balancers in one process, as a framework's all-reduce does it.

    Each worker's message becomes a row of a float32 array that is zero elsewhere; their sum is
    what all receive.

    Args:
        balancers: All workers', by rank.
        busy_seconds: What each measured, by rank.
        wall_seconds: From barrier to barrier; by default the slowest worker's busy seconds.
        excluded: Ranks that hold this step.
        stop: Ranks that ask to stop.
        drivers: Driving factors of each worker's next step, by rank.

    Returns:
        The messages that all received, by rank.

    At their first step they meet (`Balancer.meet`).

    Example:
        >>> both = [Balancer(rank=i, workers=2, global_batch_size=12) for i in (0, 1)]
        >>> messages = exchange_in_process(both, [0.1, 0.2])
        >>> [balancer.sizes(1) for balancer in both]
        [(8, 4), (8, 4)]
    """
    if wall_seconds is None:
        wall_seconds = max((busy for busy in busy_seconds if 0 < busy < math.inf), default=0.0)
    if balancers[0].step == 0:
        peer_info = [balancer.static_info() for balancer in balancers]
        for balancer in balancers:
            balancer.set_peers(peer_info)
    slots = []
    for rank, (balancer, busy) in enumerate(zip(balancers, busy_seconds, strict=True)):
        known = drivers[rank] if drivers else ()
        message = balancer.report(busy, excluded=rank in excluded, stop=rank in stop, drivers=known)
        slots.append(_one_hot(rank, len(balancers), encode(message)))
    rows = reduce(np.add, slots)
    messages = tuple(decode(row) for row in rows)
    for balancer in balancers:
        balancer.receive(messages, wall_seconds)
    return messages


def _one_hot(rank: int, workers: int, row: Row) -> Row:
    slots = np.zeros((workers, WIDTH), np.float32)
    slots[rank] = row
    return slots


# Parts of the contracts


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _unchanged(what: str, thing: Any, call: Callable[[], Any]) -> Any:
    """The result of `call`, which must leave `thing` as it is."""
    before = pickle.dumps(thing)
    result = call()
    _require(pickle.dumps(thing) == before, f"{what} changed the state it was given")
    return result


def _check_value(thing: Any) -> None:
    """A frozen dataclass: it compares, hashes, pickles and prints."""
    name = type(thing).__name__
    frozen = getattr(getattr(thing, "__dataclass_params__", None), "frozen", False)
    _require(frozen, f"{name} must be a frozen dataclass")
    twin = pickle.loads(pickle.dumps(thing))
    _require(twin == thing, f"{thing!r} must equal its pickled copy {twin!r}")
    _require(hash(twin) == hash(thing), f"{thing!r} must hash like its pickled copy")
    for field in dataclasses.fields(thing):
        shown = f"{field.name}={getattr(thing, field.name)!r}"
        _require(shown in repr(thing), f"repr must show {shown}, got {thing!r}")


def _series(length: int, seed: int, scale: float, drivers: int = 0) -> Iterator[Measurement]:
    """Speeds around `scale`: noise, new levels, outliers both ways, and a constant stretch."""
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
    """No call changes the predictor or the state, and predictions do not matter to learning."""
    itself = pickle.dumps(predictor)
    state = silent = predictor.init()
    for measurement in series:
        ask = _asking(predictor, state, measurement.drivers)
        first, second = _unchanged("predict", state, ask), ask()
        _require(_same(first, second), f"predict gave {first!r}, then {second!r}: it is not pure")
        state = _unchanged("update", state, _telling(predictor, state, measurement))
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
        replay_trace, _ = _drive(again, pickle.loads(pickled), series[half:])
        for step, (old, new) in enumerate(zip(expected, replay_trace, strict=True)):
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
    predictor: Predictor, state: Any, series: Sequence[Measurement]
) -> tuple[list[Any], Any]:
    """Predictions before each update, and the last state."""
    predictions = []
    for measurement in series:
        predictions.append(predictor.predict(state, measurement.drivers))
        state = predictor.update(state, measurement)
    return predictions, state


def _asking(predictor: Predictor, state: Any, drivers: tuple[float, ...]) -> Callable[[], Any]:
    return lambda: predictor.predict(state, drivers, 2)


def _telling(predictor: Predictor, state: Any, measurement: Measurement) -> Callable[[], Any]:
    return lambda: predictor.update(state, measurement)


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=True))


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


def _run_policy(
    policy: Policy, cluster: BatchConstraints, source: random.Random, steps: int
) -> tuple[list[Any], list[Observation]]:
    """Lets `policy` run in a loop; returns its states, the first included, and what it saw."""
    states, observations = [policy.init(cluster)], []
    check_plan(states[0].sizes, cluster)
    speeds = [source.uniform(10.0, 100.0) for _ in cluster.limits]
    for step in range(steps):
        speeds = [v * source.choice((0.4, 2.5)) if source.random() < 0.1 else v for v in speeds]
        served = states[max(0, len(states) - source.randint(1, 3))].sizes
        seen = _observe(source, step, served, speeds)
        state = states[-1]
        states.append(_unchanged("update", state, _deciding(policy, state, cluster, seen)))
        check_plan(states[-1].sizes, cluster)
        observations.append(seen)
    return states, observations


def _observe(
    source: random.Random, step: int, served: Sizes, speeds: Sequence[float]
) -> Observation:
    """A step of `served`, or a short one, in which some or all workers may know nothing."""
    if source.random() < 0.1:
        served = tuple(max(1, size // 2) for size in served)
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
        for rank, (curve, size) in enumerate(zip(curves, served, strict=True))
    )
    return Observation(step, served, busy, excluded, costs, last_of_epoch=source.random() < 0.2)


def _check_policy_states(policy: Policy, states: Sequence[Any]) -> None:
    half = max(len(pickle.dumps(state)) for state in states[: len(states) // 2])
    late = max(len(pickle.dumps(state)) for state in states)
    allowed = half + _SLACK * len(states[0].sizes)
    _require(late <= allowed, f"the state of {policy!r} must stay small: {half}, {late} bytes")


def _restored(state: Any) -> Any:
    """Through JSON, as a checkpoint may keep it."""
    return type(state)(*_tuples(json.loads(json.dumps(state))))


def _tuples(value: Any) -> Any:
    """Lists, as JSON has them, back to tuples, all the way down."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _deciding(
    policy: Policy, state: Any, cluster: BatchConstraints, seen: Observation
) -> Callable[[], Any]:
    return lambda: policy.update(state, cluster, seen)


def _check_policy_replay(
    policy: Policy,
    cluster: BatchConstraints,
    states: Sequence[Any],
    observations: Sequence[Observation],
) -> None:
    twin = pickle.loads(pickle.dumps(policy))
    for begin in (0, len(observations) // 2):
        state = twin.init(cluster) if not begin else _restored(states[begin])
        for seen, expected in zip(observations[begin:], states[begin + 1 :], strict=True):
            state = twin.update(state, cluster, seen)
            _require(
                state.sizes == expected.sizes,
                f"{policy!r} must decide the same from the same observations, got {state.sizes} "
                f"after {expected.sizes} at step {seen.step} of a replay",
            )


class _Watch:
    """A synchroniser that passes everything on to another one, and looks at what it decides."""

    def __init__(self, inner: Synchroniser, max_lead: float) -> None:
        self._inner, self._max_lead = inner, max_lead
        self._itself = pickle.dumps(inner)
        self._counts: dict[int, int] = {}  # of who is there: pushes since the last barrier
        self._running: set[int] = set()
        self._kept: set[int] = set()  # pushed, and not in the model
        self._calls: list[tuple[str, Any, int, float, Any]] = []

    def init(self, workers: int, now: float = 0.0) -> Any:
        self._counts = dict.fromkeys(range(workers), 0)
        self._running = set(self._counts)
        return self._inner.init(workers, now)

    def push(self, state: Any, worker: int, now: float) -> tuple[Any, SyncDecision]:
        self._running.remove(worker)
        self._kept.add(worker)
        self._counts[worker] += 1
        return self._call("push", state, worker, now)

    def finish(self, state: Any, worker: int, now: float) -> tuple[Any, SyncDecision]:
        self._running.discard(worker)
        del self._counts[worker]
        return self._call("finish", state, worker, now)

    def join(self, state: Any, worker: int, now: float) -> tuple[Any, SyncDecision]:
        self._kept.discard(worker)
        self._counts[worker] = min(self._counts.values(), default=0)
        return self._call("join", state, worker, now)

    def _call(self, name: str, state: Any, worker: int, now: float) -> tuple[Any, SyncDecision]:
        bound = partial(getattr(self._inner, name), state, worker, now)
        after, decision = _unchanged(name, state, bound)
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
        _require(bool(self._running) or not self._counts, f"{shown} leaves everybody waiting")

    def check_replay(self) -> None:
        """The same events again, from the middle of the run."""
        _require(pickle.dumps(self._inner) == self._itself, f"a call changed {self._inner!r}")
        calls = self._calls[len(self._calls) // 2 :]
        twin, state = pickle.loads(pickle.dumps((self._inner, calls[0][1])))
        for name, _, worker, now, expected in calls:
            again = getattr(twin, name)(state, worker, now)
            _require(
                again == expected,
                f"{self._inner!r} must decide the same from the same events, got {again[1]!r} "
                f"after {expected[1]!r} at {name} of worker {worker} of a replay",
            )
            state = again[0]


def _unsteady(source: random.Random) -> Callable[[int, int], float]:
    """Workers of different speeds, with outliers; in half of the runs often at the same time."""
    even = source.random() < 0.5
    paces = [source.choice((1.0, 1.0, 2.0, 3.5)) for _ in range(32)]

    def seconds(worker: int, iteration: int) -> float:
        noise = source.choice((1.0, 1.0, 2.0)) if even else source.uniform(0.8, 1.3)
        return paces[worker % 32] * noise * (10.0 if source.random() < 0.02 else 1.0)

    return seconds


def _changes(source: random.Random, workers: int) -> Iterator[Change]:
    """Leaves, some of them of everybody, and joins, some of them of new workers."""
    there, time, known = set(range(workers)), 0.0, workers
    for _ in range(40):
        time += source.choice((0.0, 0.5, 3.0))
        if there and source.random() < 0.5:
            worker = source.choice(sorted(there))
            there.remove(worker)
            yield Change(time, worker)
        else:
            worker = source.choice(sorted(set(range(known + 1)) - there))
            there.add(worker)
            known = max(known, worker + 1)
            yield Change(time, worker, joins=True)


def _check_all_enter(
    synchroniser: Synchroniser, seconds: Callable[[int, int], float], workers: int
) -> None:
    """Of workers that leave when they have done their iterations, no push is lost."""
    run = schedule(synchroniser, seconds, workers=workers, iterations=15)
    _require(len(run.update) == 15 * workers, f"{synchroniser!r} must let everybody finish")
    lost = int((run.update < 0).sum())
    _require(not lost, f"{synchroniser!r} must aggregate every push, but {lost} of them never were")


def _check_refusals(synchroniser: Synchroniser) -> None:
    start = synchroniser.init(2)
    gone, _ = synchroniser.finish(start, 1, 1.0)
    state, decision = start, SyncDecision(release=(0,))
    for push in range(50):  # until worker 0 waits for worker 1, if it ever does
        if 0 in decision.release:
            state, decision = synchroniser.push(state, 0, 1.0 + push)
    cases = [("push", start, 2), ("push", start, -1), ("push", gone, 1)]
    cases += [("finish", gone, 1), ("finish", start, 2), ("join", start, 1), ("join", start, 3)]
    if 0 not in decision.release:
        cases.append(("push", state, 0))
    for name, before, worker in cases:
        try:
            getattr(synchroniser, name)(before, worker, 100.0)
        except ValueError:
            continue
        raise AssertionError(f"{synchroniser!r} must refuse to {name} worker {worker} in {before}")
