"""Module.fit on a balanced store of unequal workers, against Module in one process."""

import socket

import pytest
from jobs import needs_mxnet, run

from lbbsp_core import read_run
from lbbsp_core.runtime.exchange.handshake import cpu

pytestmark = needs_mxnet
WORKERS, EPOCHS = 3, 3
FITS = ["whole_script", "continued", "means", "sums", "shuffled", "devices", "discarded"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("module")


@pytest.fixture(scope="module")
def said(folder):
    """What each rank reported."""
    job = run("mx_module", str(folder), workers=WORKERS, servers=1, framework="mxnet")
    assert job.status == 0
    return [job.results(rank) for rank in range(WORKERS)]


@pytest.mark.parametrize("fit", FITS)
def test_all_learn_what_module_learns_in_one_process(said, fit):
    assert said[0][f"{fit}_error"] <= 2e-6
    assert all(each[f"{fit}_weights"] == said[0][f"{fit}_weights"] for each in said)


def test_the_plan_changes_and_covers_each_epoch(said):
    plans = list(zip(*(each["sizes"] for each in said), strict=True))
    assert plans[:3] == [(16, 5, 3), (4, 18, 2), (8, 8, 8)]
    assert [sum(plan) for plan in plans] == EPOCHS * [24, 24, 24, 7]
    assert len(set(plans)) > 3


def test_an_even_batch_gives_the_shapes(said):
    assert all(each["shapes"] == [8, [8, 6], "data"] for each in said)


def test_callbacks_see_each_epoch_and_the_trained_model(said):
    assert all(each["epochs"] == list(range(EPOCHS)) and each["loaded"] for each in said)


def test_the_run_record_has_every_step(said, folder):
    record = read_run(folder / "run.jsonl")
    plans = list(zip(*(each["sizes"] for each in said), strict=True))
    assert [line.sizes for line in record.steps[: len(plans)]] == plans
    assert len(record.steps) == len(plans) + len(plans) // EPOCHS, "and those of the second fit"
    assert record.header.hosts == (socket.gethostname(),) * len(said)
    assert record.header.devices == (cpu(),) * len(said)
    times = [record.header.started, *(line.time for line in record.steps)]
    assert times == sorted(times)


def test_waits_for_other_workers_are_not_busy_time(said, folder):
    for line in read_run(folder / "slow.jsonl").steps[1:]:
        assert line.busy_seconds == pytest.approx([0, 0, 0.1]), "a wait takes a second"


def test_a_batch_that_was_not_used_is_drawn_again(said):
    assert all(each["peeks"] for each in said)


@pytest.mark.parametrize(
    ("misuse", "answer"),
    [
        ("other_seed", "workers disagree on seed"),
        ("other_size", "workers disagree on global_batch_size"),
        ("other_handle", "workers disagree on last_batch_handle='discard'"),
        ("other_data", "samples of worker 1 differ"),
        ("other_shuffled", "create it with shuffle=False, from the same arrays on all workers"),
        ("in_workers", "needs the optimizer on the servers"),
        ("unused", "pass kvstore=store to Module.fit"),
        ("left_early", "draw a batch before each update, or call train.reset()"),
        ("prefetched", "leave PrefetchingIter and other threads out"),
        ("more_devices", "pass devices=2 to balance"),
        ("replaced", "balanced over other data now"),
        ("compressed", "or a balanced store in one job"),
    ],
)
def test_all_workers_are_told_what_is_wrong(said, misuse, answer):
    assert all(answer in each[misuse] for each in said)
