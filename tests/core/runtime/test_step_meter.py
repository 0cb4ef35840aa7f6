"""What a worker measures of its steps, by a clock that advances by 1 s at each reading."""

from itertools import count
from types import SimpleNamespace

import pytest

from lbbsp_core.measure import BusyTimer, OverlapTimer
from lbbsp_core.runtime.planning import running_step
from lbbsp_core.runtime.planning.running_step import StepMeter


@pytest.fixture
def meter(monkeypatch):
    ticks = count(0, 1_000_000_000)
    monkeypatch.setattr(running_step, "BusyTimer", lambda: BusyTimer(clock=lambda: next(ticks)))
    return StepMeter()


def test_busy_until_the_barrier_and_wall_to_its_end(meter):
    assert meter.reach().busy_seconds == 1
    assert meter.leave().wall_seconds == 2
    assert meter.reach().busy_seconds == 1


def test_waits_are_not_busy_time_however_they_overlap(meter):
    with meter.excluded_wait(), meter.excluded_wait():  # the inner one reads no clock
        pass
    assert meter.reach().busy_seconds == 2  # 3 s since the start, 1 s of them waiting


def test_waits_hide_no_communication(meter, monkeypatch):
    seconds = [0]
    timer = OverlapTimer(clock=lambda: seconds[0] * 1_000_000_000)
    monkeypatch.setattr(meter, "overlap", timer)
    timer.begin()
    with meter.excluded_wait():
        seconds[0] = 4
    seconds[0] = 5
    assert meter.reach().hidden_seconds == 1


def test_short_steps_share_a_sample(meter, monkeypatch):
    class Sampler:
        def __init__(self, names, gpu):
            self.sample = map(lambda number: (number,), count()).__next__
            self.close = list

    now = [100.0]
    monkeypatch.setattr(running_step, "ResourceSampler", Sampler)
    monkeypatch.setattr(running_step, "time", SimpleNamespace(monotonic=lambda: now[0]))
    meter.open(())
    taken = []
    for seconds in (0.0, 0.012, 0.012, 0.012, 0.03):
        now[0] += seconds
        taken.append(meter.reach().drivers)
    assert taken == [(0,), (0,), (1,), (1,), (2,)]
    meter.close()
    assert meter.reach().drivers == ()


def test_a_wait_that_a_failed_step_did_not_end_is_forgotten(meter):
    meter.begin_wait()
    meter.close()
    meter.leave()
    with meter.excluded_wait():
        pass
    assert meter.reach().busy_seconds == 2


def test_a_step_is_excluded_once(meter):
    assert [meter.take_excluded(), meter.take_excluded()] == [True, False]
    meter.exclude_step()
    assert [meter.take_excluded(), meter.take_excluded()] == [True, False]


def test_an_excluded_step_restarts_the_clock_and_another_does_not(meter):
    meter.begin_step(0)  # the first one is excluded
    assert meter.reach().busy_seconds == 1
    meter.take_excluded()
    meter.begin_step(0)
    assert meter.reach().busy_seconds == 2


def test_resources_are_sampled_while_it_is_open(meter):
    assert (meter.names, meter.reach().drivers) == ((), ())
    meter.open(("runnable", "memory_percent"))
    assert meter.names == ("runnable", "memory_percent")
    assert len(meter.reach().drivers) == 2
    meter.close()
    assert meter.reach().drivers == ()
