"""MXNet on real clusters: exact learning and misuse."""

from collections import Counter

import pytest
from jobs import needs_mxnet, on, run

from lbbsp_core import read_run

pytestmark = needs_mxnet
TOLERANCE = 2e-6
# Servers, and the cases of a job that has so many.
CASES = [
    *on(
        2,
        "sgd",
        "adam",
        "hybrid_deferred",
        "mean_loss",
        "accumulated",
        "added_to_sums",
        "two_devices",
        "two_calls",
        "loader_threads",
        "batch_norm_hybrid",
        "half_precision",
        campaign=["loader_processes", "batch_norm"],
    ),
    *on(1, campaign=["sgd", "adam", "batch_norm_hybrid"]),
]
EPOCH, X = 6, 32  # steps, samples a step, of mx_fitting


def job(script, *args, workers, **options):
    return run(script, *args, workers=workers, framework="mxnet", **options)


# --- exact learning -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(request, clusters):
    """Results of both jobs: by number of servers, then by case."""
    options = {"workers": 3, "framework": "mxnet"}
    jobs = clusters.run_chosen(request, "mx_equivalence", "servers", **options)
    return {servers: each.results(0) for servers, each in jobs.items()}


@pytest.mark.parametrize(("servers", "case"), CASES)
def test_uneven_changing_batches_learn_what_one_process_learns(learned, servers, case):
    found = learned[servers][case]
    assert found["moved"] > 0.01, "a case that learns nothing would prove nothing"
    assert found["sizes"] > 2
    assert found["difference"] <= TOLERANCE


# --- misuse ---------------------------------------------------------------------------------------

EXPECTED = {
    "no_sampler": "has used neither its batch_sampler nor its sizes: pass DataLoader(",
    "other_size": "must be called with the 8 samples",
    "update_alone": "update must follow allreduce_grads",
    "unknown_store": "one of dist_sync, dist_device_sync, dist_async, local, device, ",
    "second_kind": "already has a store 'dist_sync'",
    "mean_and_add": "mean_loss must be False where gradients accumulate",
    "estimator_mean": "the loss must be per sample, got one number for 8 samples",
    "estimator_trainer": "must be an lbbsp_mx.Trainer, got mxnet.gluon.trainer.Trainer",
    "norm_mean": "SyncBatchNorm needs the loss per sample",
    "norm_devices": "SyncBatchNorm needs one device per worker, got 2",
    "norm_unconnected": "is not connected to the other workers",
    "unknown_option": "there is no option 'polcy': did you mean 'policy'",
    "different_seed": "workers disagree on seed: worker 0 has 0, worker 1 has 7",
    "different_batch": "disagree on global_batch_size: worker 0 has 16, worker 1 has 8",
    "different_samples": "disagree on number of samples: worker 0 has 64, worker 1 has 63",
    "different_layer": "disagree on parameters: worker 0 has (2, 4) float32, (2,) float32, worker "
    "1 has (3, 4) float32, (3,) float32",
    "different_rate": "lr=0.2, momentum=0.0",
    "different_schedule": "step=11, ",
    "different_weights": "workers have different weights at step 6, where they are compared every "
    "6 steps",
    "different_noise": "the optimizer draws other noise there, or a layer changes a parameter",
    "different_loss": "disagree on mean_loss: worker 0 has 0, worker 1 has 1",
}


@pytest.fixture(scope="module")
def said(clusters):
    """What each rank answered to each misuse."""
    answers = clusters.run(
        "mx_misuse", *EXPECTED, "names_for_objects", workers=2, framework="mxnet"
    )
    assert answers.status == 0
    return [answers.results(rank) for rank in range(2)]


@pytest.mark.parametrize("misuse", EXPECTED)
def test_both_workers_name_the_value_and_the_cure(said, misuse):
    for rank in range(2):
        assert EXPECTED[misuse] in said[rank][misuse]
        assert "Error: " in said[rank][misuse]


def test_a_name_stands_for_its_object_on_another_worker(said):
    assert [each["names_for_objects"] for each in said] == ["no error"] * 2


def test_mxnet_listens_on_the_loopback_interface_under_the_launcher(said):
    """As docs/security.md says: workers, servers and scheduler."""
    for each in said:
        assert set(each["addresses"]) == {"127.0.0.1"}, each["addresses"]


# --- starting -------------------------------------------------------------------------------------


def test_a_gradient_does_not_overtake_the_broadcast_of_its_parameter(clusters):
    started = clusters.run("mx_starting", workers=2, framework="mxnet")
    assert [started.results(rank)["wrong"] for rank in range(2)] == [0, 0]


# --- communication --------------------------------------------------------------------------------


def test_sums_of_the_top_arrive_while_those_below_are_computed(tmp_path, monkeypatch):
    """The backward pass waits below the top layer until the sum of that has arrived."""
    # By default, operators of MXNet share so little memory that one that waits holds up others.
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", "64")
    overlapped = job("mx_overlap", str(tmp_path), workers=2)
    assert overlapped.status == 0
    large, small = overlapped.results(0).values()
    assert min(large) > 0
    assert set(small) == {0}, "a small network is one part"


# --- leaving --------------------------------------------------------------------------------------


def test_workers_go_on_and_leave_while_another_still_predicts(tmp_path, monkeypatch):
    """Its messages come after the sums of the gradients: nobody leaves, or moves on, without."""
    monkeypatch.setenv("LBBSP_METRICS_FILE", str(tmp_path / "job.prom"))
    done = job("mx_leaving", workers=2, run_dir=tmp_path)
    assert done.status == 0
    assert read_run(tmp_path).steps[-1].step == 15
    assert 'lbbsp_step{run="job"} 15\n' in (tmp_path / "job.prom").read_text()
    assert done.results(0)["weights"] == done.results(1)["weights"]


@pytest.mark.campaign
def test_a_worker_that_exits_with_an_error_does_not_wait():
    assert job("mx_leaving", "3", workers=2).status == 3


# --- trainings of all kinds -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(clusters, tmp_path_factory):
    """What each rank reported."""
    folder = str(tmp_path_factory.mktemp("shared"))
    trained = clusters.run("mx_fitting", folder, workers=3, servers=2, framework="mxnet")
    assert trained.status == 0
    return [trained.results(rank) for rank in range(3)]


def everywhere(seen, name):
    """The one value that all ranks reported."""
    assert seen[0][name] == seen[1][name] == seen[2][name]
    return seen[0][name]


@pytest.mark.parametrize(
    ("loader", "lag"), [("none", 1), ("threads", 6), ("one_ahead", 3), ("processes", 6)]
)
def test_every_sample_once_an_epoch_however_far_loaders_fetch_ahead(seen, loader, lag):
    drawn = Counter(sample for rank in seen for sample in rank[f"drawn_{loader}"])
    assert drawn == dict.fromkeys(range(EPOCH * X), 2)
    assert everywhere(seen, f"lag_{loader}") == lag


@pytest.mark.parametrize("case", ["memory", "after_leaving", "over_a_restart", "over_a_checkpoint"])
def test_no_sample_is_lost_or_doubled(seen, case):
    drawn = Counter(sample for rank in seen for sample in rank[f"drawn_{case}"])
    assert drawn == dict.fromkeys(range(EPOCH * X), 1)


def test_memory_limits_bound_the_batches_after_those_drawn_before_the_handshake(seen):
    sizes = seen[0]["sizes_memory"]
    assert sizes[0] == 11
    assert max(sizes[-2:]) <= 8


def test_a_restart_learns_what_an_unbroken_run_learns(seen):
    assert all(rank["restart"] <= TOLERANCE for rank in seen)
    assert all(rank["over_a_checkpoint"] <= TOLERANCE for rank in seen)
    assert everywhere(seen, "no_checkpoint") is False
    assert everywhere(seen, "checkpoint") == [True, 0, 0.1]
    assert everywhere(seen, "checkpoint_at_end") == 1
    assert everywhere(seen, "generations") == ["step-000000004.npz", "step-000000006.npz"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("other_data", "number of samples was 192, and is 160 now"),
        ("other_seed", "seed was 3, and is 4 now"),
        ("other_seed_states", "seed was 3, and is 4 now"),
        ("other_network", "had the shape (2, 4) and type float32, and has (3, 4)"),
        ("other_optimizer", "is of the optimizer SGD, and the trainer has Adam"),
        ("own_folders", "(of steps 4, none, none, by rank): use a folder"),
    ],
)
def test_checkpoints_of_other_jobs_are_refused_with_the_reason(seen, case, reason):
    assert all(reason in rank[case] for rank in seen)


def test_batches_that_belong_to_no_step_are_refused(seen):
    assert "iterate the loader again" in everywhere(seen, "stale")


def test_workers_that_part_ways_are_told_so(seen):
    for rank in seen:
        assert "at another step or in another order" in rank["left_alone"]
        assert "disagree on lag" in rank["fetch_differently"]


def test_the_estimator_continues_from_its_checkpoint_and_makes_what_is_left(seen):
    for rank in seen:
        broken, rest, complete, complete_in_batches = rank["estimated"]
        assert broken[0] == 5
        assert rest[0] == 2 * EPOCH - 5, "the first fit has written its last state"
        assert (complete[0], complete_in_batches[0]) == (0, 0)
        for _, difference in (rest, complete, complete_in_batches):
            assert difference <= TOLERANCE


@pytest.mark.parametrize("folder", ["saved", "saved_by_{}"])
def test_only_worker_0_writes_to_a_folder_of_all_from_which_all_continue(seen, folder):
    for rank, found in enumerate(seen):
        first, files, second, difference = found[folder]
        writes = rank == 0 or folder != "saved"
        assert (first, second) == ((EPOCH, 1) if writes else (0, 0))
        assert files == 2, "the newest parameters and states"
        assert difference <= TOLERANCE
