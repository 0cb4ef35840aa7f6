"""Figures of hand-made records, whose answers are known in closed form."""

import json

import numpy as np
import pytest
from report_runs import header, line

from lbbsp_core.report import Comparison, Outcome, summarise
from lbbsp_core.report.summary import ideal_busy_seconds, weight_difference
from lbbsp_core.runtime.record.record import Run, read_run
from lbbsp_core.runtime.record.writer import RunRecord


def run(*steps, workers=2, total=12):
    return Run(header(workers, total), list(steps))


def bsp(steps=10):
    """Worker 1 is three times as slow: 10 and 30 ms a sample, 12 samples, 20 ms of all-reduce."""
    return run(*[line(k, [6, 6], [0.06, 0.18], 0.2) for k in range(steps)])


def balanced(steps=10):
    """9 + 3 samples take 90 ms each: nothing better exists."""
    return run(*[line(k, [9, 3], [0.09, 0.09], 0.11) for k in range(steps)])


def test_the_figures_of_an_uneven_run():
    figures = summarise(bsp())
    assert figures.workers == 2
    assert figures.global_batch_size == 12
    assert figures.step_seconds == pytest.approx(0.2)
    assert figures.busy_seconds == pytest.approx((0.06, 0.18))
    assert figures.figures.waiting == pytest.approx((0.18 - 0.06) / (2 * 0.2))
    assert figures.figures.waiting_and_communication == pytest.approx((0.14 + 0.02) / (2 * 0.2))
    assert figures.communication_seconds == pytest.approx(0.02)
    assert figures.ideal_busy_seconds == pytest.approx(0.09)  # 9 and 3 samples
    assert figures.ideal_step_seconds == pytest.approx(0.11)
    assert figures.efficiency == pytest.approx(0.11 / 0.2)
    assert figures.ideal_busy_share == pytest.approx(0.09 / 0.2)
    assert figures.samples_per_second == pytest.approx(60)


def test_a_perfectly_balanced_run_loses_only_the_communication():
    figures = summarise(balanced())
    assert figures.efficiency == pytest.approx(1)
    assert figures.ideal_busy_share == pytest.approx(0.09 / 0.11)
    assert figures.figures == pytest.approx(
        (*(0, 0.02 / 0.11, (0.02 + 0.09 * 9 / 6) / 0.11, 0, (0.02 + 0.09 * 6 / 3) / 0.11),)
    )


def test_the_ideal_is_one_of_whole_samples():
    # 5.5 samples each would take 55 ms; one of the two must take 6.
    figures = summarise(run(line(0, [5, 6], [0.05, 0.06], 0.06), total=11))
    assert figures.ideal_busy_seconds == pytest.approx(0.06)


def test_excluded_short_and_unmeasured_steps_do_not_count():
    noise = [
        line(10, [9, 3], [5.0, 0.09], 5.1, excluded=(0,)),
        line(11, [3, 1], [0.03, 0.03], 0.05, short=True),
        line(12, [9, 3], [0.09, 0.0], 0.11),
    ]
    assert summarise(run(*balanced().steps, *noise)) == summarise(balanced())


def test_medians_forgive_a_single_pause():
    pause = line(8, [9, 3], [0.09, 2.0], 2.02)
    figures = summarise(run(*balanced().steps[:8], pause, balanced().steps[9]))
    assert figures.step_seconds == pytest.approx(0.11)
    assert figures.ideal_busy_seconds == pytest.approx(0.09)
    assert figures.samples_per_second == pytest.approx(120 / (9 * 0.11 + 2.02)), "but it took time"


def test_the_ideal_lies_between_the_busy_times():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(50, 200, (1, 4)).astype(float)
        busy = rng.uniform(0.1, 0.12, (1, 4))
        ideal = ideal_busy_seconds(sizes, busy, int(sizes.sum()))
        assert busy.min() <= ideal <= busy.max() * (1 + 1 / 50)


def test_a_run_without_steps_or_measurements_says_so():
    with pytest.raises(ValueError, match="at least one step, got none"):
        summarise(run())
    with pytest.raises(ValueError, match="none of 1 does"):
        summarise(run(line(0, [6, 6], [0.1, 0.0], 0.1, excluded=(0, 1))))


def outcome(accuracy, *weights):
    return Outcome(accuracy, [np.array(values, np.float32) for values in weights])


def test_the_comparison_of_two_runs():
    comparison = Comparison(summarise(bsp()), summarise(balanced()))
    figures = comparison.figures(
        outcome(0.96, [[1.0, -4.0]], [0.5]), outcome(0.97, [[1.0, -4.25]], [0.625])
    )
    assert figures["speedup"] == pytest.approx(0.2 / 0.11)
    assert figures["ideal_speedup"] == pytest.approx(0.2 / 0.11)
    assert figures["max_weight_difference"] == 0.25
    assert figures["max_abs_weight"] == 4.0
    assert (figures["bsp"]["accuracy"], figures["lbbsp"]["accuracy"]) == (0.96, 0.97)
    assert json.loads(json.dumps(figures)) == figures


def test_the_schema_of_the_figures():
    one = outcome(1.0, [1.0])
    figures = Comparison(summarise(bsp()), summarise(balanced())).figures(one, one)
    each = {"step_seconds", "busy_seconds", "waiting", "waiting_and_communication",
            "hidden_communication", "estimated_speedup", "estimated_speedup_at_most", "accuracy",
            "samples_per_second"}  # fmt: skip
    assert set(figures["bsp"]) == set(figures["lbbsp"]) == each
    assert set(figures) == {
        "bsp", "lbbsp", "workers", "global_batch_size", "communication_seconds", "speedup",
        "ideal_speedup", "efficiency", "ideal_busy_share", "max_weight_difference",
        "max_abs_weight",
    }  # fmt: skip


def test_models_of_other_shapes_are_not_compared():
    with pytest.raises(ValueError, match="one model"):
        weight_difference([np.zeros(3)], [np.zeros((3, 1))])


def test_a_record_on_disk_gives_the_same_figures(tmp_path):
    record = RunRecord(tmp_path / "run.jsonl", bsp().header)
    for each in bsp().steps:
        record.write(each)
    record.close()
    assert summarise(read_run(tmp_path)) == summarise(bsp())
