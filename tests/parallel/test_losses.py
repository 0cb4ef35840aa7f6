"""Losses in every form that Keras users write: exact on uneven batches, or refused with words."""

import numpy as np
import pytest
from jobs import campaign, chosen, on

EXACT = [
    *on(
        2,
        "loop",
        "own_step_sum",
        "two_optimizers",
        "mask",
        campaign=[
            "own_step_compute_average_loss",
            "mean_with_sample_weight",
            "scalar_loss_class",
            "scalar_function",
            "add_loss_vector",
            "own_compute_loss",
            "own_step_mean",
            "own_step_divides_by_replicas",
            "own_step_vector",
            "endpoint",
            "mask_ends_in_pooling",
            "mask_and_weights",
            "two_masks",
        ],
    ),
    *on(3, campaign=["own_step_vector", "scalar_function", "endpoint", "mask_and_weights"]),
]
REFUSED = {
    "own_step_clips": "let the optimizer do it: clipnorm, global_clipnorm or clipvalue",
    "mask_reaches_the_loss": "a mask reaches the loss, which is no mean over samples then",
    "sum_and_mean": "(mse, mean_squared_error) is neither a mean nor a sum",
    "weights_divide_the_loss": 'pass weight_by="mask" to LoadBalancer',
    "no_gradients": "NoGradients.train_step applied no gradients",
    "verification_fails": "the verification of Contrastive.train_step has failed",
}
ON_ALL_WORKERS = ["own_step_clips", "mask_reaches_the_loss", "sum_and_mean", "verification_fails"]
"""Those that suffice to show that all workers refuse; tests/tf/test_proof.py has the others."""
ACCEPTED = ["contrastive_accepted", *campaign("dropout", "noise_in_step", "half_precision")]
FOLLOWED = ["followed_average", *campaign("followed_mean", "followed_sum")]
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def jobs(request, clusters):
    """Both jobs, by number of workers."""
    names = {workers: chosen(request, "exact", workers=workers) for workers in (2, 3)}
    names[2] += [*chosen(request, "case"), *chosen(request, "followed"), "own_noise"]
    found = {
        workers: clusters.run("losses", *cases, workers=workers)
        for workers, cases in names.items()
        if cases
    }
    assert all(job.status == 0 for job in found.values())
    return found


@pytest.mark.parametrize(("workers", "exact"), EXACT)
def test_a_loss_that_is_accepted_is_exact(jobs, workers, exact):
    found = jobs[workers].results(0)[exact]
    assert found["plans"] > 1
    assert found["moved"] > 0.01, "a case that learns nothing would prove nothing"
    assert found["difference"] <= TOLERANCE * max(1.0, found["moved"])
    # Sums over samples are large numbers.
    assert found["relative_logs" if exact == "own_step_sum" else "logs"] <= 1e-5


@pytest.mark.parametrize(
    "case", [*ON_ALL_WORKERS, *campaign(*(name for name in REFUSED if name not in ON_ALL_WORKERS))]
)
def test_a_loss_that_cannot_be_exact_is_refused_on_all_workers(jobs, case):
    for rank in range(2):
        assert REFUSED[case] in jobs[2].results(rank)[case]


@pytest.mark.parametrize("followed", FOLLOWED)
def test_a_loop_yields_the_loss_of_the_global_batch_on_all_workers(jobs, followed):
    for rank in range(2):
        found = jobs[2].results(rank)[followed]
        assert found["losses"] <= 1e-5
        assert found["difference"] <= TOLERANCE


@pytest.mark.parametrize("case", ACCEPTED)
def test_noise_is_no_reason_to_refuse(jobs, case):
    assert jobs[2].results(0)[case] == "accepted"


def test_each_worker_draws_noise_of_its_own(jobs):
    noise = [jobs[2].results(rank)["own_noise"] for rank in range(2)]
    assert len(noise[0]) > 10
    assert set(noise[0]).isdisjoint(noise[1])


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [
        ("verified", 0.0, 1e-4),
        ("verified_error", 0.01, np.inf),
        pytest.param("verified_tokens", 0.0, 1e-4, marks=pytest.mark.campaign),
    ],
)
def test_verification_compares_a_weighted_step_with_the_whole_batch(jobs, case, least, most):
    assert least <= jobs[2].results(0)[case] <= most
    assert any("from the whole batch in one process" in line for line in jobs[2].lines[0])
