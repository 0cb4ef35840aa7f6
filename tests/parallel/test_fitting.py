"""`fit` as people use it: callbacks, repetition, validation, checkpoints, on three workers."""

from collections import Counter

import pytest
from jobs import run

EPOCH, X = 6, 32  # steps, samples a step


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank reported."""
    job = run("fitting", str(tmp_path_factory.mktemp("shared")), workers=3, timeout=220)
    assert job.status == 0
    return [job.results(rank) for rank in range(3)]


pytestmark = pytest.mark.timeout(300)


def everywhere(seen, name):
    """The one value that all ranks reported."""
    assert seen[0][name] == seen[1][name] == seen[2][name]
    return seen[0][name]


def test_a_wish_to_stop_on_one_worker_stops_all_at_the_same_step(seen):
    assert everywhere(seen, "stop_on_one_worker") == 4  # the wish of step 3 rides on step 4


def test_a_wish_at_the_end_of_an_epoch_adds_no_step(seen):
    assert everywhere(seen, "stop_at_epoch_end_on_one_worker") == EPOCH


def test_a_nan_that_one_worker_draws_ends_the_run_everywhere(seen):
    assert everywhere(seen, "terminate_on_nan") in (3, 4)


def test_callbacks_that_watch_the_logs_act_alike(seen):
    found = everywhere(seen, "early_stopping")
    assert found["steps"] == 2 * EPOCH
    assert found["rate"] == pytest.approx(0.05)


def test_logs_are_the_same_bits_on_all_workers(seen):
    assert everywhere(seen, "logs")


def test_the_chief_writes_a_checkpoint_that_evaluates_as_logged(seen):
    loss, accuracy, logged_loss, logged_accuracy = seen[0]["checkpoint"]
    assert loss == pytest.approx(logged_loss, abs=1e-6)
    assert accuracy == pytest.approx(logged_accuracy)


def test_every_sample_is_drawn_once_an_epoch_over_all_workers(seen):
    drawn = Counter(sample for rank in seen for sample in rank["drawn"])
    assert drawn == dict.fromkeys(range(EPOCH * X), 3)


@pytest.mark.parametrize(("which", "steps"), [("first", 3), ("second", EPOCH)])
def test_two_data_sets_in_turn_are_each_drawn_in_their_own_order(seen, which, steps):
    drawn = Counter(sample for rank in seen for sample in rank[f"drawn_of_the_{which}_of_two"])
    assert drawn == dict.fromkeys(range(steps * X), 1)


def test_repeated_fits_go_on_where_the_last_one_ended(seen):
    assert everywhere(seen, "steps_in_all") == 4 * EPOCH


def test_a_fit_that_failed_leaves_nothing_behind(seen):
    assert everywhere(seen, "after_a_failed_fit") == EPOCH


def test_a_batch_is_at_most_twice_its_even_share_by_default(seen):
    assert max(everywhere(seen, "sizes_by_default")) == 2 * 11
    assert [len(rank["notices"]) for rank in seen] == [1, 0, 0]
    assert "limits=lbbsp_core.Limits(1, 32)" in seen[0]["notices"][0]
