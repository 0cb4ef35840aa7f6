"""Curves of every form, and driving factors, in a balanced run on three workers."""

import pytest

from lbbsp_core import read_run


@pytest.mark.campaign
def test_curves_of_every_form_and_driving_factors_cross_the_workers(clusters, tmp_path):
    job = clusters.run("training", str(tmp_path), workers=3)
    assert job.status == 0
    record = read_run(tmp_path)
    assert record.header.drivers == ("memory_percent", "runnable")
    for rank in range(3):
        told = [line.split()[1:] for line in job.lines[rank] if line.startswith("DRIVERS")]
        assert len(told) > 30
        assert all(0 < float(memory) < 100 and float(tasks) >= 1 for memory, tasks in told)
        names = ("memory_percent", "runnable")
        lines = [line.drivers for line in record.steps if line.drivers]
        assert len(lines) >= len(record.steps) - 2, "the first step of each of two fits has none"
        known = {tuple(drivers[name][rank] for name in names) for drivers in lines}
        assert {tuple(round(float(text), 2) for text in pair) for pair in told[1:]} <= known
    # Up to 24 samples the third worker says to take the same time for any batch.
    last = record.steps[-1]
    assert last.sizes[2] >= 24 or last.predicted_seconds[2] >= max(last.predicted_seconds)
