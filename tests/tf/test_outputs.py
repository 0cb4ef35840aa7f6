"""Files of a job: saved as a whole, and by Keras's callbacks on the chief only."""

import keras
import pytest

from lbbsp_tf.compat import outputs


@pytest.fixture
def patches(monkeypatch):
    """Applies the patches of rank 1, and removes them after the test."""
    for callback in outputs._PATHS:
        monkeypatch.setattr(callback, "set_model", callback.set_model)
    monitor = keras.callbacks.RemoteMonitor
    monkeypatch.setattr(monitor, "on_epoch_end", monitor.on_epoch_end)
    for name in ("save", "save_weights", "export"):
        monkeypatch.setattr(keras.Model, name, getattr(keras.Model, name))
    outputs.write_once_per_job(1)


def model():
    built = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    built.compile("sgd", "mse")
    return built


@pytest.mark.usefixtures("patches")
@pytest.mark.parametrize("name", ["a.keras", "a.h5"])
def test_a_saved_file_replaces_the_old_one_as_a_whole(tmp_path, name):
    path = tmp_path / name
    path.write_text("old")
    model().save(path)
    assert keras.models.load_model(path, compile=False).count_params() == 4
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.usefixtures("patches")
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


@pytest.mark.usefixtures("patches")
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


@pytest.mark.usefixtures("patches")
def test_only_the_chief_exports_a_model_and_posts_its_logs(tmp_path, monkeypatch):
    built = model()
    built.export(tmp_path / "exported", verbose=False)
    built.export(str(tmp_path / "named"), format="tf_saved_model", verbose=False)
    assert list(tmp_path.rglob("*")) == []
    posted = pytest.importorskip("requests")
    monkeypatch.setattr(posted, "post", lambda *_, **__: pytest.fail("posted"))
    keras.callbacks.RemoteMonitor().on_epoch_end(0, {"loss": 1.0})
