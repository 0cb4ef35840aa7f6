"""Schedules of the neighbours of workers, and their account of CPU time; starts no process."""

from __future__ import annotations

import json
import math
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core.cli.contention import COLUMN, parse_contention
from lbbsp_core.launch import Phase, contention, launch
from lbbsp_core.launch._neighbour import CYCLE_SECONDS, Account, Demand
from lbbsp_core.launch.contention import Place, bursty, check_contention, own_cores, places
from lbbsp_core.launch.contention import replayed as replay
from lbbsp_core.launch.cpu_shares import schedule

TRACES = Path(__file__).parents[3] / "traces"
some_phases = st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0.0, 1.0)), min_size=1, max_size=6)


# The account


@given(some_phases, st.floats(0.0, 20.0))
def test_demand_is_the_integral_of_the_repeated_schedule(phases, seconds):
    left, expected = seconds, 0.0
    while left > 0:
        for duration, demand in phases:
            expected += min(duration, left) * demand
            left = max(left - duration, 0.0)
    assert Demand(phases).until(seconds) == pytest.approx(expected, abs=1e-9)


def use(account: Account, seconds: float, available: float, started: float = 0.0) -> float:
    """Runs a neighbour that gets ``available`` of a core; returns the CPU seconds it has used."""
    used = 0.0
    for cycle in range(round(seconds / CYCLE_SECONDS)):
        goal = account.goal(started + cycle * CYCLE_SECONDS, used)
        used = max(used, min(goal, used + available * CYCLE_SECONDS))
    return used


@given(some_phases, st.floats(0.05, 1.0))
def test_alone_it_uses_what_is_asked(phases, share):
    used = use(Account(phases, [(0.0, share)], 100.0), 10.0, 1.0, started=100.0)
    assert used == pytest.approx(share * Demand(phases).until(10.0), abs=1e-6)


def test_beside_a_worker_it_gets_its_part_of_the_core_and_owes_nothing_in_a_pause():
    account = Account([(1.0, 1.0), (1.0, 0.0)], [(0.0, 1.0)], 0.0)
    used = use(account, 10.0, 0.5)
    assert used == pytest.approx(5 * 0.5, abs=5 * CYCLE_SECONDS)
    account = Account([(10.0, 0.4)], [(0.0, 1.0)], 0.0)
    assert use(account, 10.0, 0.5) == pytest.approx(4.0)


def test_time_in_which_it_was_stopped_is_not_made_up_for():
    account = Account([(1.0, 0.5)], [(0.0, 1.0)], 0.0)
    account.goal(0.0, 0.0)
    assert account.goal(60.0, 0.0) == pytest.approx(CYCLE_SECONDS)


def test_it_follows_the_share_of_its_worker():
    account = Account([(1.0, 0.5)], [(0.0, 1.0), (5.0, 0.2)], 0.0)
    assert use(account, 10.0, 1.0) == pytest.approx(5 * 0.5 + 5 * 0.1, abs=CYCLE_SECONDS)


def test_each_neighbour_gets_its_own_demands(tmp_path):
    place = Place([Phase(1.0, (0.5,)), Phase(2.0), Phase(3.0, (0.25, 0.75))], ((2.0, 0.4),), (1,))
    assert place.neighbours == 2
    contents = []
    for number in range(place.neighbours):
        file = tmp_path / f"{number}.json"
        *_, name = place.command(number, file, started=70.0, job=10.0)
        assert name == str(file)
        contents.append(json.loads(file.read_text()))
    assert contents[0]["phases"] == [[1.0, 0.5], [2.0, 0], [3.0, 0.25]]
    assert contents[1]["phases"] == [[1.0, 0], [2.0, 0], [3.0, 0.75]]
    assert contents[0]["shares"] == [[12.0, 0.4]]
    account = Account(used=1.0, **contents[1])
    assert account.goal(73.5, 1.0) == pytest.approx(1.0 + 0.4 * CYCLE_SECONDS)  # 0.39 s are asked


# Where they run


@pytest.mark.parametrize(
    ("workers", "affinity", "quota", "expected"),
    [(2, {3, 5}, 2.0, [3, 5]), (1, {3, 5}, 2.0, [3]), (3, {3, 5}, 2.0, []), (2, {3, 5}, 1.5, [])],
)
def test_workers_have_a_core_each_if_there_are_enough(
    monkeypatch, workers, affinity, quota, expected
):
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda _: affinity)
    monkeypatch.setattr(contention, "available_cores", lambda: quota)
    assert own_cores(workers) == expected


def test_survivors_keep_their_core_schedule_and_share():
    schedules = [[Phase(1.0)], [Phase(2.0, (1.0,))]]
    plan = schedule([1, 0.5, 0.25], [(9, [1, 1, 1])], workers=3, cores=4).of([1, 2])
    first, second = places(schedules, [1, 2], plan, [4, 5, 6])
    assert (first.phases, first.cores) == (schedules[1], (5,))
    assert (second.phases, second.cores) == (schedules[0], (6,))
    assert second.shares == ((0.0, 0.25 * 0.95), (9.0, 0.95))
    assert places(schedules, [1], None, [])[0] == Place(schedules[1])


@pytest.mark.parametrize(
    ("schedules", "match"),
    [
        ([], "at least one schedule"),
        ([[Phase(1.0)], []], "at least one phase"),
        ([[Phase(0.0)]], "more than 0 seconds"),
        ([[Phase(math.inf)]], "more than 0 seconds"),
        ([[Phase(1.0, (1.2,))]], "demands from 0 to 1"),
        ([[Phase(1.0, (math.nan,))]], "demands from 0 to 1"),
        ([[Phase(1.0, (0.1,) * 5)]], "at most 4 neighbours"),
    ],
)
def test_invalid_schedules_are_refused(schedules, match):
    with pytest.raises(ValueError, match=match):
        check_contention(schedules)
    with pytest.raises(ValueError, match=match):
        launch([__file__], workers=1, contention=schedules)


# The schedules


def test_recorded_percents_are_divided_among_as_few_neighbours_as_can_use_them():
    phases = replay([(0.1, 0.0), (0.2, 30.0), (0.3, 100.0), (0.4, 130.0), (0.5, 9999.0)])
    assert [phase.seconds for phase in phases] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert [phase.demands for phase in phases] == [
        (), (0.3,), (1.0,), (0.65, 0.65), (1.0,) * 4,
    ]  # fmt: skip


def test_a_trace_is_replayed_in_its_own_time():
    schedules = parse_contention(str(TRACES / "contention_bursty.csv"), workers=9)
    assert len(schedules) == 4
    check_contention(schedules)
    assert schedules[1][0] == Phase(0.305388, ())
    assert sum(phase.seconds for phase in schedules[0]) == pytest.approx(143, abs=100)


def test_bursty_is_seeded_and_differs_between_workers():
    phases = bursty(1, seed=5)
    assert phases == bursty(1, seed=5)
    assert phases != bursty(1, seed=6)
    assert phases != bursty(2, seed=5)
    assert parse_contention("bursty:5", workers=3)[1] == phases
    assert parse_contention("bursty", workers=3)[1] == bursty(1)
    assert {phase.demands for phase in phases} == {(), (1.0,), (1.0, 1.0)}
    for kind, own in groupby(
        sorted(phases, key=lambda p: p.demands == ()), lambda p: p.demands == ()
    ):
        seconds = [phase.seconds for phase in own]
        assert 0.7 < sum(seconds) / len(seconds) < 4.5, kind
        assert len(seconds) > 300


def test_a_name_is_no_folder_of_that_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bursty").mkdir()  # of a run
    assert parse_contention("bursty", workers=3)[1] == bursty(1)


def test_dbs_disturbs_for_4_to_20_epochs():
    phases = [p for own in parse_contention("dbs:3:2.5", workers=8) for p in own]
    assert {phase.seconds for phase in phases} == {2.5}
    (demands,) = zip(*(phase.demands for phase in phases), strict=True)
    runs = [(value, len(list(run))) for value, run in groupby(demands)]
    slow = [length for value, length in runs if value]
    assert all(0.25 <= value <= 0.5 for value, _ in runs if value)
    assert min(slow) >= 4
    assert max(slow) <= 20
    # Healthy for 1 / 0.1 - 1 epochs in the mean (it may start in the next one), slow for 12.
    assert sum(slow) / len(demands) == pytest.approx(12 / 21, abs=0.05)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("bursty:x", "bursty: seed must be an integer, got 'x'"),
        ("bursty:-1", "seed must be an integer >= 0, got -1"),
        ("dbs:", "dbs: seed must be an integer, got ''"),
        ("dbs:0:0", "epoch_seconds must be from 0.1 to 3600, got 0"),
        ("dbs:0:soon", "dbs: epoch_seconds must be a number, got 'soon'"),
        ("missing.csv", "missing.csv: cannot be read as a CSV text file: No such file"),
        ("folder/missing", "missing: cannot be read as a CSV text file: No such file"),
        ("bursty:1:2", "bursty takes at most 1 options"),
        ("burst", "there is no contention 'burst': did you mean 'bursty'"),
        (str(TRACES / "pai_job_1.csv"), f"no column '{COLUMN}' among none"),
    ],
)
def test_invalid_options(text, match):
    with pytest.raises(ValueError, match=match):
        parse_contention(text, workers=2)
