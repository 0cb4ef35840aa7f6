"""The flagship: uneven, changing batches on N processes learn what one process learns.

Every case trains two epochs with a plan that changes every step and a short last batch, then
once more in a single process on whole global batches by stock Keras. The cases named after a
policy follow its own plans, with one worker slow.
"""

import pytest
from jobs import on

CASES = [
    *on(
        2,
        "sgd_momentum_l2",
        "embedding_adamw_global_clipnorm",
        "class_weights",
        "sum_reduction",
        "own_train_step",
        "synchronized_batch_norm",
        "load_balanced",
        campaign=[
            "adamw_global_clipnorm",
            "embedding_sgd",
            "sample_weights",
            "loss_scaling",
            "dictionary_inputs",
            "map",
            "epoch_balanced",
            "proportional_control",
            "leader_straggler",
        ],
    ),
    *on(3, "sample_weights", campaign=["sgd_momentum_l2", "synchronized_batch_norm"]),
]
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def results(request, clusters):
    """Results of both jobs: by number of workers, then by case."""
    jobs = clusters.run_chosen(request, "equivalence")
    return {workers: job.results(0) for workers, job in jobs.items()}


@pytest.mark.parametrize(("workers", "case"), CASES)
def test_uneven_changing_batches_learn_what_one_process_learns(results, workers, case):
    found = results[workers][case]
    assert found["moved"] > 0.01, "a case that learns nothing would prove nothing"
    assert found["plans"] > 1
    assert found["difference"] <= TOLERANCE
    # Sums over samples are large numbers.
    assert found["relative_logs" if case == "sum_reduction" else "logs"] <= 1e-5
