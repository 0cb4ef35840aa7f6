"""Three unequal workers of Keras: busy time is each worker's own, and plans follow it exactly."""

import pytest
from jobs import check_unequal

from lbbsp_core import read_run

CASES = ["even", "balanced", "normalised"]


@pytest.fixture(scope="module")
def runs(clusters, tmp_path_factory):
    """Records by case."""
    folder = tmp_path_factory.mktemp("runs")
    job = clusters.run("unequal", str(folder), *CASES, workers=3)
    assert job.status == 0
    return {case: read_run(folder / case) for case in CASES}


def test_the_slow_worker_is_seen_and_gets_less(runs):
    check_unequal(runs)


def test_waits_in_the_collectives_of_batch_normalisation_are_not_busy_time(runs):
    """If they were, all workers would seem equally fast: each waits for two seconds and more."""
    run = runs["normalised"]
    assert {step.sizes for step in run.last_half()} == {(50, 50, 20)}
    for step in run.steps:
        assert step.busy_seconds == pytest.approx(
            (0.06, 0.06, 0.15) if step.step < 2 else 3 * [0.075]
        )
        assert step.wall_seconds > 2


def test_the_header_tells_what_ran(runs):
    header = runs["balanced"].header
    assert (header.workers, header.global_batch_size, header.lag) == (3, 48, 1)
    assert header.policy.startswith("LoadBalanced")
    assert runs["even"].header.policy == "Observe()"
    (event,) = runs["balanced"].events
    assert (event.event, event.steps) == ("planned", 12)
