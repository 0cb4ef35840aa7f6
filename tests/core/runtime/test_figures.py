"""Waiting and speed-up of steps, against closed forms and the definition by NumPy."""

from dataclasses import replace

import numpy as np
import pytest
from report_runs import line as step_line
from worker_threads import run, step

from lbbsp_core import FixedShares, Profile, Proportional, SingleWorker
from lbbsp_core.runtime.extensions.step_figures import StepFigures
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.planning.running_step import Left
from lbbsp_core.runtime.record.even_batches import EvenBatches
from lbbsp_core.runtime.record.figures import (
    RECENT,
    Figures,
    RunningFigures,
    TimesSoFar,
    figures_of,
)

SPEEDS = (4.0, 2.0, 1.0)  # samples per second


def line(step, sizes, speeds=SPEEDS, overhead=0.0, **changes):
    busy = tuple(overhead + x / speed for x, speed in zip(sizes, speeds, strict=True))
    made = step_line(step, sizes, busy, max(busy) + 1.0, even_seconds=7.0)
    return replace(made, **changes)


def test_hidden_communication_is_beside_what_is_not_hidden():
    # Steps of 5 and 9 s: 1 and 5 s of communication are not hidden, 3 and 0 s are.
    steps = [
        line(0, (16, 8, 4), hidden_seconds=3.0),
        line(1, (16, 8, 4), wall_seconds=9.0),
        line(2, (16, 8, 4), hidden_seconds=4.0, excluded=(0,)),
    ]
    figures = figures_of(steps)
    assert figures.communication == pytest.approx(6 / 14)
    assert figures.hidden_communication == pytest.approx(3 / 14)
    assert figures.hidden_part == pytest.approx(3 / (3 + 6))
    assert figures.hides


def test_little_hidden_communication_is_not_shown():
    assert not figures_of([line(0, (16, 8, 4), hidden_seconds=0.04)]).hides
    alone = figures_of([line(0, (16, 8, 4), wall_seconds=4.0)])
    assert (alone.hidden_part, alone.hides) == (0.0, False)


def test_several_steps_are_ratios_of_sums():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 20, (30, 3))
    speeds = rng.uniform(1, 5, (30, 3))
    busy = sizes / speeds
    slowest = busy.max(axis=1)
    seconds, even, hidden = slowest + 1, rng.uniform(1, 9, 30), rng.uniform(0, 0.1, 30)
    expected = (
        (slowest[:, None] - busy).sum() / (3 * seconds.sum()),
        (seconds[:, None] - busy).sum() / (3 * seconds.sum()),
        (1 + even).sum() / seconds.sum(),
        hidden.sum() / seconds.sum(),
        (1 + 1.5 * even).sum() / seconds.sum(),
    )
    steps = [
        line(
            *(k, sizes[k], speeds[k]),
            even_seconds=float(even[k]),
            even_seconds_at_most=1.5 * float(even[k]),
            hidden_seconds=float(hidden[k]),
        )
        for k in range(30)
    ]
    assert figures_of(steps) == pytest.approx(expected)
    running, so_far = RunningFigures(), TimesSoFar()
    for each in steps:
        running.add(each)
        so_far.add(each)
    assert running.epoch == so_far.figures == pytest.approx(expected)
    assert running.recent == pytest.approx(figures_of(steps[-RECENT:]))


def test_irregular_steps_count_only_if_there_are_no_others():
    odd, regular = line(0, (4, 4, 4), excluded=(1,)), line(1, (16, 8, 4))
    assert figures_of([odd, regular]) == figures_of([regular])
    running = RunningFigures()
    assert running.recent == running.epoch == Figures(0.0, 0.0, 1.0)
    running.add(odd)
    assert running.recent == running.epoch == figures_of([odd])
    running.add(regular)
    running.add(replace(odd, step=2))
    assert running.recent == running.epoch == figures_of([regular])
    running.begin_epoch(4)
    running.add(replace(regular, step=3, even_seconds=9.0))
    assert running.epoch == running.recent, "until the epoch has a step"
    running.add(replace(odd, step=4))
    assert running.epoch == figures_of([odd])


def test_a_repeated_step_counts_once_and_other_workers_start_anew():
    so_far, steps = TimesSoFar(), [line(k, (4 + k, 4, 4)) for k in range(6)]
    for each in [*steps[:4], replace(steps[2], wall_seconds=99.0), *steps[2:]]:
        so_far.add(each)
    assert so_far.figures == pytest.approx(figures_of(steps))
    two = replace(line(6, (4, 4), SPEEDS[:2]))
    so_far.add(two)
    assert so_far.figures == pytest.approx(figures_of([two]))


def test_attempts_with_other_workers_that_were_repeated_do_not_count():
    so_far, steps = TimesSoFar(), [line(k, (4 + k, 4, 4)) for k in range(6)]
    fewer = [line(k, (4, 4), SPEEDS[:2]) for k in (2, 3)]
    for each in [*steps[:4], *fewer, *steps[2:]]:
        so_far.add(each)
    assert so_far.figures == pytest.approx(figures_of(steps))


def test_irregular_steps_separate_and_count_until_there_is_another_one():
    odd = [line(k, (4 + k, 4, 4), excluded=(1,)) for k in range(3)]
    fewer = line(3, (4, 4), SPEEDS[:2], short=True)
    so_far, steps = TimesSoFar(), [line(k, (16, 8, 4)) for k in range(4, 6)]
    for each, expected in zip(
        [*odd, fewer, *steps], (odd[:1], odd[:2], odd, [fewer], steps[:1], steps), strict=True
    ):
        so_far.add(each)
        assert so_far.figures == pytest.approx(figures_of(expected))


def test_without_measurements_there_are_no_figures():
    assert figures_of([line(0, (4, 4, 4), busy_seconds=(0.0,) * 3)]) is None
    assert figures_of([line(0, (0, 4, 4), even_seconds=None)]).speedup > 0
    assert TimesSoFar().figures is None


# Even batches: three workers with 28 samples; the slowest would need `overhead` + 28 / 3 seconds.

EVEN = 28 / 3


def even(steps, known=0.0, cost=Proportional, given=0.0):
    batches = EvenBatches([cost()] * 3, [given] * 3)
    return [batches.seconds(each, [known] * 3)[0] for each in steps]


def test_half_an_even_batch_of_overhead_is_believed_at_first():
    steps = [line(0, (16, 8, 4))]
    slow = 4 * (EVEN + EVEN / 2) / (4 + EVEN / 2)
    assert even(steps) == pytest.approx([slow])
    assert figures_of([replace(steps[0], even_seconds=None)]).speedup == pytest.approx(
        (1 + slow) / 5
    ), "also without a recorded estimate"


def test_a_given_overhead_counts_at_once():
    steps = [line(0, (16, 8, 4), overhead=2.0)]
    assert even(steps, known=2.0, given=2.0)[0] == pytest.approx(EVEN + 2)


def test_known_work_counts_instead_of_samples():
    known = line(0, (4, 4, 4), work=(16.0, 8.0, 4.0), busy_seconds=(4.0, 4.0, 4.0))
    assert even([known]) == even([line(0, (16, 8, 4))])


@pytest.mark.parametrize("overhead", [0.0, 2.0, 6.0])
def test_changes_show_the_overhead_also_over_first_uses_that_are_not_learned_from(overhead):
    sizes = [(12, 8, 8), (20, 5, 3), (9, 9, 10), (16, 8, 4)] * 4
    steps = [
        line(k, sizes[k // 3], overhead=overhead, excluded=(0, 1, 2) if k % 3 == 0 else ())
        for k in range(3 * len(sizes))
    ]
    truth = overhead + EVEN
    errors = [abs(each / truth - 1) for each in even(steps)]
    assert errors[-1] < 0.05
    assert errors[-1] <= errors[1]
    spoilt = [replace(each, busy_seconds=(90.0,) * 3) if each.excluded else each for each in steps]
    assert even(spoilt)[-1] == pytest.approx(even(steps)[-1])


def test_all_workers_have_the_times_of_worker_0_one_step_later():
    def worker(session, collectives):
        seen = []
        session.observers.append(seen.append)
        session.start({})
        for k in range(4):
            rows = collectives.all_gather([int(limb) for limb in session.before_allreduce()])
            session.after_allreduce(rows, Left(1.0 + k + 10 * collectives.rank, 0.0))
        return session.extensions[StepFigures].running.recent, seen

    (first, seen), (second, _) = run(worker)
    assert first == second
    assert first == pytest.approx(figures_of(seen[:-1]))


def test_a_curved_cost_is_scaled_by_its_work():
    """On a flat part of a profile, an even batch takes as long as the batch that was measured."""
    profile = Profile([4, 8, 16], [1.0, 1.0, 2.0])
    options = SessionOptions(cost=profile, policy=FixedShares((2, 1)))

    def worker(session, collectives):
        seen = []
        session.observers.append(seen.append)
        session.start({})
        for _ in range(3):
            step(session, collectives)
        return seen

    for line in run(worker, options=lambda rank: options)[0]:
        assert line.even_seconds == pytest.approx(max(line.busy_seconds), rel=1e-6)


def test_observers_get_what_is_added_and_the_time_at_the_end_of_the_step():
    session = WorkerSession(SingleWorker(), 8, SessionOptions(), framework="none")
    seen = []
    session.observers.append(seen.append)
    session.start({})
    session.request_stop()
    for time in (5.0, 7.0):
        session.after_allreduce([session.before_allreduce()], Left(1.0, time))
    assert [(each.time, each.stop) for each in seen] == [(5.0, "requested"), (7.0, None)]
    for each in seen:
        assert each.even_seconds == pytest.approx(max(each.busy_seconds))
