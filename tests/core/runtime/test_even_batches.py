"""The estimated time of even batches: ranges that have the truth where the cost is known."""

import numpy as np
import pytest
from report_runs import line

from lbbsp_core import Affine, Balancer, Proportional
from lbbsp_core.launch.contention import bursty
from lbbsp_core.runtime.record.even_batches import BELIEVED, EvenBatches, Fit
from lbbsp_core.runtime.record.figures import figures_of

X, SPEEDS = 192, (1.0, 1.0, 0.4)
EVEN = X / len(SPEEDS)


def recorded(lines, known=None, given=()):
    """Estimates of each step, and the lines with them."""
    batches = EvenBatches([Proportional()] * len(lines[0].sizes), given)
    known = known or [[0.0] * len(lines[0].sizes)] * len(lines)
    ranges = [batches.seconds(*each) for each in zip(lines, known, strict=True)]
    names = "even_seconds", "even_seconds_at_most"
    return ranges, [
        type(each)(**(vars(each) | dict(zip(names, ends, strict=True))))
        for each, ends in zip(lines, ranges, strict=True)
    ]


def closed_loop(overhead, noise, steps=60, change=None, period=None):
    """Steps of balanced workers, each with a fixed part of `overhead` samples; and the true gain.

    From the step `change` on, the first worker is as slow as the last one. With a period, equal
    speeds rise and fall by 40 %.
    """
    rng = np.random.default_rng(0)
    team = [Balancer(rank=rank, workers=3, global_batch_size=X) for rank in range(3)]
    lines, even, taken = [], 0.0, 0.0
    for step in range(steps):
        sizes, speeds = team[0].sizes(step), np.array(SPEEDS)
        if change is not None and step >= change:
            speeds[0] = SPEEDS[2]
        if period is not None:
            speeds = 1 + 0.4 * np.sin(2 * np.pi * (step / period + np.arange(3) / 3))
        slow = rng.uniform(1, 1 + noise, 3) / speeds / 1e3
        busy = [float(each * (x + overhead)) for each, x in zip(slow, sizes, strict=True)]
        messages = [own.report(seconds) for own, seconds in zip(team, busy, strict=True)]
        for own in team:
            own.receive(messages, max(busy))
        lines.append(line(step, sizes, busy, max(busy)))
        if step >= steps // 5:
            even, taken = even + max(slow) * (EVEN + overhead), taken + max(busy)
    return lines, even / taken


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("overhead", [0.0, 0.2 * EVEN, 0.5 * EVEN, 1.5 * EVEN, 20 * EVEN])
def test_the_true_gain_of_affine_workers_is_inside(overhead, noise):
    lines, gain = closed_loop(overhead, noise)
    ranges, lines = recorded(lines)
    figures = figures_of(lines[len(lines) // 5 :])
    assert figures.speedup <= 1.02 * gain <= 1.02**2 * figures.speedup_at_most
    if not noise:
        assert figures.speedup_at_most - figures.speedup < 0.01
    assert all(least <= most for least, most in ranges)


@pytest.mark.parametrize("how", [{"change": 60}, {"period": 40}, {"period": 100}])
@pytest.mark.parametrize("overhead", [0.0, 0.3 * EVEN])
def test_a_speed_that_changes_is_not_taken_for_an_overhead(overhead, how):
    lines, gain = closed_loop(overhead, 0.05, steps=120, **how)
    figures = figures_of(recorded(lines)[1][24:])
    assert figures.speedup <= 1.02 * gain <= 1.02**2 * figures.speedup_at_most


def beside_neighbours(overhead, seed, phase, *, balanced, seconds=60.0):
    """Steps of a minute on devices that bursty neighbours slow down, and the known overheads.

    Their phases take `phase` seconds for each second of the schedule.
    """
    schedules = [bursty(rank, seed) for rank in range(3)]
    ends = [np.cumsum([each.seconds * phase for each in phases]) for phases in schedules]
    slowness = [[1 + len(each.demands) for each in phases] for phases in schedules]

    def busy_seconds(rank, samples):
        work, now = (samples + overhead) / SPEEDS[rank] * 6e-4, time
        number = int(np.searchsorted(ends[rank], now, "right"))
        while now + work * slowness[rank][number] > ends[rank][number]:
            work -= (ends[rank][number] - now) / slowness[rank][number]
            now, number = ends[rank][number], number + 1
        return float(now + work * slowness[rank][number] - time)

    team = [Balancer(rank=i, workers=3, global_batch_size=X, predictor="last") for i in range(3)]
    time, lines, known = 0.0, [], []
    while time < seconds:
        sizes = team[0].sizes(len(lines)) if balanced else (64, 64, 64)
        busy = [busy_seconds(rank, size) for rank, size in enumerate(sizes)]
        if balanced:
            messages = [own.report(each) for own, each in zip(team, busy, strict=True)]
            for own in team:
                own.receive(messages, max(busy))
            known.append([1e3 * each.overhead_nanoseconds / each.picoseconds_per_sample
                          for each in messages])  # fmt: skip
        time += max(busy) + 0.01
        lines.append(line(len(lines), sizes, busy, max(busy) + 0.01))
    return lines, known


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("overhead", "phase"), [(0, 0.3), (0, 2.0), (16, 0.3), (16, 2.0)])
def test_the_true_gain_beside_bursty_neighbours_is_inside(overhead, phase, seed):
    """Batches follow the speeds there, which a fit would take for an overhead."""
    lines, known = beside_neighbours(overhead, seed, phase, balanced=True)
    gain = len(lines) / len(beside_neighbours(overhead, seed, phase, balanced=False)[0])
    figures = figures_of(recorded(lines, known)[1])
    assert figures.speedup <= 1.02 * gain <= 1.02**2 * figures.speedup_at_most
    assert figures.speedup_at_most < 1.8 * figures.speedup


def test_one_batch_size_shows_nothing_of_the_overhead():
    lines = [line(step, (80, 80, 32), (0.08, 0.08, 0.08), 0.09) for step in range(30)]
    half = BELIEVED * EVEN
    ends = 0.08 * (EVEN + half) / (32 + half), 0.08 * EVEN / 32
    assert recorded(lines)[0] == [pytest.approx(ends)] * 30
    known, exact = [[8.0] * 3] * 30, 0.08 * (EVEN + 8) / (32 + 8)
    assert recorded(lines, known)[0] == [pytest.approx((ends[0], exact))] * 30
    assert recorded(lines, known, [8.0] * 3)[0] == [pytest.approx((exact, exact))] * 30


def test_a_record_with_one_estimate_has_no_range():
    figures = figures_of([line(0, (9, 3), (0.1, 0.1), 0.1, even_seconds=0.15)])
    assert (figures.speedup, figures.speedup_at_most) == pytest.approx((1.5, 1.5))


def test_the_fit_is_the_one_of_least_squares():
    rng = np.random.default_rng(1)
    work = rng.uniform(10, 90, 40)
    cost = Affine(0.02, 0.001)
    seconds = cost(work) * rng.normal(1, 0.02, 40)
    fit = Fit()
    for each in zip(work.tolist(), seconds.tolist(), strict=True):
        fit = fit.plus(*each)
    (slope, constant), covariance = np.polyfit(work, seconds, 1, cov=True)
    least, most = fit.overheads(1.0, 2.0)
    error = 2 * np.sqrt(covariance[0, 0])
    ends = [seconds.mean() / (slope + sign * error) - work.mean() for sign in (1, -1)]
    assert (least, most) == pytest.approx(ends)
    assert least < 20 < most
    assert constant / slope == pytest.approx(20, rel=0.2)
