"""The flagship: uneven, changing batches on N processes learn what one process learns.

Every case trains two epochs with a plan that changes every step and a short last batch, then
once more in a single process on whole global batches by stock Keras. The cases named after a
policy follow its own plans, with one worker slow. Packs of 1 byte put each gradient into a bucket
of its own; those of 100 make two or three.
"""

import pytest
from jobs import on

MAIN = [
    "sgd_momentum_l2",
    "embedding_adamw_global_clipnorm",
    "class_weights",
    "sum_reduction",
    "own_train_step",
    "synchronized_batch_norm",
    "load_balanced",
]
FURTHER = [
    "adamw_global_clipnorm",
    "embedding_sgd",
    "sample_weights",
    "loss_scaling",
    "dictionary_inputs",
    "map",
    "custom_loop",
    "epoch_balanced",
    "proportional_control",
    "leader_straggler",
]
IN_PACKS = [
    "sgd_momentum_l2/100",
    "embedding_adamw_global_clipnorm/1",
    "synchronized_batch_norm/1",
    "load_balanced/1",
    "custom_loop/1",
]
ALL_IN_PACKS = [f"{case}/{size}" for case in MAIN + FURTHER for size in (1, 100)]
CASES = [
    *on(2, *MAIN, *IN_PACKS, campaign=[*FURTHER, *sorted({*ALL_IN_PACKS} - {*IN_PACKS})]),
    *on(3, "sample_weights", "sample_weights/1",
        campaign=["sgd_momentum_l2", "synchronized_batch_norm", "load_balanced/1",
                  "synchronized_batch_norm/100"]),
]  # fmt: skip
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
    has_buckets = "/" in case and "synchronized" not in case
    assert (results[workers][f"{case}/buckets"] > 1) == has_buckets
    # Sums over samples are large numbers.
    assert found["relative_logs" if case.startswith("sum_reduction") else "logs"] <= 1e-5
