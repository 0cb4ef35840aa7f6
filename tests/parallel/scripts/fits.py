"""What scripts for Keras share: fits, and several devices made of the processor."""

import tensorflow as tf


def fit(balancer, model, data, *callbacks, **options):
    """Fits as users do, without output; options may replace what is passed otherwise."""
    usual = {"steps_per_epoch": balancer.steps_per_epoch, "verbose": 0}
    return model.fit(data, callbacks=[balancer, *callbacks], **usual | options)


def two_devices():
    """Splits the processor into two devices; returns a strategy for them."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
