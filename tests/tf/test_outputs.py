"""Files of a job: saved as a whole, and by Keras's callbacks on the chief only."""

import itertools
import logging
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest
import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.checkpoint.checkpoint import TrackableSaver
from tensorflow.python.checkpoint.functional_saver import MultiDeviceSaver

from lbbsp_tf.compat import outputs


@pytest.fixture(autouse=True)
def _patches(monkeypatch):
    """Applies the patches of rank 1, and removes them after the test."""
    for callback in outputs._PATHS:
        monkeypatch.setattr(callback, "set_model", callback.set_model)
    monkeypatch.setattr(TrackableSaver, "save", TrackableSaver.save)
    monkeypatch.setattr(tf.get_logger(), "filters", [])
    monitor = keras.callbacks.RemoteMonitor
    monkeypatch.setattr(monitor, "on_epoch_end", monitor.on_epoch_end)
    for name in ("save", "save_weights", "export"):
        monkeypatch.setattr(keras.Model, name, getattr(keras.Model, name))
    outputs.write_once_per_job(1)


def model():
    built = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    built.compile("sgd", "mse")
    return built


@pytest.mark.parametrize("name", ["a.keras", "a.h5"])
def test_a_saved_file_replaces_the_old_one_as_a_whole(tmp_path, name):
    path = tmp_path / name
    path.write_text("old")
    model().save(path)
    assert keras.models.load_model(path, compile=False).count_params() == 4
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.weights.h5"
    model().save_weights(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: pytest.fail("not reached"))
    broken = model()
    monkeypatch.setattr(broken.layers[0], "save_own_variables", lambda store: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.save_weights(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.weights.h5"]


def test_callbacks_write_elsewhere_than_on_the_chief(tmp_path):
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        keras.callbacks.TensorBoard(str(tmp_path / "events")),
    ]
    keras.callbacks.CallbackList(callbacks, model=model())
    for callback in (*callbacks, callbacks[0]):  # a second fit changes nothing
        callback.set_model(callback.model)
    callbacks[1].on_train_begin()
    callbacks[1].on_train_end()
    callbacks[0].on_epoch_end(0, {})
    callbacks[2].on_epoch_end(0, {})
    assert callbacks[0].filepath.endswith("{epoch}.keras")
    assert list(tmp_path.rglob("*")) == []


def test_only_the_chief_exports_a_model_and_posts_its_logs(tmp_path, monkeypatch):
    built = model()
    built.export(tmp_path / "exported", verbose=False)
    built.export(str(tmp_path / "named"), format="tf_saved_model", verbose=False)
    assert list(tmp_path.rglob("*")) == []
    posted = pytest.importorskip("requests")
    monkeypatch.setattr(posted, "post", lambda *_, **__: pytest.fail("posted"))
    keras.callbacks.RemoteMonitor().on_epoch_end(0, {"loss": 1.0})


def restored(path):
    value = tf.Variable(0.0)
    tf.train.Checkpoint(value=value).read(path).assert_consumed()
    return float(value)


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_workers_may_write_one_checkpoint_at_the_same_time(tmp_path):
    state = tf.train.Checkpoint(value=tf.Variable(3.0))
    prefix = str(tmp_path / "new" / "a")
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: state.write(prefix), range(40))) == {prefix}
    assert restored(prefix) == 3
    assert names(tmp_path / "new") == ["a.data-00000-of-00001", "a.index"]


def test_managers_of_workers_keep_the_same_checkpoints_without_warnings(
    tmp_path, caplog, monkeypatch
):
    value = tf.Variable(0.0)
    managers = [
        tf.train.CheckpointManager(tf.train.Checkpoint(value=value), str(tmp_path), max_to_keep=2)
        for _ in range(2)
    ]
    for step, manager in itertools.product(range(5), managers):
        value.assign(step)
        manager.save()
    latest = tf.train.latest_checkpoint(tmp_path)
    assert [latest] * 2 == [manager.latest_checkpoint for manager in managers]
    assert latest.endswith("ckpt-5")
    assert tf.train.load_variable(latest, "value/.ATTRIBUTES/VARIABLE_VALUE") == 4
    assert len(names(tmp_path)) == 5

    def deleted_already(path):
        raise tf.errors.NotFoundError(None, None, path)

    monkeypatch.setattr(checkpoint_management.file_io, "delete_file", deleted_already)
    with caplog.at_level(logging.WARNING, "tensorflow"):
        managers[0].save()
    assert not caplog.records


def test_a_failed_checkpoint_leaves_the_old_one(tmp_path, monkeypatch):
    prefix = str(tmp_path / "a")
    tf.train.Checkpoint(value=tf.Variable(1.0)).write(prefix)
    before = names(tmp_path)
    monkeypatch.setattr(MultiDeviceSaver, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tf.train.Checkpoint(value=tf.Variable(2.0)).write(prefix)
    assert restored(prefix) == 1
    assert names(tmp_path) == before


def test_a_saved_model_may_be_written_by_all_workers(tmp_path):
    built = model()
    for _ in range(2):
        tf.saved_model.save(built, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert names(tmp_path / "saved" / "variables") == [
        "variables.data-00000-of-00001", "variables.index"
    ]  # fmt: skip
    assert loaded.signatures["serving_default"](tf.ones((2, 3)))
