"""Several replicas in a process, on logical CPU devices: each has a batch size of its own."""

import pytest
from jobs import chosen, on, run

# "mirrored": MirroredStrategy on one machine; "workers": two workers with two devices
CASES = [
    *on(
        "mirrored",
        "loss_scaling",
        "synchronized_batch_norm",
        "own_logs",
        "by_work",
        "verified",
        "shares_no_work",
        campaign=["dense", "scalar_loss", "accumulation_ema", "prefetch"],
    ),
    *on(
        "workers",
        "own_logs",
        campaign=[
            "dense",
            "scalar_loss",
            "loss_scaling",
            "synchronized_batch_norm",
            "prefetch",
            "accumulation_ema",
            "by_work",
        ],
    ),
]
COUNTS = [
    *on(
        "mirrored",
        "stream_that_is_not_read_ahead",
        "reshuffled_items",
        campaign=["shuffled_stream", "cached_stream", "stream_of_words"],
    ),
    *on(
        "workers",
        "shuffled_stream",
        campaign=[
            "stream_that_is_not_read_ahead",
            "cached_stream",
            "stream_of_words",
            "reshuffled_items",
        ],
    ),
]


@pytest.fixture(scope="module")
def jobs(request, clusters):
    """Both jobs, by kind."""
    found = {}
    for kind, workers in {"mirrored": 1, "workers": 2}.items():
        names = [*chosen(request, "case", kind=kind), *chosen(request, "data", kind=kind)]
        if names:
            job = clusters.run("replicas", kind, *names, workers=workers, devices=2)
            assert job.status == 0
            found[kind] = job.results(0)
    return found


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_replicas_with_unequal_batches_learn_what_one_process_learns(jobs, kind, case):
    found = jobs[kind][case]
    assert found["moved"] > 0.01, "a case that learns nothing would prove nothing"
    assert found["plans"] > 1
    assert found["difference"] <= (1e-5 if case == "synchronized_batch_norm" else 2e-6)
    assert found["logs"] <= 1e-5


@pytest.mark.parametrize(("kind", "data"), COUNTS)
def test_what_replicas_read_together_is_trained_on_once_in_each_pass(jobs, kind, data):
    least, most = jobs[kind][data]
    assert least == most == pytest.approx(3.0, abs=1e-4)


def test_unequal_devices_of_one_machine_are_balanced(clusters):
    job = clusters.run("replicas", "mirrored", "unequal", workers=1, devices=2)
    assert job.results(0)["unequal"] == [48, 16]  # 1 and 3 ms a sample


def test_workers_with_different_numbers_of_devices_are_refused_on_all_workers():
    job = run("replicas", "unequal_workers", workers=2)
    for rank in range(2):
        message = job.results(rank)["unequal_workers"]
        assert "the same number of devices, got [2, 1] by rank: start one worker for" in message
