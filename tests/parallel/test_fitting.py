"""`fit` as people use it: callbacks, repetition, validation, checkpoints, on three workers."""

import socket
from collections import Counter
from itertools import pairwise
from statistics import fmean

import pytest
from surfaces import check_recent, check_surfaces, part_of

from lbbsp_core import read_run
from lbbsp_core.runtime.exchange.handshake import cpu
from lbbsp_core.runtime.record.figures import Figures

EPOCH, X = 6, 32  # steps, samples a step


@pytest.fixture(scope="module")
def seen(clusters, tmp_path_factory):
    """What each rank reported."""
    folder = tmp_path_factory.mktemp("shared")
    job = clusters.run("fitting", str(folder), workers=3)
    assert job.status == 0
    return [{**job.results(rank), "folder": folder} for rank in range(3)]


def everywhere(seen, name):
    """The one value that all ranks reported."""
    assert seen[0][name] == seen[1][name] == seen[2][name]
    return seen[0][name]


@pytest.mark.parametrize(
    ("fits", "steps"),
    [
        ("stop_on_one_worker", 4),  # the wish of step 3 rides on step 4
        ("stop_at_epoch_end_on_one_worker", EPOCH),
        ("steps_in_all", 4 * EPOCH),  # of repeated fits
        ("after_a_failed_fit", EPOCH),
    ],
)
def test_all_workers_train_the_same_steps(seen, fits, steps):
    assert everywhere(seen, fits) == steps


def test_a_nan_that_one_worker_draws_ends_the_run_everywhere(seen):
    assert everywhere(seen, "terminate_on_nan") in (3, 4)


def test_callbacks_that_watch_the_logs_act_alike(seen):
    found = everywhere(seen, "early_stopping")
    assert found["steps"] == 2 * EPOCH
    assert found["rate"] == pytest.approx(0.05)


def test_logs_are_the_same_bits_on_all_workers(seen):
    assert everywhere(seen, "logs")


def test_the_chief_writes_a_checkpoint_that_evaluates_as_logged(seen):
    loss, accuracy, logged_loss, logged_accuracy = seen[0]["checkpoint"]
    assert loss == pytest.approx(logged_loss, abs=1e-6)
    assert accuracy == pytest.approx(logged_accuracy)


def test_every_sample_is_drawn_once_an_epoch_over_all_workers(seen):
    drawn = Counter(sample for rank in seen for sample in rank["drawn"])
    assert drawn == dict.fromkeys(range(EPOCH * X), 3)


@pytest.mark.parametrize(("which", "steps"), [("first", 3), ("second", EPOCH)])
def test_two_data_sets_in_turn_are_each_drawn_in_their_own_order(seen, which, steps):
    drawn = Counter(sample for rank in seen for sample in rank[f"drawn_of_the_{which}_of_two"])
    assert drawn == dict.fromkeys(range(steps * X), 1)


def test_a_batch_is_at_most_twice_its_even_share_by_default(seen):
    assert max(everywhere(seen, "sizes_by_default")) == 2 * 11
    assert [len(rank["notices"]) for rank in seen] == [1, 0, 0]
    assert "limits=lbbsp_core.Limits(1, 32)" in seen[0]["notices"][0]


def test_all_surfaces_say_the_same_figures(seen, tmp_path):
    logs, run = everywhere(seen, "figures"), read_run(seen[0]["folder"] / "logs")
    assert len(run.steps) == 3 * EPOCH
    points = {(tag, step): value for name, step, tag, value in seen[0]["points"] if name == "all"}
    for epoch in range(3):
        # All workers know the time of a step with the next one.
        steps = run.steps[epoch * EPOCH : (epoch + 1) * EPOCH - 1]
        folder = part_of(run, steps, tmp_path / f"epoch-{epoch}")
        of_epoch = Figures(*(logs[name][epoch] for name in Figures._fields))
        check_surfaces(folder, logs=of_epoch)
        assert 0 < of_epoch.waiting < of_epoch.waiting_and_communication < 1
    for last in range(1, 3 * EPOCH, 2):
        pair = part_of(run, run.steps[last - 1 : last + 1], tmp_path / f"point-{last}")
        scalars = Figures(*(points[f"lbbsp/{name}", last] for name in Figures._fields))
        check_surfaces(pair, TensorBoard=scalars)
    check_surfaces(seen[0]["folder"] / "logs")
    check_recent(seen[0]["folder"] / "logs", seen[0]["folder"] / "logs.prom")
    assert everywhere(seen, "steps") == [
        [line.step, [*line.sizes], [*line.busy_seconds]] for line in run.steps
    ]


def test_all_callbacks_see_the_figures_from_the_first_step_and_epoch_on(seen):
    for keys in everywhere(seen, "keys_of_steps"):
        assert keys == sorted(["accuracy", "loss", *Figures._fields])
    head, *rows = (line.split(",") for line in seen[0]["table"].splitlines())
    metrics = ["val_accuracy", "val_loss"]
    assert head == ["epoch", *sorted(["accuracy", "loss", *metrics, *Figures._fields])]
    for name, values in seen[0]["figures"].items():
        column = head.index(name)
        assert [float(row[column]) for row in rows] == pytest.approx(values)
    epochs = [line for line in seen[0]["progress"].splitlines() if line.startswith("6/6")]
    assert len(epochs) == 3
    assert not any(each["progress"] for each in seen[1:]), "worker 0 speaks for all"
    assert all(f" - {name}: " in line for name in Figures._fields for line in epochs)
    assert everywhere(seen, "without_figures") == ["accuracy", "loss"]


def test_each_worker_has_scalars_for_tensorboard_that_are_means_of_the_record(seen):
    steps = read_run(seen[0]["folder"] / "logs").steps
    found = {(run, tag, step): value for run, step, tag, value in seen[0]["points"]}
    assert len(found) == len(seen[0]["points"]), "each point is written once"
    assert {step for _, _, step in found} == set(range(1, 3 * EPOCH, 2))
    mixed = 0
    for last in range(1, 3 * EPOCH, 2):
        both = steps[last - 1 : last + 1]
        pair = [line for line in both if line.is_regular] or both
        mixed += 0 < len(pair) < len(both)
        for rank in range(3):
            busy = fmean(line.busy_seconds[rank] for line in pair)
            expected = {
                "batch_size": fmean(line.sizes[rank] for line in pair),
                "busy_seconds": busy,
                "waiting_seconds": fmean(max(line.busy_seconds) for line in pair) - busy,
            }
            known = [line for line in pair if line.predicted_seconds[rank] is not None]
            if known:
                predicted = sum(line.predicted_seconds[rank] for line in known)
                measured = sum(line.busy_seconds[rank] for line in known)
                expected["predicted_over_measured"] = predicted / measured
            written = {
                tag.removeprefix("lbbsp/"): value
                for (run, tag, step), value in found.items()
                if (run, step) == (f"worker_{rank}", last)
            }
            assert written == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert mixed, "a step that is excluded from learning, beside one that is not"
    changes = sum(a.sizes != b.sizes for a, b in pairwise(steps))
    assert changes == sum(x for (_, tag, _), x in found.items() if tag == "lbbsp/plan_changes")


def test_the_record_names_the_machines_and_the_times(seen):
    header, steps = (run := read_run(seen[0]["folder"] / "logs")).header, run.steps
    assert header.hosts == (socket.gethostname(),) * 3
    assert header.devices == (cpu(),) * 3
    times = [line.time for line in steps]
    assert header.started < times[0]
    assert times == sorted(times)
