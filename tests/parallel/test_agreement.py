"""Epoch logs, models, files and messages of a job with two workers."""

import pytest
from jobs import campaign, chosen, run

NOISE = (
    "shuffle=True",
    "failed to connect",
    "UNAVAILABLE",
    "Connection re",
    "stopped sending heartbeats",
    "unbuilt state",
)


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """The job, of which rank 1 ends when rank 0 has been at its end for a moment."""
    folder = str(tmp_path_factory.mktemp("shared"))
    job = run("agreement", folder, *chosen(request, "model"), workers=2)
    assert job.status == 0
    return job


@pytest.fixture(scope="module")
def seen(job):
    """What each rank reported."""
    return [job.results(rank) for rank in range(2)]


def everywhere(seen, name):
    """The one value that all ranks reported."""
    assert seen[0][name] == seen[1][name]
    return seen[0][name]


def test_a_metric_may_return_its_variable(seen):
    for each in seen:
        assert each["variable_of_metric"] == [[64.0, 64.0], [40.0, 40.0]]


def test_tensors_in_epoch_logs_are_those_of_the_global_batch(seen):
    found = everywhere(seen, "raw_logs")
    assert found["logs"][-1]["error"] == pytest.approx(found["error"], abs=1e-6)
    assert found["logs"][-1]["constant"] == 3
    assert found["logs"][-1]["loss"] > 0


def test_one_worker_may_be_seeded_alone(seen):
    assert len(everywhere(seen, "one_seeded")["loss"]) == 2


def test_callbacks_that_act_on_such_logs_act_alike(seen):
    found = everywhere(seen, "acting_on_raw_logs")
    assert found["epochs"] < 8
    assert found["rate"] < 0.1


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("other_weights", "trainable weights"),
        ("other_weights_at_the_end", "trainable weights"),
        ("other_rate", "learning rate"),
    ],
)
def test_a_callback_that_changes_the_model_of_one_worker_is_refused(seen, case, name):
    message = f"workers disagree on the {name} (worker 0 against worker 1): a callback"
    assert message in everywhere(seen, case)


def test_plain_batch_normalisation_is_warned_about_wherever_a_step_uses_it(seen):
    assert everywhere(seen, "plain_batch_norm") == {
        "answer": "no error", "fit": 1, "loop": 2, "frozen": 2, "unfrozen": 3, "synchronised": 3,
    }  # fmt: skip


def test_a_job_leaves_one_file_of_each_kind(seen):
    files = seen[0]["files"]
    events = [name for name in files if "tfevents" in name]
    assert sorted(name.rpartition("/")[0] for name in events) == [
        "events/lbbsp/all",
        *(f"events/lbbsp/worker_{worker}" for worker in range(len(seen))),
        "events/train",
        "events/validation",
    ]
    assert [name for name in files if name not in events] == [
        "all.weights.h5",
        "best.weights.h5",
        "log.csv",
        "managed/checkpoint",
        "managed/ckpt-2.data-00000-of-00001",
        "managed/ckpt-2.index",
        "own.keras",
        "saved/1.keras",
        "saved/2.keras",
        "written.data-00000-of-00001",
        "written.index",
    ]
    assert [line.partition(",")[0] for line in seen[0]["csv"]] == ["epoch", "0", "1"]


def test_a_file_that_all_workers_save_is_whole(seen):
    assert everywhere(seen, "saved") == 0


def test_checkpoints_that_all_workers_write_are_restored_in_one_process(seen):
    assert everywhere(seen, "checkpoints") == {"ckpt-2": 0, "written": 0, "steps": 8}


def test_an_interrupted_job_continues_on_all_workers_from_the_backup_of_the_chief(seen):
    assert everywhere(seen, "restored") == {"epochs": 1, "difference": 0}


@pytest.mark.parametrize(
    "model", ["gan", "built_in_the_step", *campaign("vae", "siamese", "distiller")]
)
def test_a_model_without_call_trains_the_models_that_it_holds(seen, model):
    found = everywhere(seen, model)
    assert found["moved"] > 1e-3
    assert all(len(values) == 2 for values in found["history"].values())


@pytest.mark.parametrize("words", NOISE)
def test_a_clean_job_prints_no_alarm(job, words):
    assert words not in job.text
