"""Checkpoints of `fit` on one worker: what is skipped, continued and refused."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import lbbsp_tf
from lbbsp_core.runtime.checkpoint.checkpoint import newest_checkpoint
from lbbsp_core.runtime.loop.checkpoint_schedule import CheckpointWriter
from lbbsp_core.runtime.reliability import preemption
from lbbsp_core.runtime.reliability.preemption import STATUS
from lbbsp_tf.reliability import checkpoints
from lbbsp_tf.reliability.model_state import ModelState

X, STEPS = 8, 5
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(X * STEPS, 3)).astype("f4")
TARGETS = rng.normal(size=(X * STEPS, 1)).astype("f4")


pytestmark = pytest.mark.usefixtures("writes_each")


@pytest.fixture(autouse=True)
def forgotten():
    yield
    new_process()


def new_process():
    """Forgets signals, and handlers of trainings that were interrupted."""
    for handler in list(preemption._open):
        handler.close()


def model(*units, optimizer="sgd"):
    keras.utils.set_random_seed(0)
    built = keras.Sequential([keras.layers.Dense(each) for each in units or (1,)])
    built.compile(optimizer, "mse")
    return built


class Counter(keras.callbacks.Callback):
    """Counts steps; may do something after one."""

    def __init__(self, at=None, act=None):
        super().__init__()
        self.at, self.act, self.steps = at, act, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.at:
            self.act(self.model)


def balancer(folder, every=2, **options):
    """Returns the balancer of a new process."""
    checkpoints._owners.clear()
    return lbbsp_tf.LoadBalancer(
        tf.distribute.get_strategy(), X, checkpoint=folder, every=every, **options
    )


def fit(it, built, *callbacks, seed=1, samples=X * STEPS, **options):
    data = it.dataset(FEATURES[:samples], TARGETS[:samples], seed=seed)
    options = {"epochs": 2, "verbose": 0, **options, "callbacks": [*callbacks, it]}
    built.fit(data, steps_per_epoch=it.steps_per_epoch, **options)
    return built


def interrupt(built):
    raise KeyboardInterrupt


def same(one, other):
    for mine, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_script_with_two_fits_skips_the_first_and_continues_the_second(tmp_path, capsys, caplog):
    def rate_falls(built):
        built.optimizer.learning_rate = 0.5

    def script(folder, first, second):
        it, built, histories = balancer(folder), model(), []
        for seed, counter in ((1, first), (2, second)):
            fit(it, built, counter, Counter(1, rate_falls), seed=seed)
            histories.append((built.history.epoch, built.history.history))
        return built, histories

    whole, histories = script(tmp_path / "whole", Counter(), Counter())
    with pytest.raises(KeyboardInterrupt):
        script(tmp_path / "broken", Counter(), Counter(8, interrupt))
    first, second = Counter(), Counter()
    continued, its_histories = script(tmp_path / "broken", first, second)
    same(continued, whole)
    assert its_histories == histories
    assert (first.steps, second.steps) == (0, 2 * STEPS - 6)
    assert "fit 0 of the script (counted from 0) is skipped" in capsys.readouterr().out
    assert "in the script now" not in caplog.text


def test_what_the_script_has_changed_since_the_checkpoint_is_told(tmp_path, caplog):
    def script(rate, beta, activation, *callbacks):
        built = model()
        built.layers[0].activation = keras.activations.get(activation)
        built.compile(keras.optimizers.Adam(rate, beta_1=beta), "mse")
        return fit(balancer(tmp_path), built, *callbacks)

    def rate_falls(built):
        built.optimizer.learning_rate = 0.01

    with pytest.raises(KeyboardInterrupt):
        script(0.1, 0.8, "tanh", Counter(2, rate_falls), Counter(5, interrupt))
    with pytest.raises(KeyboardInterrupt):
        script(0.1, 0.8, "tanh", Counter(1, interrupt))
    assert "in the script now" not in caplog.text, "the training has changed the rate"
    built = script(0.2, 0.7, "relu")
    assert float(built.optimizer.learning_rate) == pytest.approx(0.01)
    rate, beta, activation = (each for each in caplog.messages if "in the script now" in each)
    assert rate.startswith("learning_rate of optimizer 0 is 0.2")
    assert "the value in the checkpoint counts; to take another one, assign" in rate
    assert beta.startswith("beta_1 of optimizer 0 is 0.7 in the script now, and was 0.8")
    assert "the value in the script counts" in beta
    assert activation.startswith("activation of layer 1 (Dense) is 'relu'")


def test_two_balancers_of_a_process_do_not_share_a_folder(tmp_path):
    fit(balancer(tmp_path), model())
    second = lbbsp_tf.LoadBalancer(tf.distribute.get_strategy(), X, checkpoint=f"{tmp_path}/.")
    with pytest.raises(ValueError, match="another LoadBalancer of this process writes to"):
        fit(second, model())


def test_a_folder_of_another_job_is_refused_by_name(owned_folder):
    folder, owner = owned_folder
    with pytest.raises(ValueError, match=f"process {owner.pid} on the-host writes its checkpoints"):
        fit(balancer(folder), model())
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_skipped_fit_must_be_the_one_that_was_trained(tmp_path):
    def script(*fits):
        it = balancer(tmp_path)
        for built in fits:
            fit(it, built)

    script(model(), model(5))
    with pytest.raises(ValueError, match="a folder has the checkpoints of one model"):
        script(model(), model(5))
    with pytest.raises(ValueError, match="is of another job: number of the model's variables"):
        script(model(4, 1))


@pytest.mark.parametrize(
    ("callback", "until"),
    [
        # Both change the model when an epoch begins or ends.
        (lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2), STEPS + 3),
        (lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True), STEPS),
    ],
)
def test_what_callbacks_do_to_the_model_is_done_once(tmp_path, callback, until):
    def script(folder, *more):
        averaging = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        every = "epoch" if until == STEPS else 2
        built = model(optimizer=averaging)
        return fit(balancer(folder, every), built, *more, callback())

    class Ends(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if (epoch, until) == (1, STEPS):
                raise KeyboardInterrupt

    whole = script(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        script(tmp_path / "broken", Counter(until, interrupt) if until > STEPS else Ends())
    same(script(tmp_path / "broken"), whole)


def test_a_fit_that_a_callback_has_stopped_is_over_and_more_epochs_are_trained(tmp_path):
    stop = Counter(3, lambda built: setattr(built, "stop_training", True))
    stopped = fit(balancer(tmp_path / "stopped"), model(), stop)
    again = Counter()
    same(fit(balancer(tmp_path / "stopped"), model(), again), stopped)
    assert again.steps == 0
    fit(balancer(tmp_path / "longer"), model())
    more = Counter()
    same(fit(balancer(tmp_path / "longer"), model(), more, epochs=3),
         fit(balancer(tmp_path / "whole"), model(), epochs=3))  # fmt: skip
    assert more.steps == STEPS


def test_a_later_fit_of_the_same_model_starts_at_its_own_first_epoch(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(balancer(tmp_path), model(), Counter(8, interrupt))
    it, built, second = balancer(tmp_path), model(), Counter()
    fit(it, built)
    fit(it, built, second)
    assert second.steps == 2 * STEPS


def test_a_foreign_checkpoint_is_refused_with_the_reason(tmp_path):
    fit(balancer(tmp_path), model())
    for other, seed, fact in (
        (model(), 7, "seed was 1, and is 7"),
        (model(5), 1, r"variable 0 of the model was .*kernel \(3, 1\) float32, and is"),
        (model(optimizer="adam"), 1, "optimizer was SGD, and is Adam"),
    ):
        message = f"is of another job: {fact}.* choose another folder"
        with pytest.raises(ValueError, match=message):
            fit(balancer(tmp_path), other, seed=seed)


def test_a_damaged_checkpoint_is_passed_over_and_a_folder_of_them_refused(tmp_path, caplog):
    fit(balancer(tmp_path), model())
    *_, new = sorted(tmp_path.iterdir())
    new.write_bytes(new.read_bytes()[:-50])
    again = Counter()
    fit(balancer(tmp_path), model(), again)
    assert again.steps == 2
    assert "damaged" in caplog.text
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        fit(balancer(tmp_path), model())


class Counting(keras.layers.Layer):
    """Layer with a state that Keras does not know."""

    def __init__(self):
        super().__init__(name="counting")
        self.seen = {"batches": tf.Variable(0.0, trainable=False)}
        self.weight = self.add_weight(shape=(), trainable=False)
        self.its_value = self.weight.value

    def call(self, x):
        return x + 0 * self.seen["batches"]


def test_states_that_keras_does_not_know_are_named_once(tmp_path, caplog):
    built = keras.Sequential([Counting(), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    built.compile("sgd", "mse")
    it = balancer(tmp_path)
    fit(it, built)
    fit(it, built)
    named = "layer 'counting' has a state that Keras does not know, the tf.Variable 'seen'"
    assert caplog.text.count("a state that Keras does not know") == caplog.text.count(named) == 1


class Odd(keras.callbacks.EarlyStopping):
    """Keeps what is no number."""

    def on_epoch_end(self, epoch, logs=None):
        self.best = object()


def test_a_callback_whose_state_cannot_be_saved_does_not_take_the_others_with_it(tmp_path, caplog):
    def script(folder, *more):
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=2, min_delta=10.0)
        built = model(optimizer=keras.optimizers.SGD(0.05))
        return fit(balancer(folder), built, Odd("loss"), plateau, *more, epochs=4)

    whole = script(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        script(tmp_path / "broken", Counter(2 * STEPS + 3, interrupt))
    assert caplog.text.count("what the callback EarlyStopping has seen is not in the") == 2, "fits"
    rest = script(tmp_path / "broken")
    same(rest, whole)
    assert float(rest.optimizer.learning_rate) == pytest.approx(0.005)


def test_each_state_is_written_once(tmp_path, monkeypatch):
    written, start = [], CheckpointWriter.start

    def note(writer, checkpoint):
        written.append(checkpoint.step)
        start(writer, checkpoint)

    monkeypatch.setattr(CheckpointWriter, "start", note)
    fit(balancer(tmp_path, "epoch"), model())
    assert written == [STEPS, 2 * STEPS]
    assert newest_checkpoint(tmp_path).step == 2 * STEPS


def test_a_state_that_was_read_has_memory_of_its_own(tmp_path):
    built = fit(balancer(tmp_path), model(), epochs=1)
    state = ModelState(built, tf.distribute.get_strategy(), 0)
    (_, one), (_, other) = (state.read(copy=True) for _ in range(2))
    assert not [name for name in one if np.shares_memory(one[name], other[name])]


def test_sigterm_saves_a_checkpoint_and_leaves_with_its_own_status(tmp_path):
    leave = Counter(4, lambda built: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        fit(balancer(tmp_path, "epoch"), model(), leave)
    assert left.value.code == STATUS == 143
    assert newest_checkpoint(tmp_path).step == 4
    new_process()
    rest = Counter()
    same(fit(balancer(tmp_path), model(), rest), fit(balancer(tmp_path / "whole"), model()))
    assert rest.steps == 2 * STEPS - 4
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_states_that_cannot_be_written_are_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "check_states", lambda balancer: 1 / 0)
    counter = Counter()
    with pytest.raises(ZeroDivisionError):
        fit(balancer(tmp_path), model(), counter)
    assert counter.steps == 0


def test_what_cannot_continue_exactly_is_refused_with_the_remedy(tmp_path):
    backup, built = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=3), model()
    built.build((None, 3))
    with pytest.raises(ValueError, match=r"checkpoint=folder, every=3"):
        fit(balancer(tmp_path), built, backup)
    it = balancer(tmp_path)
    with pytest.raises(ValueError, match=r"fit needs the data of the balancer"):
        model().fit(FEATURES, TARGETS, verbose=0, callbacks=[it])
    for balancers in ((it, it), (it, balancer(tmp_path))):
        with pytest.raises(ValueError, match="callbacks must contain one LoadBalancer, got 2"):
            fit(balancers[0], model(), *balancers[1:])
    with pytest.raises(ValueError, match="a custom loop must save"):
        it.loop(lambda batch: None, it.dataset(FEATURES, TARGETS))
    data = tf.data.Dataset.from_tensor_slices((FEATURES, TARGETS)).shuffle(9, seed=1)
    with pytest.raises(ValueError, match="reshuffle_each_iteration=False"):
        model().fit(it.dataset(data), steps_per_epoch=it.steps_per_epoch, verbose=0, callbacks=[it])
