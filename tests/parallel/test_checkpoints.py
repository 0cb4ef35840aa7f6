"""Interrupted trainings that continue from a checkpoint learn what unbroken ones learn."""

import pytest
from jobs import run

TOLERANCE = 2e-6
CASES = {
    "single": ["each_step", "own_step", "stream", "sequence", "class_weight", "map"],
    "mirrored": ["steps", "epochs", "noise", "prefetch", "steps_per_epoch", "callbacks", "scaled"],
    "workers": ["noise", "own_step"],
}
ALL = [(kind, name) for kind, names in CASES.items() for name in names]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """What each kind of training says, by kind."""
    found = {}
    for kind, names in CASES.items():
        folder = tmp_path_factory.mktemp(kind)
        workers = 2 if kind == "workers" else 1
        job = run("checkpoints", kind, str(folder), *names, workers=workers)
        assert job.status == 0
        found[kind] = [job.results(rank) for rank in range(workers)]
    return found


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_an_interrupted_training_learns_what_an_unbroken_one_learns(jobs, kind, name):
    for seen in (results[name] for results in jobs[kind]):
        assert seen["moved"] > 0.01, "a case that learns nothing would prove nothing"
        assert seen["difference"] <= TOLERANCE


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_the_logs_of_a_broken_epoch_are_those_of_an_unbroken_one(jobs, kind, name):
    for seen in (results[name] for results in jobs[kind]):
        assert seen["names"][0] == seen["names"][1]
        assert seen["logs"] <= 1e-5
        assert seen["steps"][0] == seen["steps"][1]
        assert set(seen["figures"]) == {kind != "single"}
        assert seen["history"] == ([] if kind == "single" else ["speedup", "waiting"])


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_job_that_has_ended_trains_nothing_more(jobs, kind, name):
    for seen in (results[name] for results in jobs[kind]):
        assert seen["again_steps"] == 0
        assert seen["again"] <= TOLERANCE


def test_epochs_that_were_completed_are_not_repeated(jobs):
    (seen,) = jobs["mirrored"]
    assert seen["epochs"]["epochs"] == [1, 2]
    assert seen["epochs"]["batches"] == [0, 1, 2]
    assert seen["steps"]["batches"] == [1, 2, 3]
    # What EarlyStopping has seen before the interruption counts.
    assert seen["callbacks"]["epochs"][-1] == seen["callbacks"]["last_epoch"] < 7


@pytest.fixture(scope="module")
def restarts(tmp_path_factory):
    """Jobs of one training: a worker is killed, two are preempted, and two remain."""
    folder = str(tmp_path_factory.mktemp("restarts"))
    return [
        run("restarting", folder, *signal, workers=workers)
        for workers, signal in [
            (3, ("9", "1", "SIGKILL")),
            (3, ("18", "2", "SIGTERM")),
            (2, ("21", "0", "SIGTERM")),
            (2, ()),
        ]
    ]


def test_killed_and_preempted_jobs_continue_with_fewer_workers(restarts):
    for rank in range(2):
        seen = restarts[-1].results(rank)
        assert seen["difference"] <= TOLERANCE
        (epoch, logs), expected = seen["epochs"][-1], dict(seen["expected"])
        assert logs == pytest.approx(expected[epoch], abs=1e-5)


def test_all_workers_of_a_preempted_job_leave_after_one_step(restarts):
    killed, first, second, last = restarts
    assert [job.status for job in restarts] == [137, 143, 143, 0]
    # The signal arrives between two steps, and travels with the exchange of the next one.
    assert "continues after step 8 " in first.text
    assert "leaves after step 19, because a worker got SIGTERM" in first.text
    assert "continues after step 19 " in second.text
    assert "leaves after step 22, because a worker got SIGTERM" in second.text
    assert "continues after step 22 " in last.text
    assert "leaves" not in killed.text + last.text
