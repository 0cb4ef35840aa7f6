"""Waiting and speed-up of steps, against closed forms and the definition by NumPy."""

from dataclasses import replace

import numpy as np
import pytest

from lbbsp_core import SingleWorker
from lbbsp_core.runtime.loop.running_step import Left
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.record.figures import RECENT, Figures, RunningFigures, figures_of
from lbbsp_core.runtime.record.record import StepLine

SPEEDS = (4.0, 2.0, 1.0)  # samples per second


def line(step, sizes, speeds=SPEEDS, **changes):
    busy = tuple(x / speed for x, speed in zip(sizes, speeds, strict=True))
    made = StepLine(
        step=step,
        sizes=tuple(sizes),
        busy_seconds=busy,
        predicted_seconds=(None,) * len(sizes),
        wall_seconds=max(busy) + 0.1,
        excluded=(),
    )
    return replace(made, **changes)


def test_a_balanced_step_gains_what_the_speeds_allow():
    waiting, speedup = figures_of([line(0, (16, 8, 4))])
    assert waiting == 0
    assert speedup == pytest.approx((28 / 3 / 1) / 4)  # even batches on the slowest, over 4 s


def test_even_batches_gain_nothing_and_make_others_wait():
    waiting, speedup = figures_of([line(0, (4, 4, 4))])
    assert waiting == pytest.approx((3 + 2 + 0) / (3 * 4))
    assert speedup == pytest.approx(1)


def test_several_steps_are_ratios_of_sums():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 20, (30, 3))
    speeds = rng.uniform(1, 5, (30, 3))
    busy = sizes / speeds
    even = (1 / speeds).max(axis=1) * sizes.sum(axis=1) / 3
    expected = (
        (busy.max(axis=1)[:, None] - busy).sum() / (3 * busy.max(axis=1).sum()),
        even.sum() / busy.max(axis=1).sum(),
    )
    lines = [line(k, sizes[k].tolist(), speeds[k]) for k in range(30)]
    assert figures_of(lines) == pytest.approx(expected)
    running = RunningFigures()
    for each in lines:
        running.add(each)
    assert running.epoch == pytest.approx(expected)
    assert running.recent == pytest.approx(figures_of(lines[-RECENT:]))


def test_irregular_steps_count_only_if_there_are_no_others():
    odd, regular = line(0, (4, 4, 4), excluded=(1,)), line(1, (16, 8, 4))
    assert figures_of([odd, regular]) == figures_of([regular])
    running = RunningFigures()
    assert running.recent == running.epoch == Figures(0.0, 1.0)
    running.add(odd)
    assert running.recent == running.epoch == figures_of([odd])
    running.add(regular)
    running.add(replace(odd, step=2))
    assert running.recent == running.epoch == figures_of([regular])
    running.begin_epoch()
    assert running.epoch == running.recent, "until the epoch has a step"
    running.add(odd)
    assert running.epoch == figures_of([odd])


def test_known_work_counts_instead_of_samples():
    known = line(0, (4, 4, 4), work=(16.0, 8.0, 4.0), busy_seconds=(4.0, 4.0, 4.0))
    assert figures_of([known]) == pytest.approx((0.0, (28 / 3) / 4))


def test_a_recorded_estimate_of_even_batches_counts_instead_of_proportional_times():
    assert figures_of([line(0, (16, 8, 4), even_seconds=6.0)]).speedup == pytest.approx(6 / 4)


def test_without_measurements_there_are_no_figures():
    assert figures_of([line(0, (4, 4, 4), busy_seconds=(0.0,) * 3)]) is None
    assert figures_of([line(0, (0, 4, 4))]).speedup > 0


def test_observers_get_what_is_added_and_the_time_at_the_end_of_the_step():
    session = WorkerSession(SingleWorker(), 8, SessionOptions(), framework="none")
    seen = []
    session.observers.append(seen.append)
    session.start({})
    session.request_stop()
    for time in (5.0, 7.0):
        session.after_allreduce([session.before_allreduce()], Left(1.0, time))
    assert [(each.time, each.stop) for each in seen] == [(5.0, "requested"), (7.0, None)]
