"""Models of MXNet's workers stay equal: differences are named on all workers, or removed."""

import pytest
from jobs import needs_mxnet

pytestmark = needs_mxnet
WORKERS = 3
DIFFERENT = {
    "rate": "DisagreementError: workers disagree on the learning rate (0.1 on worker 0, 0.01 on "
    "worker 1, 0.1 on worker 2); this is so since step 5",
    "rate_two_calls": "let it follow trainer.mean_over_workers(metric)",
    "wd_last_step": "wd (0.001 on worker 0, 0.001 on worker 1, 0.5 on worker 2); this is so since "
    "step 7",
    "frozen_first": "on worker 1, '2: null, 3: null' on worker 2); this is so since step 0",
    "thawed": "on worker 1, '0: write, 1: write' on worker 2); this is so since step 4",
    "late_load": "parameters of workers 1, 2 differ from those of worker 0 in the first step",
    "weights_beside_a_mask": "workers have different weights at step 7",
    "weights_end_of_epoch": "workers have different weights at step 7",
    "state_of_a_layer": "a layer changes a parameter of its own by the samples of one worker",
    "no_sampler": "parameters of worker 1 differ from those of worker 0 in the first step",
    "order": "worker 0 draws its first batch while worker 1 makes its first step",
    "outside": "_bias) differ on worker 2 from those of worker 0: pass them to the trainer as well",
    "mean_lengths": "worker 0 gives 1, worker 1 gives 2",
    "mean_weight": "must be >= 0 and finite, got -1.0 on worker 1",
    "mean_weights": "must be > 0 on at least one worker",
}
EQUAL = [
    "reinitialised",
    "loaded",
    "loaded_deferred",
    "loaded_threads",
    "loaded_devices",
    "loaded_two_calls",
    "sent",
    "schedule",
    "schedule_from_one",
    "sent_between_steps",
    "sent_with_weights",
    "frozen_alike",
    "part_alike",
    "noise_alike",
    "thawed_alike",
]


@pytest.fixture(scope="module")
def found(clusters):
    """Results by rank."""
    job = clusters.run("mx_agreement", workers=WORKERS, servers=2, framework="mxnet")
    assert job.status == 0
    return [job.results(rank) for rank in range(WORKERS)]


@pytest.mark.parametrize("case", DIFFERENT)
def test_all_workers_name_the_worker_that_differs(found, case):
    for each in found:
        assert DIFFERENT[case] in each[case]


@pytest.mark.parametrize("case", EQUAL)
def test_parameters_of_worker_0_reach_all_workers_before_they_are_used(found, case):
    for each in found:
        assert each[case] < 2e-6
        assert each["moved"] > 0.01


def test_a_difference_of_roundings_is_removed_in_the_first_step(found):
    assert found[0]["nearly_equal"] == found[1]["nearly_equal"] == found[2]["nearly_equal"]


def test_means_of_metrics_have_the_same_bits_on_all_workers(found):
    first, array, without, own = found[0]["mean"]
    assert [each["mean"] for each in found[1:]] == [found[0]["mean"]] * 2
    assert float.fromhex(first) == pytest.approx((0.1 * 1 + 0.2 * 2 + 0.3 * 3) / 6)
    assert array == [[pytest.approx((0 * 3 + 1 * 2 + 2) / 6), pytest.approx(4e300 / 6)]]
    assert without == 0.1
    assert own == [1.0]
