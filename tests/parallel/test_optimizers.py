"""Each optimizer and each of its options learns on two workers what one process learns.

Batches are uneven and change every step, the last one is short, and one process trains on whole
global batches by stock Keras.
"""

import pytest
from jobs import chosen

CASES = [
    "ema_overwrite",
    "loss_scaling_accumulation_overflow",
    "mixed_float16_overflow",
    "adversarial_containers",
    "schedule_free_adamw",
    "sum_twice",
    "sum_critic",
]
ON_THREE = [  # all sums take a minute more of the campaigns
    "sum_twice",
    "sum_global_norm",
    "sum_adaptive",
    "sum_noise",
    "sum_embedding",
    "sum_eagerly",
]
TOLERANCE = 2e-6
# The parts of a batch are rounded differently from the whole.
ROUNDED = {"mixed_float16": 5e-3, "mixed_float16_overflow": 5e-3, "mixed_bfloat16": 5e-2}


def run(clusters, *words, workers=2):
    """Results of a job, by rank, then by case."""
    job = clusters.run("optimizers", *words, workers=workers)
    assert job.status == 0
    return [job.results(rank) for rank in range(workers)]


@pytest.fixture(scope="module")
def results(request, clusters):
    return run(clusters, *chosen(request, "case"))


@pytest.mark.parametrize("case", CASES)
def test_uneven_batches_learn_what_one_process_learns(results, case):
    check(results, case)


@pytest.mark.campaign
def test_all_other_optimizers_and_options_learn_what_one_process_learns(clusters):
    others = run(clusters, "all-but", *CASES)
    for case in others[0]:
        check(others, case)


@pytest.mark.campaign
def test_steps_that_sum_gradients_learn_the_same_on_three_workers(clusters):
    of_three = run(clusters, *ON_THREE, workers=3)
    for case in ON_THREE:
        check(of_three, case)


def check(results, case):
    found = results[0][case]
    assert "error" not in found, f"{case}: {found['error']}"
    assert found["moved"] > 0.005, f"{case}, which learns nothing, would prove nothing"
    assert found["difference"] <= ROUNDED.get(case, TOLERANCE) * found["moved"], case
    for other in results[1:]:
        assert found["state"] == other[case]["state"], f"{case}: the workers have different models"
    for count in ("iterations", "scale"):
        assert found["state"][count] == found["reference"][count], case
    if "overflow" in case:
        assert found["state"]["skipped"] > 0, f"{case}: all skip the step in which one overflows"
