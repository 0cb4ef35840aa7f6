"""Checkpoints and saved states of the gluon trainer, with a single worker."""

import logging
import os
import pickle
import signal
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from helpers import DATA, FEATURES, LABELS, LOSS, SAMPLES, X, backward, learn, network, weights
from mxnet import gluon
from mxnet.gluon.contrib.estimator import EpochEnd, Estimator
from waits import HANG_SECONDS, until

import lbbsp_mx
from lbbsp_core.runtime.checkpoint.checkpoint import (
    newest_checkpoint,
    read_checkpoint,
    write_file,
)
from lbbsp_core.runtime.reliability import preemption
from lbbsp_mx.reliability.states import optimizer_state, read_optimizer
from lbbsp_mx.store.native import runtime

pytestmark = pytest.mark.usefixtures("writes_each", "patient")


@pytest.fixture(autouse=True)
def default_of_sigterm(monkeypatch):
    """Restores it; and none of these processes ends because its next step is late."""
    monkeypatch.setattr(preemption, "_STEP_SECONDS", HANG_SECONDS)
    yield
    for handler in list(preemption._open):
        handler.close()


def trainer(net, optimizer="adam", sampler=True, **options):
    options = {"learning_rate": 0.05, **options}
    it = lbbsp_mx.Trainer(net.collect_params(), optimizer, options, global_batch_size=X)
    return it, it.batch_sampler(SAMPLES) if sampler else None


def epoch(it, net, sampler, steps=99):
    learn(net, it, gluon.data.DataLoader(DATA, batch_sampler=sampler), steps=steps)


def same(net, other):
    return all(np.array_equal(a, b) for a, b in zip(weights(net), weights(other), strict=True))


class Decay(mx.lr_scheduler.LRScheduler):
    """A schedule whose rate depends on how often it was asked."""

    asked = 0

    def __call__(self, num_update):
        self.asked += 1
        return self.base_lr * 0.97**self.asked


FURTHER = ["nag", "signum", "ftml", "lars", "lamb", "adagrad", "rmsprop", "adadelta"]
FURTHER += ["ftrl", "adamax"]


@pytest.mark.parametrize(
    "optimizer",
    [
        *("sgd", "momentum", "adam", "nadam", "lbsgd"),
        *(pytest.param(name, marks=pytest.mark.campaign) for name in FURTHER),
    ],
)
def test_every_optimizer_continues_exactly(optimizer, tmp_path):
    options = {"momentum": 0.9} if optimizer in ("momentum", "nag") else {}
    optimizer = "sgd" if optimizer == "momentum" else optimizer
    unbroken, broken, rest = network(), network(), network()
    batch = mx.nd.array(FEATURES[:X]), mx.nd.array(LABELS[:X])

    def train(net, it, steps):
        for _ in range(steps):
            backward(net, *batch)
            it.step(X)

    train(unbroken, trainer(unbroken, optimizer, False, lr_scheduler=Decay(), **options)[0], 7)
    first, _ = trainer(broken, optimizer, False, lr_scheduler=Decay(), **options)
    train(broken, first, 4)
    first.save(tmp_path)
    second, _ = trainer(rest, optimizer, False, lr_scheduler=Decay(), **options)
    assert second.load(tmp_path)
    train(rest, second, 3)
    assert same(unbroken, rest)
    assert not same(broken, rest)


class WarmUp(mx.lr_scheduler.LRScheduler):
    """A schedule that calls others, which keep states of their own, as GluonCV's do."""

    def __init__(self, *schedulers):
        super().__init__()
        self.first, self.schedulers = schedulers[0], [*schedulers]
        self.first.outer = self

    def __call__(self, num_update):
        rates = [each(num_update) for each in self.schedulers]
        return min(1.0, 0.2 * num_update) * sum(rates) / len(rates)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda: WarmUp(Decay(0.2), WarmUp(mx.lr_scheduler.FactorScheduler(2, 0.5), Decay(0.3))),
        lambda: mx.lr_scheduler.CosineScheduler(7, base_lr=0.1, warmup_steps=3),
    ],
)
def test_schedules_within_schedules_continue_exactly(schedule, tmp_path):
    unbroken, broken, rest = network(), network(), network()
    it, sampler = trainer(unbroken, lr_scheduler=schedule())
    epoch(it, unbroken, sampler)
    first, sampler = trainer(broken, lr_scheduler=schedule())
    first.resume(tmp_path, every=1)
    epoch(first, broken, sampler, 1)
    first._checkpoints.schedule.flush()
    second, sampler = trainer(rest, lr_scheduler=schedule())
    assert second.resume(tmp_path, every=3)
    epoch(second, rest, sampler)
    assert same(unbroken, rest)
    assert second.learning_rate == it.learning_rate


def test_what_the_script_has_changed_since_the_checkpoint_is_told(tmp_path, caplog):
    first, _ = trainer(network(), "sgd", momentum=0.9, lr_scheduler=Decay(0.2))
    first.optimizer.momentum = 0.8
    first.save(tmp_path)
    again, _ = trainer(network(), "sgd", momentum=0.9, lr_scheduler=Decay(0.2))
    assert again.load(tmp_path)
    assert "in the script now" not in caplog.text, "the training has changed the momentum"
    other, _ = trainer(network(), "sgd", momentum=0.7, lr_scheduler=Decay(0.3))
    assert other.load(tmp_path)
    assert other.optimizer.momentum == 0.8
    momentum, rate = (each for each in caplog.messages if "in the script now" in each)
    assert momentum.startswith("momentum of the optimizer is 0.7 in the script now, and was 0.9")
    assert "of the learning rate schedule is 0.3 in the script now, and was 0.2" in rate
    assert "the value in the checkpoint counts; to take another one" in caplog.text


def test_a_schedule_with_other_inner_ones_is_refused(tmp_path):
    it, _ = trainer(network(), lr_scheduler=WarmUp(Decay()))
    it.save_states(tmp_path / "states")
    for other in (mx.lr_scheduler.FactorScheduler(2), mx.lr_scheduler.PolyScheduler(9)):
        changed, _ = trainer(network(), lr_scheduler=WarmUp(other))
        with pytest.raises(ValueError, match=r"schedule\.first Decay, and the trainer has "):
            changed.load_states(tmp_path / "states")


def test_what_cannot_be_saved_later_is_reported_once_and_the_training_continues(tmp_path, caplog):
    net = network()
    it, sampler = trainer(net)
    it.resume(tmp_path, every=1)
    it.optimizer.logger = logging.getLogger()
    with caplog.at_level(logging.WARNING, "lbbsp"):
        epoch(it, net, sampler)
    assert it._session.step == 4
    assert caplog.text.count("no checkpoint, and the training continues: the attribute") == 1


def test_resume_writes_regularly_to_its_folder_and_continues(tmp_path):
    unbroken, broken, rest = network(), network(), network()
    it, sampler = trainer(unbroken)
    for _ in range(2):
        epoch(it, unbroken, sampler)
    first, sampler = trainer(broken)
    assert not first.resume(tmp_path, every=2)
    epoch(first, broken, sampler)
    first.save(tmp_path / "own")
    epoch(first, broken, sampler, 3)  # killed after 7 steps of 4 an epoch
    first._checkpoints.schedule.flush()
    written = [[path.stem for path in sorted(folder.glob("step*"))]
               for folder in (tmp_path, tmp_path / "own")]  # fmt: skip
    assert written == [["step-000000004", "step-000000006"], ["step-000000004"]]
    second, sampler = trainer(rest)
    assert second.resume(tmp_path, every="epoch")
    assert second.epoch == 1
    epoch(second, rest, sampler)
    assert second.epoch == 2
    assert same(unbroken, rest)
    second._checkpoints.schedule.flush()
    assert (tmp_path / "step-000000008.npz").exists(), "at the end of the epoch"
    with pytest.raises(ValueError, match="every must be 'epoch' or a number of steps >= 1, got 0"):
        second.resume(tmp_path, every=0)


def test_sigterm_leaves_with_a_checkpoint_and_status_143(tmp_path, capsys):
    net = network()
    it, sampler = trainer(net)
    it.resume(tmp_path, every=100)
    epoch(it, net, sampler, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    epoch(it, net, sampler, 1)  # asks all workers
    with pytest.raises(SystemExit) as left:
        epoch(it, net, sampler, 1)
    saved = weights(net)
    assert left.value.code == 143
    assert "because a worker got SIGTERM" in capsys.readouterr().err
    again = network()
    second, _ = trainer(again)
    assert second.load(tmp_path)
    np.testing.assert_equal(weights(again), saved)


@pytest.fixture
def ends(monkeypatch):
    """Statuses with which the process would end for want of a step, which it does not await."""
    statuses = []
    monkeypatch.setattr(preemption, "end_now", statuses.append)
    monkeypatch.setattr(preemption, "_STEP_SECONDS", 0.0)
    monkeypatch.setattr(preemption, "_LOOK_SECONDS", 0.02)
    return statuses


@pytest.mark.parametrize("steps", [99, 2], ids=["after an epoch", "in an epoch that was left"])
@pytest.mark.parametrize("every", [100, 1])
def test_sigterm_after_the_last_step_leaves_too(tmp_path, capfd, ends, steps, every):
    net = network()
    it, sampler = trainer(net)
    it.resume(tmp_path, every=every)
    epoch(it, net, sampler, steps)
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: ends)
    assert ends == [143]
    assert "it got SIGTERM, and no step has followed" in capfd.readouterr().err
    again = network()
    second, _ = trainer(again)
    assert second.load(tmp_path)
    assert second._session.step == min(steps, 4)
    assert same(again, net)


@pytest.mark.parametrize("order", [True, False])
def test_a_script_that_ends_after_sigterm_does_not_wait_for_the_others(tmp_path, ends, order):
    it, _ = trainer(network(), sampler=order)
    it.resume(tmp_path)
    os.kill(os.getpid(), signal.SIGTERM)
    it._checkpoints.schedule.close()
    until(lambda: ends)
    other, _ = trainer(network())
    for handler in list(preemption._open):
        handler.close()
    other.resume(tmp_path)
    other._checkpoints.schedule.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_in_the_last_step_leaves_at_its_end(tmp_path, ends):
    net = network()
    it, sampler = trainer(net)
    it.resume(tmp_path, every=100)
    epoch(it, net, sampler, 3)
    for number, (x, y) in enumerate(gluon.data.DataLoader(DATA, batch_sampler=sampler)):
        backward(net, x, y)
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(SystemExit) as left:
                it.step(len(x))
            break
        it.step(len(x))
    assert left.value.code == 143
    assert newest_checkpoint(tmp_path).step == 8
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not ends


def test_a_step_may_follow_while_its_batch_is_drawn_and_not_between_epochs(tmp_path):
    net = network()
    it, sampler = trainer(net)
    it.resume(tmp_path, every="epoch")
    (handler,) = preemption._open
    epoch(it, net, sampler)
    assert handler.is_idle()
    loader = iter(gluon.data.DataLoader(DATA, batch_sampler=sampler))
    x, y = next(loader)
    assert not handler.is_idle()
    backward(net, x, y)
    it.step(len(x))
    assert not handler.is_idle(), "within an epoch"


def test_the_estimator_writes_the_last_state_and_metrics_and_hears_sigterm_no_more(
    tmp_path, monkeypatch
):
    net, path = network(), tmp_path / "job.prom"
    monkeypatch.setenv("LBBSP_METRICS_FILE", str(path))
    it, sampler = trainer(net)
    estimator = Estimator(net, LOSS, mx.metric.Accuracy(), trainer=it)
    handler = lbbsp_mx.LoadBalancingHandler(checkpoint=tmp_path / "states", every=100)
    loader = gluon.data.DataLoader(DATA, batch_sampler=sampler)
    heard = []

    class Hears(EpochEnd):
        def epoch_end(self, estimator, *args, **kwargs):
            heard.append(signal.getsignal(signal.SIGTERM))

    for steps in (4, 8):
        estimator.fit(loader, epochs=1, event_handlers=[handler, Hears()])
        assert newest_checkpoint(tmp_path / "states").step == steps
        assert f'lbbsp_step{{run="job"}} {steps - 1}\n' in path.read_text()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert heard == [preemption._handle] * 2


def test_the_metrics_of_the_last_step_are_written_before_the_worker_leaves(tmp_path, monkeypatch):
    net, path = network(), tmp_path / "job.prom"
    monkeypatch.setenv("LBBSP_METRICS_FILE", str(path))
    it, sampler = trainer(net)
    epoch(it, net, sampler)
    runtime().endings.run()
    assert 'lbbsp_step{run="job"} 3\n' in path.read_text()


# --- saved states ---------------------------------------------------------------------------------


def test_torn_states_are_refused_and_an_interrupted_write_keeps_the_old_ones(tmp_path, monkeypatch):
    net = network()
    it, sampler = trainer(net)
    epoch(it, net, sampler, 1)
    file = tmp_path / "states"
    it.save_states(file)
    whole = file.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        it.save_states(file)
    assert file.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [file], "no unfinished file is left"
    for torn in whole[: len(whole) // 2], whole[:-30], b"", whole.replace(b"Adam", b"Bdam"):
        file.write_bytes(torn)
        with pytest.raises(ValueError, match="is damaged or no checkpoint"):
            it.load_states(file)


def test_settings_in_a_file_that_are_no_settings_do_not_stop_a_load_half_way(tmp_path):
    net = network()
    it, sampler = trainer(net)
    epoch(it, net, sampler, 2)
    it.save_states(tmp_path / "states")
    saved = read_checkpoint(tmp_path / "states")
    saved.state["given"] = ["the optimizer"]
    write_file(tmp_path / "states", saved)
    again, _ = trainer(network())
    again.load_states(tmp_path / "states")
    assert again._session.step == 2


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_pickles_are_refused_and_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = network()
    it, _ = trainer(net)
    gluon.Trainer(net.collect_params(), "adam").save_states("stock")
    with pytest.raises(ValueError, match="stock is a pickle, as gluon's own Trainer"):
        it.load_states("stock")
    Path("bomb").write_bytes(pickle.dumps(Bomb()))
    np.savez("bomb.npz", header=np.array([Bomb()], object))
    for file in ("bomb", "bomb.npz"):
        with pytest.raises(ValueError, match=r"pickle, .*: load the parameters alone|is damaged"):
            it.load_states(file)
    assert not (tmp_path / "exploded").exists()


def test_what_cannot_be_saved_is_named_with_the_remedy(tmp_path):
    it, _ = trainer(network())
    it.optimizer.logger = logging.getLogger()
    with pytest.raises(ValueError, match="attribute 'logger' of Adam is a RootLogger"):
        it.save_states(tmp_path / "states")


def test_attributes_of_other_objects_are_refused():
    it, _ = trainer(network())
    state, arrays = optimizer_state(it)
    optimizer, schedule, scaler = state["objects"]

    def changed(**attributes):
        return [{**optimizer, "attributes": attributes}, schedule, scaler]

    for objects, message in [
        ([{**optimizer, "class": "SGD"}, schedule, scaler], "SGD, and the trainer has Adam"),
        ([optimizer, {**schedule, "class": "Decay"}, scaler], "learning rate schedule Decay, and"),
        (changed(__class__=1), "has an attribute '__class__', no data"),
        (changed(param_dict=1), "has an attribute 'param_dict', no data"),
        (changed(update=1), "has an attribute 'update', no data"),
        (changed(learning_rate=1), "has an attribute 'learning_rate', no data"),
        ([optimizer], "shorter than argument 1"),
        (None, "cannot be read"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_optimizer(it, {**state, "objects": objects}, arrays)
    with pytest.raises(ValueError, match="cannot be read"):
        read_optimizer(it, {**state, "states": 7}, arrays)


def test_a_folder_of_another_job_is_refused_by_name(owned_folder):
    folder, owner = owned_folder
    it, _ = trainer(network())
    for use in (it.resume, it.save):
        with pytest.raises(ValueError, match=f"process {owner.pid} on the-host writes its checkp"):
            use(folder)
