"""Each optimizer and each of its options learns on two workers what one process learns.

Batches are uneven and change every step, the last one is short, and one process trains on whole
global batches by stock Keras.
"""

import pytest
from jobs import campaign, chosen

CASES = [
    "ema_overwrite",
    "accumulation_clipped",
    "loss_scaling_accumulation_overflow",
    "mixed_float16_overflow",
    "adversarial_containers",
    "multi_optimizer",
    "schedule_free_adamw",
    "sum_twice",
    "sum_in_apply",
    "sum_critic",
    *campaign(
        "sum_global_norm",
        "sum_value",
        "sum_norms",
        "sum_adaptive",
        "sum_normalised",
        "sum_signs",
        "sum_noise",
        "sum_own_momentum",
        "sum_unchanged",
        "sum_embedding",
        "sum_of_losses",
        "sum_unproven",
        "sum_eagerly",
        "sum_scaled",
        "clipnorm_embedding",
        "clipvalue",
        "weight_decay",
        "loss_scale_factor",
        "adafactor",
        "accumulation_embedding",
        "clipnorm",
        "constraints",
        "accumulation_ema_overwrite",
        "lamb",
        "run_eagerly",
        "adam",
        "loss_scaling_overflow",
        "global_clipnorm",
        "schedule",
        "ema",
        "accumulation",
        "loss_scaling_ema_overwrite",
        "mixed_float16",
        "mixed_bfloat16",
        "adversarial",
        "adversarial_outside",
        "adadelta",
        "adagrad",
        "adamax",
        "adamw",
        "ftrl",
        "lion",
        "muon",
        "nadam",
        "rmsprop",
        "sgd",
    ),
]
SUMS = [name for each in CASES if "sum_" in (name := getattr(each, "values", [each])[0])]
ON_THREE = SUMS[::3]  # all take a minute more of the campaigns
TOLERANCE = 2e-6
# The parts of a batch are rounded differently from the whole.
ROUNDED = {"mixed_float16": 5e-3, "mixed_float16_overflow": 5e-3, "mixed_bfloat16": 5e-2}
OVERFLOWING = [
    "loss_scaling_accumulation_overflow",
    "mixed_float16_overflow",
    *campaign("loss_scaling_overflow"),
]


@pytest.fixture(scope="module")
def results(request, clusters):
    """Results of the job, by rank, then by case."""
    job = clusters.run("optimizers", *chosen(request, "case"), workers=2)
    assert job.status == 0
    return [job.results(rank) for rank in range(2)]


@pytest.fixture(scope="module")
def of_three(request, clusters):
    """The same of the job with three workers."""
    job = clusters.run("optimizers", *chosen(request, "sums"), workers=3)
    assert job.status == 0
    return [job.results(rank) for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_uneven_batches_learn_what_one_process_learns(results, case):
    check(results, case)


@pytest.mark.parametrize("sums", campaign(*ON_THREE))
def test_steps_that_sum_gradients_learn_the_same_on_three_workers(of_three, sums):
    check(of_three, sums)


def check(results, case):
    found = results[0][case]
    assert "error" not in found, found["error"]
    assert found["moved"] > 0.005, "a case that learns nothing would prove nothing"
    assert found["difference"] <= ROUNDED.get(case, TOLERANCE) * found["moved"]
    for other in results[1:]:
        assert found["state"] == other[case]["state"], "the workers have different models"
    for count in ("iterations", "scale"):
        assert found["state"][count] == found["reference"][count]


@pytest.mark.parametrize("case", OVERFLOWING)
def test_all_workers_skip_the_step_in_which_one_overflows(results, case):
    for rank in range(2):
        assert results[rank][case]["state"]["skipped"] > 0
