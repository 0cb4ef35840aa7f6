"""The flagship: uneven, changing batches on N processes learn what one process learns.

Every case trains two epochs with a plan that changes every step and a short last batch, then
once more in a single process on whole global batches by stock Keras. The cases named after a
policy follow its own plans, with one worker slow. Packs of 1 byte put each gradient into a bucket
of its own; those of 100 make two or three. In the cases named ``shared`` 40 % of each step is
claimed in parts.
"""

import pytest
from jobs import on

CASES = [
    "class_weights",
    "sum_reduction",
    "own_train_step",
    "noise_without_samples",
    "embedding_adamw_global_clipnorm/1",
    "synchronized_batch_norm/1",
    "load_balanced/1",
    "frozen_by_a_callback",
    "custom_loop/1",
    "embedding_adamw_global_clipnorm/shared",
]
ON_THREE = ["sample_weights/1", "sample_weights/shared"]
FURTHER_ON_THREE = [
    "sample_weights",
    "sgd_momentum_l2",
    "synchronized_batch_norm",
    "load_balanced/1",
    "synchronized_batch_norm/100",
    "embedding_adamw_global_clipnorm/shared",
    "sum_reduction/shared",
    "own_train_step/shared",
    "recurrent/shared",
]
TOLERANCE = 2e-6


@pytest.mark.parametrize(
    ("workers", "cases"),
    [*on(2, CASES, campaign=[["all-but", *CASES]]), *on(3, ON_THREE, campaign=[FURTHER_ON_THREE])],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_uneven_changing_batches_learn_what_one_process_learns(clusters, workers, cases):
    job = clusters.run("equivalence", *cases, workers=workers)
    assert job.status == 0
    by_rank = [job.results(rank) for rank in range(workers)]
    trained = [name for name, found in by_rank[0].items() if isinstance(found, dict)]
    assert len(trained) >= len(cases)
    for case in trained:
        check(by_rank, case)


def check(by_rank, case):
    found = by_rank[0][case]
    assert found["moved"] > 0.01, f"{case}, which learns nothing, would prove nothing"
    assert found["plans"] > 1, case
    assert found["difference"] <= TOLERANCE, case
    shares = case.endswith("shared")
    has_buckets = "/" in case and "synchronized" not in case and not shares
    assert (by_rank[0][f"{case}/buckets"] > 1) == has_buckets, case
    assert (sum(each[f"{case}/parts"] for each in by_rank) > 0) == shares, case
    # Sums over samples are large numbers.
    logs = "relative_logs" if case.startswith("sum_reduction") else "logs"
    assert found[logs] <= 1e-5, case
