import json

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_tf.cluster import check_devices, check_tf_config, cluster_size, rank_and_workers

TWO = {"worker": ["localhost:1111", "localhost:2222"]}


def set_config(monkeypatch, cluster, kind="worker", index=0):
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"cluster": [], "task": 3}', "must have JSON objects"),
        ('{"cluster": {"worker": "a:1"}, "task": {}}', "list of host:port strings"),
        ('{"cluster": {"worker": ["a:²"]}, "task": {}}', "list of host:port strings"),
        ('{"cluster": {"worker": ["a:1", "a:1"]}, "task": {}}', "names the address 'a:1' twice"),
        ('{"cluster": {"worker": ["a:1"]}}', "has the task type None"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
            "task index in [0, 1), one for each 'worker', got 1",
        ),
    ],
)
def test_a_wrong_tf_config_is_named_with_its_cure(monkeypatch, text, complaint):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=r"^TF_CONFIG .*it must look like") as raised:
        check_tf_config()
    assert complaint in str(raised.value)
    assert text in str(raised.value)


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"cluster": {}}'])
def test_no_cluster_is_no_fault(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    check_tf_config()
    assert cluster_size() == 0 if text.strip() else True


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "expected"),
    [
        (TWO, "worker", 1, (1, 2)),
        ({"chief": ["c:1"], **TWO}, "chief", 0, (0, 3)),
        ({"chief": ["c:1"], **TWO}, "worker", 1, (2, 3)),
        ({"worker": ["a:1"]}, "worker", 0, (0, 1)),
    ],
)
def test_rank_counts_the_chief_first(monkeypatch, cluster, kind, index, expected):
    set_config(monkeypatch, cluster, kind, index)
    check_tf_config()
    assert rank_and_workers(tf.distribute.cluster_resolver.TFConfigClusterResolver()) == expected
    assert cluster_size() == expected[1]


@pytest.mark.parametrize("kind", ["evaluator", "ps"])
def test_a_task_that_does_not_train_is_named(monkeypatch, kind):
    set_config(monkeypatch, {**TWO, kind: ["localhost:3333"]}, kind)
    with pytest.raises(ValueError, match=f"TF_CONFIG is '{kind}', which does not train: evaluate"):
        rank_and_workers(tf.distribute.cluster_resolver.TFConfigClusterResolver())


def test_without_a_resolver_there_is_one_worker():
    assert rank_and_workers(None) == (0, 1)


class Service:
    """Key-value store of the coordination service; a missing key is a worker that never comes."""

    def __init__(self):
        self.values = {}

    def set_config_key_value(self, key, value):
        if key in self.values:
            raise tf.errors.AlreadyExistsError(None, None, key)
        self.values[key] = value

    def get_config_key_value(self, key, timeout_in_ms):
        assert timeout_in_ms <= 60_000
        if key not in self.values:
            raise tf.errors.DeadlineExceededError(None, None, key)
        return self.values[key]


@pytest.fixture
def compare(monkeypatch):
    """Returns a function by which each worker compares its devices; returns each one's error."""
    service = Service()
    monkeypatch.setattr(context, "context", lambda: service)

    def check(rank, workers, each):
        try:
            check_devices.__wrapped__(rank, workers, each)
        except (ValueError, DisagreementError) as error:
            return error

    def of(*devices):
        service.values.clear()
        for rank, each in enumerate(devices):
            assert check(rank, len(devices), each) is None or rank == len(devices) - 1
        return [check(rank, len(devices), each) for rank, each in enumerate(devices)]

    return of


def gpus(count):
    return tuple(f"/job:worker/replica:0/task:0/device:GPU:{index}" for index in range(count))


CPU = ("/job:worker/replica:0/task:0/device:CPU:0",)


TYPES = (
    "workers must have devices of the same type, because TensorFlow's collectives need it, got "
    "GPU (rank 0, 2), CPU (rank 1): set CUDA_VISIBLE_DEVICES=-1 for all workers"
)


@pytest.mark.parametrize(
    ("devices", "kind", "words"),
    [
        ((gpus(2), CPU, gpus(2)), DisagreementError, TYPES),
        ((gpus(2), gpus(1)), ValueError, "the same number of devices, got [2, 1] by rank"),
    ],
)
def test_other_devices_are_named_on_all_workers(compare, devices, kind, words):
    for error in compare(*devices):
        assert isinstance(error, kind)
        assert words in str(error)
