"""The contract of all synchronisers, then the behaviour of each, in virtual time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import ASP, BSP, DSSP, SSP, ElasticBSP, SyncDecision, Synchroniser, registry
from lbbsp_core.sim import Schedule, schedule
from lbbsp_core.testing import check_synchroniser

SYNCHRONISERS: list[tuple[Synchroniser, float]] = [
    (BSP(), 0),
    (SSP(0), 0),
    (SSP(1), 1),
    (SSP(4), 4),
    (SSP(math.inf), math.inf),
    (ASP(), math.inf),
    (DSSP(0, 0), 0),
    (DSSP(0, 3), 3),
    (DSSP(2, 2), 2),
    (DSSP(3, 15), 15),
    (ElasticBSP(1), 0),
    (ElasticBSP(4), 3),
    (ElasticBSP(15, warmup=1), 14),
]


def test_no_synchroniser_of_the_registry_is_left_out() -> None:
    registered = {component.cls for component in registry.SYNCHRONISERS.values()}
    assert {type(synchroniser) for synchroniser, _ in SYNCHRONISERS} == registered


@pytest.mark.parametrize(("synchroniser", "max_lead"), SYNCHRONISERS, ids=repr)
def test_contract(synchroniser: Synchroniser, max_lead: float) -> None:
    assert isinstance(synchroniser, Synchroniser)
    check_synchroniser(synchroniser, max_lead=max_lead)


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Draws busy seconds, shape (workers, iterations): steady, noisy, or often equal."""
    workers, iterations = draw(st.integers(1, 6)), draw(st.integers(1, 25))
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    paces = source.choice([1.0, 1.5, 4.0], (workers, 1))
    kind = draw(st.sampled_from(["steady", "noisy", "equal"]))
    if kind == "steady":
        return np.repeat(paces, iterations, axis=1)
    if kind == "equal":
        return source.integers(1, 4, (workers, iterations)).astype(float)
    return paces * source.uniform(0.5, 2.0, (workers, iterations))


def same_times(one: Schedule, other: Schedule) -> bool:
    names = ("worker", "iteration", "start", "push", "release")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


# One is another


@given(tables())
def test_bsp_is_the_sum_of_maxima(seconds: np.ndarray) -> None:
    workers, iterations = seconds.shape
    run = schedule(BSP(), seconds)
    ends = np.cumsum(seconds.max(axis=0))
    assert run.total_seconds == ends[-1]
    assert np.array_equal(run.release.reshape(seconds.shape), np.tile(ends, (workers, 1)))
    assert run.updates == iterations
    assert not run.staleness.any()
    assert np.array_equal(run.update, run.iteration)
    waits = workers * ends[-1] - seconds.sum()
    assert run.waiting_seconds == pytest.approx(waits, abs=1e-9)


@given(tables())
def test_ssp_0_makes_bsps_schedule(seconds: np.ndarray) -> None:
    one = schedule(SSP(0), seconds)
    assert same_times(one, schedule(BSP(), seconds))
    assert one.updates == seconds.size


@given(tables())
def test_elastic_with_a_lookahead_of_one_is_bsp(seconds: np.ndarray) -> None:
    one, bsp = schedule(ElasticBSP(1), seconds), schedule(BSP(), seconds)
    for column, expected in zip(one, bsp, strict=True):
        assert np.array_equal(column, expected)


@given(tables())
def test_ssp_inf_is_asp_and_nobody_waits(seconds: np.ndarray) -> None:
    one, asp = schedule(SSP(math.inf), seconds), schedule(ASP(), seconds)
    for column, expected in zip(one, asp, strict=True):
        assert np.array_equal(column, expected)
    assert np.array_equal(asp.push.reshape(seconds.shape), np.cumsum(seconds, axis=1))
    assert np.array_equal(asp.release, asp.push)
    assert asp.updates == seconds.size


@given(tables())
def test_a_range_of_one_staleness_is_ssp(seconds: np.ndarray) -> None:
    for staleness in (0, 2):
        one, ssp = schedule(DSSP(staleness, staleness), seconds), schedule(SSP(staleness), seconds)
        assert same_times(one, ssp)
        assert np.array_equal(one.update, ssp.update)


# DSSP


def test_dssp_waits_less_than_ssp_of_its_lower_bound() -> None:
    source = np.random.default_rng(0)
    seconds = np.array([[1.0], [1.2], [2.9]]) * source.uniform(0.9, 1.1, (3, 300))
    seconds = lambda w, k, table=seconds: table[w, k % 300]  # noqa: E731
    runs = [schedule(s, seconds, workers=3, iterations=200) for s in (SSP(1), DSSP(1, 8), SSP(8))]
    assert runs[0].waiting_seconds > runs[1].waiting_seconds > runs[2].waiting_seconds


def decisions(
    synchroniser: Any, events: list[tuple[int, float]], workers: int
) -> list[SyncDecision]:
    state, decided = synchroniser.init(workers), []
    for worker, now in events:
        state, decision = synchroniser.push(state, worker, now)
        decided.append(decision)
    return decided


@pytest.mark.parametrize(("upper", "granted"), [(9, 5), (7, 2), (5, 1), (4, 0)])
def test_dssp_grants_the_push_nearest_to_one_of_the_slowest(upper: int, granted: int) -> None:
    """At 3.5 s the fast one is due every 0.5 s, the slow one at 4.3 s and 5.95 s.

    Nearest of 3.5, 4.0, ..., 6.0 is 6.0; of those up to 5.0 it is 4.5; of those up to 4.0 it
    is 4.0, with nothing left of the range.
    """
    slow = [(1, 1.0), (1, 2.65)]
    fast = [(0, 0.5 * push) for push in range(1, 13)]
    events = sorted(fast + slow, key=lambda event: event[1])
    releases = [d.release for d in decisions(DSSP(4, upper), events[: 9 + granted], 2)]
    assert releases[:8].count((0,)) == 6
    assert releases[8:] == [(0,)] * granted + [()]


def test_dssp_looks_on_both_sides_of_the_slowests_pushes() -> None:
    """The slow one is due at 4.25 s and 5.52 s: 5.5 s is nearest, the fourth from 3.5 s."""
    slow, fast = [(1, 1.71), (1, 2.98)], [(0, 0.5 * push) for push in range(1, 12)]
    events = sorted(fast + slow, key=lambda event: event[1])
    releases = [decision.release for decision in decisions(DSSP(4, 9), events[:13], 2)]
    assert releases[8:] == [(0,)] * 4 + [()]


def test_dssp_lets_the_next_one_be_the_fastest_when_the_fastest_has_left() -> None:
    gone = [0.11, 0.21, 0.31, 0.41, 1.1, 2.7, 3.2, 3.3]
    events = [(1, 1.0), (1, 2.65), *((0, 0.5 * push) for push in range(1, 7))]
    events = sorted([*events, *((2, now) for now in gone)], key=lambda event: event[1])
    state, dssp = DSSP(4, 9).init(3), DSSP(4, 9)
    for worker, now in events:
        state, _ = dssp.push(state, worker, now)
    _, behind = dssp.push(state, 0, 3.5)
    state, _ = dssp.finish(state, 2, 3.4)
    _, fastest = dssp.push(state, 0, 3.5)
    assert (behind.release, fastest.release) == ((), (0,))


def test_dssp_grants_nothing_without_an_interval() -> None:
    events = [(0, 0.5), (1, 1.0), (0, 1.0), (1, 1.0), (0, 1.5), (0, 2.0)]
    assert decisions(DSSP(1, 9), events, 2)[-1].release == ()


def test_dssp_grants_nothing_to_who_is_not_the_fastest() -> None:
    events = [(1, 1.0), (2, 1.0), (0, 4.0), (1, 5.0), (2, 5.0), (0, 8.0), (1, 9.0), (1, 10.0)]
    releases = [decision.release for decision in decisions(DSSP(0, 9), [*events, (2, 10.0)], 3)]
    assert releases[-3:] == [(1,), (1,), ()]


def test_dssp_without_two_pushes_of_both_is_ssp() -> None:
    assert [d.release for d in decisions(DSSP(1, 9), [(0, 1.0), (0, 2.0)], 2)] == [(0,), ()]


# ElasticBSP


def test_elastic_puts_barriers_where_all_meet() -> None:
    """2 s, 3 s and 6 s: from the second barrier on they meet every 6 s, without waiting."""
    run = schedule(
        ElasticBSP(3), lambda worker, _: (2.0, 3.0, 6.0)[worker], workers=3, iterations=30
    )
    slowest = run.worker == 2
    assert run.release[slowest][:5].tolist() == [6.0, 12.0, 18.0, 24.0, 30.0]
    elastic = (run.start >= 12.0) & (run.start < 30.0)
    assert np.array_equal(run.release[elastic], run.push[elastic])
    assert elastic.sum() == 3 * (3 + 2 + 1)
    # in 6 s: pushes at 2, 3, 4 of their own, then one update of all three
    assert sorted(run.update[(run.start >= 12.0) & (run.start < 18.0)]) == [2, 3, 4, 5, 5, 5]


def test_elastic_measures_from_release_to_push() -> None:
    """A wait of 8 s in the warm-up is not taken for slowness."""
    elastic = ElasticBSP(4, warmup=1)
    state = elastic.init(2)
    for worker, now in [(0, 1.0), (1, 9.0), (0, 10.0)]:
        state, decision = elastic.push(state, worker, now)
    assert [runner.interval for runner in state.runners] == [1.0, 9.0 - 0.0]
    assert decision == SyncDecision((0,), (0,))


def test_elastic_watches_twice_before_it_predicts() -> None:
    seconds = lambda worker, _: (1.0, 3.0)[worker]  # noqa: E731
    for warmup in (1, 2, 4):
        run = schedule(ElasticBSP(3, warmup), seconds, workers=2, iterations=20)
        first = run.iteration[(run.worker == 0) & (run.release == run.push)].min()
        assert first == warmup


# Leaving and joining


def test_a_barrier_does_not_wait_for_who_has_left() -> None:
    for synchroniser in (BSP(), ElasticBSP(3)):
        state = synchroniser.init(3)
        state, _ = synchroniser.push(state, 0, 1.0)
        state, _ = synchroniser.push(state, 1, 2.0)
        state, none = synchroniser.finish(state, 1, 2.5)  # what it has pushed, is kept
        _, decision = synchroniser.finish(state, 2, 3.0)
        assert none == SyncDecision()
        assert decision == SyncDecision((0, 1), (0,))


def test_ssp_releases_whom_only_the_leaver_held_back() -> None:
    for synchroniser in (SSP(1), DSSP(1, 1)):
        state = synchroniser.init(3)
        for worker in (0, 0, 1, 1):
            state, decision = synchroniser.push(state, worker, 1.0)
        assert decision.release == ()
        _, decision = synchroniser.finish(state, 2, 2.0)
        assert decision == SyncDecision((), (0, 1))


def test_a_joiner_takes_part_at_once() -> None:
    state = BSP().init(2)
    state, joined = BSP().join(state, 2, 0.5)
    state, _ = BSP().push(state, 0, 1.0)
    state, early = BSP().push(state, 1, 1.0)
    _, decision = BSP().push(state, 2, 2.0)
    assert (joined.release, early.release) == ((2,), ())
    assert decision == SyncDecision((0, 1, 2), (0, 1, 2))


# Options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SSP(-1), r"SSP\.staleness must be an integer >= 0, got -1"),
        (lambda: SSP(1.5), r"SSP\.staleness must be an integer >= 0, got 1\.5"),
        (lambda: SSP(math.nan), r"SSP\.staleness must be an integer >= 0, got nan"),
        (lambda: DSSP(-1, 2), r"DSSP\.lower must be an integer >= 0, got -1"),
        (lambda: DSSP(0, math.inf), r"DSSP\.upper must be an integer >= 0, got inf"),  # type: ignore[arg-type]
        (lambda: DSSP(3, 2), r"DSSP\.upper must be >= lower = 3, got 2"),
        (lambda: ElasticBSP(0), r"ElasticBSP\.lookahead must be an integer >= 1, got 0"),
        (lambda: ElasticBSP(2, 0), r"ElasticBSP\.warmup must be an integer >= 1, got 0"),
        (lambda: BSP().init(0), r"workers must be an integer >= 1, got 0"),
        (lambda: ElasticBSP().init(0), r"workers must be an integer >= 1, got 0"),
        (lambda: ElasticBSP().push(ElasticBSP().init(1), 0, math.nan), "now must be finite"),
        (lambda: DSSP(0, 1).push(DSSP(0, 1).init(1), 0, math.inf), "now must be finite"),
    ],
)
def test_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_cannot_be_names_the_cure() -> None:
    state, _ = BSP().push(BSP().init(2), 0, 1.0)
    with pytest.raises(ValueError, match=r"worker 0 pushed while it waits: .* releases it"):
        BSP().push(state, 0, 2.0)
    with pytest.raises(ValueError, match=r"worker 5 is not active .* let it join first"):
        BSP().push(state, 5, 2.0)
    with pytest.raises(ValueError, match=r"worker 4 cannot join: .* or have the next rank, 2"):
        BSP().join(state, 4, 2.0)


# The contract check itself: each of these synchronisers breaks the contract in one way.


@dataclass(frozen=True)
class Broken:
    """BSP, except for what an option or a subclass breaks."""

    keeps_pushes: ClassVar[bool] = True

    changed: dict[str, Any] = field(default_factory=dict, hash=False)
    """Parts of each decision that it replaces."""

    memory: list[int] = field(default_factory=list, hash=False)

    def init(self, workers: int, now: float = 0.0) -> Any:
        return BSP().init(workers, now)

    def push(self, state: Any, worker: int, now: float) -> Any:
        return self.change(*BSP().push(state, worker, now))

    def finish(self, state: Any, worker: int, now: float) -> Any:
        return BSP().finish(state, worker, now)

    def join(self, state: Any, worker: int, now: float) -> Any:
        return BSP().join(state, worker, now)

    def change(self, state: Any, decision: SyncDecision) -> Any:
        return state, decision._replace(**self.changed)


class Doubling(Broken):
    def change(self, state: Any, decision: SyncDecision) -> Any:
        return state, decision._replace(release=decision.release * 2)


class Remembering(Broken):
    def change(self, state: Any, decision: SyncDecision) -> Any:
        self.memory.append(0)
        return state, decision


class Fickle(Broken):
    def change(self, state: Any, decision: SyncDecision) -> Any:
        return (state, random.random()), decision

    def push(self, state: Any, worker: int, now: float) -> Any:
        return self.change(*BSP().push(state[0], worker, now))

    def init(self, workers: int, now: float = 0.0) -> Any:
        return BSP().init(workers, now), 0.0


class Trusting(Broken):
    def push(self, state: Any, worker: int, now: float) -> Any:
        try:
            return super().push(state, worker, now)
        except ValueError:
            return state, SyncDecision()


class Keeping(Broken):
    keeps_pushes: ClassVar[bool] = False


class Applying(Broken):
    """Aggregates every push on arrival, as SSP(0), and claims to keep some."""

    def push(self, state: Any, worker: int, now: float) -> Any:
        return SSP(0).push(state, worker, now)

    def finish(self, state: Any, worker: int, now: float) -> Any:
        return SSP(0).finish(state, worker, now)


class Immortal(Broken):
    def finish(self, state: Any, worker: int, now: float) -> Any:
        return state, SyncDecision()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Broken({"release": ()}), "leaves all workers waiting"),
        (Broken({"aggregate": ()}), "must not release workers with kept pushes"),
        (Broken({"aggregate": (0, 1)}), "must aggregate kept pushes"),
        (Doubling(), "different ranks in order"),
        (Remembering(), "a call changed"),
        (Fickle(), "must decide the same"),
        (Trusting(), "must refuse to push worker 2"),
        (Keeping(), "keeps_pushes must be True"),
        (Applying(), "aggregates every push on arrival: keeps_pushes must be False"),
        (Immortal(), "leaves all workers waiting"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_contract_finds_what_is_broken(broken: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_synchroniser(broken)


def test_the_contract_finds_too_great_a_lead() -> None:
    for synchroniser, lead in ((SSP(3), 3), (DSSP(1, 4), 4), (ElasticBSP(5), 4)):
        with pytest.raises(AssertionError, match=f"must keep leads within {lead - 1}, got {lead}"):
            check_synchroniser(synchroniser, max_lead=lead - 1)
