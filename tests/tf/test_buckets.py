"""Size of the buckets of gradients, as far as a single process decides it."""

import tensorflow as tf

from lbbsp_tf.exchange.collectives import LocalReplicas
from lbbsp_tf.step.buckets import bytes_of, measured_bytes


def test_bytes_of_gradients():
    assert bytes_of(tf.zeros((3, 4), tf.float16)) == 24
    assert bytes_of(tf.IndexedSlices(tf.ones((2, 3)), tf.constant([0, 1]))) == 0


def test_options_of_the_strategy_win():
    packs = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1234)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=packs)
    assert measured_bytes(strategy, LocalReplicas(2), "aa") == 1234


def test_devices_of_one_process_have_one_bucket():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert measured_bytes(strategy, LocalReplicas(2), "aa") == 0
