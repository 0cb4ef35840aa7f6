"""The flagship: uneven, changing batches on N processes learn what one process learns.

Every case trains two epochs with a plan that changes every step and a short last batch, then
once more in a single process on whole global batches by stock Keras. The cases named after a
policy follow its own plans, with one worker slow. Packs of 1 byte put each gradient into a bucket
of its own; those of 100 make two or three. In the cases named ``shared`` 40 % of each step is
claimed in parts.
"""

import pytest
from jobs import on

MAIN = ["class_weights", "sum_reduction", "own_train_step"]
FURTHER = [
    "sgd_momentum_l2",
    "embedding_adamw_global_clipnorm",
    "synchronized_batch_norm",
    "load_balanced",
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
SHARED = [
    f"{case}/shared"
    for case in ("embedding_adamw_global_clipnorm", "sum_reduction", "own_train_step")
]
ALL_SHARED = [
    f"{case}/shared"
    for case in MAIN + FURTHER
    if case not in ("synchronized_batch_norm", "custom_loop")
]
CASES = [
    *on(2, *MAIN, *IN_PACKS, *SHARED, campaign=[*FURTHER, *sorted({*ALL_IN_PACKS} - {*IN_PACKS}),
        *sorted({*ALL_SHARED} - {*SHARED})]),
    *on(3, "sample_weights/1", "sample_weights/shared",
        campaign=["sample_weights", "sgd_momentum_l2", "synchronized_batch_norm", "load_balanced/1",
                  "synchronized_batch_norm/100", *SHARED]),
]  # fmt: skip
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def results(request, clusters):
    """Results of both jobs: by number of workers, then by rank and case."""
    jobs = clusters.run_chosen(request, "equivalence")
    return {n: [job.results(rank) for rank in range(n)] for n, job in jobs.items()}


@pytest.mark.parametrize(("workers", "case"), CASES)
def test_uneven_changing_batches_learn_what_one_process_learns(results, workers, case):
    first, *_ = by_rank = results[workers]
    found = first[case]
    assert found["moved"] > 0.01, "a case that learns nothing would prove nothing"
    assert found["plans"] > 1
    assert found["difference"] <= TOLERANCE
    shares = case.endswith("shared")
    has_buckets = "/" in case and "synchronized" not in case and not shares
    assert (first[f"{case}/buckets"] > 1) == has_buckets
    assert (sum(each[f"{case}/parts"] for each in by_rank) > 0) == shares
    # Sums over samples are large numbers.
    assert found["relative_logs" if case.startswith("sum_reduction") else "logs"] <= 1e-5
