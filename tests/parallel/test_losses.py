"""Losses in every form that Keras users write: exact on uneven batches, or refused with words."""

import pytest
from jobs import run

EXACT = [
    "scalar_function",
    "scalar_loss_class",
    "own_compute_loss",
    "own_step_mean",
    "loop",
    "own_step_divides_by_replicas",
    "own_step_vector",
    "own_step_sum",
    "own_step_compute_average_loss",
    "two_optimizers",
    "add_loss_vector",
    "endpoint",
    "mask_ends_in_pooling",
    "mask",
    "mask_and_weights",
    "two_masks",
    "mean_with_sample_weight",
]
ON_THREE = ["scalar_function", "own_step_vector", "endpoint", "mask_and_weights"]
REFUSED = {
    "dice": "the loss of Functional (dice) is neither a mean nor a sum over samples",
    "contrastive": "the loss of Contrastive.train_step is neither a mean nor a sum",
    "own_step_clips": "let the optimizer do it: clipnorm, global_clipnorm or clipvalue",
    "own_momentum": "assigns momentum a value that depends on the samples",
    "apply_in_a_function": "apply is called in a tf.function, tf.cond or tf.while_loop inside",
    "mask_reaches_the_loss": "a mask reaches the loss, which is no mean over samples then",
    "weights_divide_the_loss": 'pass weight_by="mask" to LoadBalancer',
    "sum_and_mean": "(mse, mean_squared_error) is neither a mean nor a sum",
    "no_gradients": "NoGradients.train_step applied no gradients",
}
ACCEPTED = ["dropout", "noise_in_step", "contrastive_accepted", "half_precision"]
VERIFIED = ["verified", "verified_tokens", "verified_error"]
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def jobs():
    """Both jobs, by number of workers."""
    found = {
        2: run(
            "losses", *EXACT, *REFUSED, *ACCEPTED, "own_noise", *VERIFIED, workers=2
        ),
        3: run("losses", *ON_THREE, workers=3),
    }  # fmt: skip
    assert all(job.status == 0 for job in found.values())
    return found


@pytest.mark.parametrize(
    ("workers", "case"), [(2, case) for case in EXACT] + [(3, case) for case in ON_THREE]
)
def test_a_loss_that_is_accepted_is_exact(jobs, workers, case):
    found = jobs[workers].results(0)[case]
    assert found["plans"] > 1
    assert found["moved"] > 0.01, "a case that learns nothing would prove nothing"
    assert found["difference"] <= TOLERANCE * max(1.0, found["moved"])
    # Sums over samples are large numbers.
    assert found["relative_logs" if case == "own_step_sum" else "logs"] <= 1e-5


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_cannot_be_exact_is_refused_on_all_workers(jobs, case):
    for rank in range(2):
        assert REFUSED[case] in jobs[2].results(rank)[case]


@pytest.mark.parametrize("case", ACCEPTED)
def test_noise_is_no_reason_to_refuse(jobs, case):
    assert jobs[2].results(0)[case] == "accepted"


def test_each_worker_draws_noise_of_its_own(jobs):
    noise = [jobs[2].results(rank)["own_noise"] for rank in range(2)]
    assert len(noise[0]) > 10
    assert set(noise[0]).isdisjoint(noise[1])


def test_verification_compares_a_weighted_step_with_the_whole_batch(jobs):
    found = jobs[2].results(0)
    assert found["verified"] <= 1e-4
    assert found["verified_tokens"] <= 1e-4
    assert found["verified_error"] > 0.05
    assert any("from the whole batch in one process" in line for line in jobs[2].lines[0])
