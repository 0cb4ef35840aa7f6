import json

import pytest
import tensorflow as tf

import lbbsp_tf
from lbbsp_tf import server
from lbbsp_tf.cluster import check_tf_config, cluster_size, rank_and_workers

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
        ('{"cluster": {"worker": ["a"]}, "task": {}}', "list of host:port strings"),
        ('{"cluster": {"worker": ["a:²"]}, "task": {}}', "list of host:port strings"),
        ('{"cluster": {"worker": ["a:1", "a:1"]}, "task": {}}', "names the address 'a:1' twice"),
        ('{"cluster": {"worker": ["a:1"]}}', "has the task type None"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "boss"}}', "task type 'boss'"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
            "task index in [0, 1), one for each 'worker', got 1",
        ),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "0"}}',
            "task index in [0, 1), one for each 'worker', got '0'",
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
        (TWO, "worker", 0, (0, 2)),
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


PS = {"chief": ["c:1"], "ps": ["p:1"], **TWO}


@pytest.mark.parametrize(
    ("cluster", "kind", "said"),
    [
        (TWO, "worker", "names no chief, ps: "),
        ({"chief": ["c:1"], **TWO}, "chief", "names no ps: "),
        ({"chief": ["c:1"], "ps": ["p:1"]}, "chief", "names no worker: "),
        (PS, "worker", "task type in TF_CONFIG must be 'chief', got 'worker'"),
    ],
)
def test_parameter_servers_need_a_chief_to_command_them(monkeypatch, cluster, kind, said):
    set_config(monkeypatch, cluster, kind)
    with pytest.raises(ValueError, match=said) as raised:
        lbbsp_tf.parameter_server_strategy()
    assert "lbbsp launch -n WORKERS --servers 1 SCRIPT" in str(raised.value)
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(ValueError, match=r"names no chief, worker, ps: it is not set; start the"):
        lbbsp_tf.parameter_server_strategy()


def test_a_chief_does_not_serve(monkeypatch, capsys):
    set_config(monkeypatch, PS, "chief")
    assert server.main() == 2
    assert "must have the task type worker or ps, got 'chief'" in capsys.readouterr().err


def test_without_a_resolver_there_is_one_worker():
    assert rank_and_workers(None) == (0, 1)
