"""MXNet jobs that are killed or preempted, restarted by the launcher, and continue exactly."""

import os
import tempfile
from collections import Counter

import pytest
from jobs import campaign, needs_mxnet, run
from mx_cluster import by_hand
from surfaces import check_surfaces

from lbbsp_core.runtime.checkpoint.checkpoint import newest_checkpoint

pytestmark = needs_mxnet
TOLERANCE = 2e-6
SAMPLES, STEPS, EPOCHS = 120, 5, 3  # of mx_restart
FAULT_STEP = 9  # there are checkpoints of 4 and 8 steps


@pytest.mark.parametrize(
    ("fault", "rank", "elastic", "workers", "steps"),
    [
        ("preempt", 1, 1, 2, {12}),  # it is exchanged in the next step, and obeyed after another
        # Perhaps while the chief wrote the second checkpoint.
        *campaign(("kill", 2, 2, 2, {4, 8}), ("kill", 0, None, 3, {4, 8})),
    ],
)
def test_a_broken_job_ends_with_the_weights_of_an_unbroken_one(
    tmp_path, fault, rank, elastic, workers, steps, capfd
):
    job = run(
        "mx_restart", str(tmp_path), fault, str(FAULT_STEP), str(rank), workers=3,
        framework="mxnet", max_restarts=1, elastic=elastic, run_dir=tmp_path / "run",
    )  # fmt: skip
    assert job.status == 0
    seen = [job.results(rank) for rank in range(3)]
    assert seen[0]["attempt_0"] == [3, False, 0]
    resumed = seen[0]["attempt_1"][2]
    assert resumed in steps
    for each in seen[:workers]:
        assert each["attempt_1"] == [workers, True, resumed]
        assert each["difference"] <= TOLERANCE
        assert each["moved"] > 0.01
    for epoch in range(EPOCHS):
        drawn = Counter(
            sample
            for step in range(epoch * STEPS, (epoch + 1) * STEPS)
            for each in seen
            for sample in each.get(f"step_{step}_{int(step >= resumed)}", [])
        )
        assert drawn == dict.fromkeys(range(SAMPLES), 1)
    said = capfd.readouterr().err
    if fault == "preempt":
        assert "left with status 143" in said
    assert f"restart 1 of 1 with {workers} workers" in said
    check_surfaces(tmp_path / "run")


def test_servers_outlive_the_last_checkpoint_if_every_process_gets_a_signal(tmp_path):
    """At once, as Slurm and spot machines do; loaders of data, too, outlive it."""
    with by_hand("mx_restart.py", str(tmp_path), "everyone", "6", "0") as cluster:
        cluster.wait_for_ends()
    assert [each.status for each in cluster.processes] == [143] * 4
    assert "server 0 got SIGTERM, and ends after the workers" in cluster.servers[0].text
    assert newest_checkpoint(tmp_path).step in (8, 9)
    assert all("to continue from the checkpoint" in each.text for each in cluster.workers)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("fault", "status", "steps"), [("everyone", 143, (8, 9)), ("kill_loading", 137, (4,))]
)
def test_launched_jobs_with_processes_that_load_data_leave_no_temporary_files(
    tmp_path, monkeypatch, fault, status, steps
):
    with tempfile.TemporaryDirectory() as folder:  # with a short name, as sockets need
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        job = run("mx_restart", str(tmp_path), fault, "6", "0", workers=2, framework="mxnet")
        assert not os.listdir(folder)
    assert job.status == status
    assert newest_checkpoint(tmp_path).step in steps


@pytest.mark.campaign
def test_workers_that_are_preempted_after_the_last_step_leave_with_a_checkpoint(tmp_path):
    job = run("mx_restart", str(tmp_path), "late", "0", "0", workers=2, framework="mxnet")
    assert job.status == 143
    assert job.text.count("because it got SIGTERM, and no step has followed") == 2
    assert newest_checkpoint(tmp_path).step == EPOCHS * STEPS, "which was not due"
