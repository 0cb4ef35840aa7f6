"""Metrics that users write."""

import keras
import tensorflow as tf


class Samples(keras.metrics.Metric):
    """Number of samples; its result is the variable itself, as in Keras's guide."""

    def __init__(self):
        super().__init__(name="samples")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.count.value


class BatchMeans(keras.metrics.Metric):
    """Mean of the means of batches, as most users write it."""

    def __init__(self):
        super().__init__(name="batch_means")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_mean(tf.abs(y_pred)))
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


class Extremes(keras.metrics.Metric):
    """Largest value, a running mean, and what the last batch was."""

    def __init__(self):
        super().__init__(name="extremes")
        self.largest = self.add_variable((), "zeros", name="largest")
        self.running = self.add_variable((), "zeros", name="running")
        self.kept = self.add_variable((), "zeros", name="kept")
        self.reset_state()

    def reset_state(self):
        self.largest.assign(-9.0)
        self.running.assign(1.0)
        self.kept.assign(0.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        value = tf.reduce_mean(y_pred**2)
        self.largest.assign(tf.maximum(self.largest, -tf.reduce_min(tf.abs(y_pred))))
        self.running.assign(0.9 * self.running + 0.1 * value)
        self.kept.assign(value)

    def result(self):
        return {"largest": self.largest, "running": self.running, "kept": self.kept}


def overlap(y_true, y_pred):
    """A number of a whole batch, as of users' F1 scores and Dice coefficients."""
    y_true = tf.cast(tf.reshape(y_true, [-1, 1]), y_pred.dtype)
    return tf.reduce_sum(y_true * y_pred) / (tf.reduce_sum(y_true) + tf.reduce_sum(y_pred**2))


def spread(y_true, y_pred):
    """A number of each sample."""
    return tf.reduce_max(y_pred, -1) - tf.reduce_min(y_pred, -1)
