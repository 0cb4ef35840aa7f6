"""Several replicas in a process, on logical CPU devices: each has a batch size of its own."""

import pytest
from jobs import on, run

# "mirrored": MirroredStrategy on one machine; "workers": two workers with two devices
MIRRORED = [
    "loss_scaling",
    "synchronized_batch_norm",
    "own_logs",
    "by_work",
    "verified",
    "shares_no_work",
    "stream_that_is_not_read_ahead",
    "reshuffled_items",
]
WORKERS = ["own_logs"]


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        *on("mirrored", MIRRORED, campaign=[["all-but", *MIRRORED]]),
        *on("workers", WORKERS, campaign=[["all-but", *WORKERS, "verified", "shares_no_work"]]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_replicas_with_unequal_batches_learn_what_one_process_learns(clusters, kind, cases):
    workers = 1 if kind == "mirrored" else 2
    job = clusters.run("replicas", kind, *cases, workers=workers, devices=2)
    assert job.status == 0
    for case, found in job.results(0).items():
        if isinstance(found, list):  # how often samples are trained on, at least and at most
            assert found == pytest.approx([3.0, 3.0], abs=1e-4), case
            continue
        assert found["moved"] > 0.01, f"{case}, which learns nothing, would prove nothing"
        assert found["plans"] > 1, case
        tolerance = 1e-5 if case == "synchronized_batch_norm" else 2e-6
        assert found["difference"] <= tolerance, case
        assert found["logs"] <= 1e-5, case


def test_unequal_devices_of_one_machine_are_balanced(clusters):
    job = clusters.run("replicas", "mirrored", "unequal", workers=1, devices=2)
    assert job.results(0)["unequal"] == [48, 16]  # 1 and 3 ms a sample


@pytest.mark.campaign
def test_workers_with_different_numbers_of_devices_are_refused_on_all_workers():
    job = run("replicas", "unequal_workers", workers=2)
    for rank in range(2):
        message = job.results(rank)["unequal_workers"]
        assert "the same number of devices, got [2, 1] by rank: start one worker for" in message
