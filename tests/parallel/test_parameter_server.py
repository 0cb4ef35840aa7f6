"""Asynchronous training through TensorFlow's parameter servers, with real processes."""

import time
from collections import Counter, defaultdict

import pytest
from jobs import BOUND_SECONDS, run

from lbbsp_core import read_run

NEEDS_SKLEARN = True
MISUSE = {
    "outside_scope": "must belong to the strategy of lbbsp_tf.parameter_server_strategy(), got",
    "not_compiled": "must be compiled: call model.compile",
    "accumulation": "gradient_accumulation_steps must be None",
    "no_loss": "Lossless.train_step computed no loss: it must call self.compute_loss",
    "epochs": "epochs must be an integer >= 1, got 0",
    "batch_size": "batch_size must be an integer >= 1, got 0",
    "small_data": "num_samples = 83 < global_batch_size = 84",
    "lengths": "got shapes [(83, 4), (9,)]",
    "labels": "InvalidArgumentError: ",
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Two workers, the second held back, and one server."""
    folder = tmp_path_factory.mktemp("asp")
    job = run(
        "parameter_server",
        "together",
        workers=2,
        servers=1,
        speeds=[1, 0.3],
        run_dir=folder,
    )
    assert job.status == 0, job.text
    return job.results(0), read_run(folder)


def test_every_sample_is_used_exactly_once_an_epoch(job):
    said, _ = job
    assert said["uses"] == [4.0] * 83
    assert said["iterations"] == 4 * 11  # 83 samples in batches of 8


def test_what_is_counted_has_entered_the_model(job):
    said, _ = job
    assert sorted(push for push, _, _ in said["seen"]) == list(range(30))
    for push, staleness, entered in said["seen"]:
        # The other worker may have changed the model, and not be counted yet.
        assert push - staleness <= entered <= push + 1


def test_the_model_learns(job):
    said, _ = job
    assert said["accuracy"] > 0.7  # 0.86 and more was seen; by chance it is 0.1
    assert said["loss"][-1] < 0.3 * said["loss"][0]


def test_the_record_has_each_push_in_order(job):
    _, record = job
    assert [push.push for push in record.pushes] == list(range(4 * 47))  # 1500 samples in 32s
    assert Counter(push.samples for push in record.pushes) == {32: 4 * 46, 28: 4}
    assert all(0 < push.busy_seconds < push.seconds for push in record.pushes)
    header = record.header
    assert (header.sync, header.framework) == ("asp", "tensorflow")
    assert (header.workers, header.servers) == (2, 1)
    assert header.hosts == ("127.0.0.1",) * 2
    assert header.devices == ("cpu",) * 2
    assert (header.global_batch_size, header.batch_size, header.num_samples) == (
        64,
        32,
        1500,
    )
    assert header.versions.keys() == {"lbbsp", "tensorflow", "keras", "python"}


def test_the_faster_worker_pushes_more(job):
    _, record = job
    pushes_of = Counter(push.worker for push in record.pushes)
    assert pushes_of[0] > pushes_of[1] > 0
    assert max(push.lead for push in record.pushes if push.worker == 0) > 1


def test_staleness_and_lead_are_what_the_order_of_pushes_makes_them(job):
    """The model that a push is of was read after its worker's last push, and before this one."""
    _, record = job
    pushes_of, last = defaultdict(int), {}
    for push in record.pushes:
        worker, number = push.worker, push.push
        assert push.iteration == pushes_of[worker]
        assert 0 <= push.staleness <= number - last.get(worker, -1) - 1
        assert 0 <= push.lead <= pushes_of[worker]
        pushes_of[worker] += 1
        last[worker] = number
    assert max(push.staleness for push in record.pushes) > 0
    # Who has fewer pushes at a time leads nobody then.
    assert all(push.lead == 0 or push.iteration > 0 for push in record.pushes)


@pytest.mark.parametrize("misuse", MISUSE)
def test_errors_name_the_value_and_the_cure(job, misuse):
    said, _ = job
    assert MISUSE[misuse] in said[misuse]
    assert "Error: " in said[misuse]


@pytest.mark.campaign
def test_one_worker_learns_what_plain_keras_learns():
    job = run("parameter_server", "alone", workers=1, servers=2)
    assert job.status == 0, job.text
    said = job.results(0)
    assert said["difference"] < 2e-6 < 0.1 < said["moved"]
    assert said["loss_difference"] < 2e-6


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "name"), [("worker", "worker 1"), ("ps", "server 0")])
def test_when_a_worker_or_a_server_dies_all_are_gone_soon(kind, name, tmp_path, capfd):
    job = run("parameter_server", "kill", kind, workers=2, servers=1, run_dir=tmp_path)
    ended = time.time()
    assert job.status == 137
    failed = next(line for line in job.lines[0] if line.startswith("FAILING"))
    assert ended - float(failed.split()[1]) < BOUND_SECONDS
    assert f"{name} was ended by SIGKILL" in capfd.readouterr().err
