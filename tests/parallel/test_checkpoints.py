"""Interrupted trainings that continue from a checkpoint learn what unbroken ones learn."""

import pytest
from jobs import campaign, chosen, on, run

from lbbsp_core.runtime.checkpoint.checkpoint import newest_checkpoint
from lbbsp_core.runtime.record.figures import Figures

TOLERANCE = 2e-6
CASES = [
    *on(
        "single",
        "stream",
        campaign=["own_step", "each_step", "sequence", "class_weight", "map"],
    ),
    *on(
        "mirrored",
        "noise",
        "callbacks",
        campaign=["epochs", "scaled", "steps", "prefetch", "steps_per_epoch"],
    ),
    *on("workers", campaign=["own_step", "noise"]),
]


@pytest.fixture(scope="module")
def jobs(request, clusters, tmp_path_factory):
    """What each kind of training says, by kind."""
    found = {}
    for kind in chosen(request, "kind"):
        folder, names = str(tmp_path_factory.mktemp(kind)), chosen(request, "name", kind=kind)
        workers, devices = (2, 1) if kind == "workers" else (1, 2)
        job = clusters.run("checkpoints", kind, folder, *names, workers=workers, devices=devices)
        assert job.status == 0
        found[kind] = [job.results(rank) for rank in range(workers)]
    return found


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_an_interrupted_training_learns_what_an_unbroken_one_learns(jobs, kind, name):
    for seen in (results[name] for results in jobs[kind]):
        assert seen["moved"] > 0.01, "a case that learns nothing would prove nothing"
        assert seen["difference"] <= TOLERANCE
        # The logs of a broken epoch are those of an unbroken one.
        assert seen["names"][0] == seen["names"][1]
        assert seen["logs"] <= 1e-5
        assert seen["steps"][0] == seen["steps"][1]
        assert set(seen["figures"]) == {kind != "single"}
        assert seen["history"] == ([] if kind == "single" else sorted(Figures._fields))
        # A job that has ended trains nothing more.
        assert seen["again_steps"] == 0
        assert seen["again"] <= TOLERANCE


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "name", "epochs", "batches"),
    [("mirrored", "epochs", [1, 2], [0, 1, 2]), ("mirrored", "steps", [1, 2], [1, 2, 3])],
)
def test_epochs_that_were_completed_are_not_repeated(jobs, kind, name, epochs, batches):
    (seen,) = (results[name] for results in jobs[kind])
    assert (seen["epochs"], seen["batches"]) == (epochs, batches)


@pytest.mark.parametrize(("kind", "name"), on("mirrored", "callbacks"))
def test_what_early_stopping_has_seen_before_the_interruption_counts(jobs, kind, name):
    (seen,) = (results[name] for results in jobs[kind])
    assert seen["epochs"][-1] == seen["last_epoch"] < 7


PREEMPTED = [(3, ("10", "2", "SIGTERM")), (2, ())]
BROKEN_OFTEN = [
    (3, ("11", "1", "SIGKILL")),
    (3, ("18", "2", "SIGTERM")),
    (2, ("21", "0", "SIGTERM")),
    (2, ()),
]


KILLED = [(3, ("7", "2", "SIGKILL")), (3, ("19", "0", "SIGKILL")), (3, ())]


@pytest.mark.parametrize(
    ("model", "chain"),
    [("dense", PREEMPTED), *campaign(("dense", BROKEN_OFTEN), ("noisy", KILLED))],
    ids=lambda value: f"{len(value)} jobs" if isinstance(value, list) else value,
)
def test_killed_and_preempted_jobs_continue_with_fewer_workers(model, chain, tmp_path):
    """Each job of the chain, but the last one, is ended after a step by a signal of a worker."""
    last = 0
    for workers, signal in chain:
        job = run("restarting", str(tmp_path), model, *signal, workers=workers)
        assert ("continues after step" in job.text) == (last > 0)
        assert last == 0 or f"continues after step {last} " in job.text
        if "SIGTERM" in signal:
            # It arrives between two steps, and travels with the exchange of the next one.
            last = int(signal[0]) + 1
            assert f"leaves after step {last}, because a worker got SIGTERM" in job.text
        elif signal:
            last = int(signal[0]) // 4 * 4  # checkpoints are written after every fourth step
            assert "leaves" not in job.text
        assert job.status == {"SIGTERM": 143, "SIGKILL": 137}.get(*signal[2:] or [""], 0)
    for rank in range(2):
        seen = job.results(rank)
        assert seen["difference"] <= TOLERANCE
        (epoch, logs), expected = seen["epochs"][-1], dict(seen["expected"])
        assert logs == pytest.approx(expected[epoch], abs=1e-5)


@pytest.mark.parametrize("start", ["before", *campaign("later")])
def test_processes_that_load_data_outlive_the_last_step(tmp_path, start):
    """A pool whose process has died would never return what it was loading."""
    job = run("loading", str(tmp_path), start, workers=2)
    assert job.status == 143
    assert newest_checkpoint(tmp_path).step in (4, 5, 6)
