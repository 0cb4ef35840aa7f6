"""Measures the overhead of the Keras callback on equal workers, where balancing has no benefit.

Two equal workers train the same network on the same samples in one pair of processes, in
interleaved blocks: stock Keras 3 (with the same patches, on a distributed data set of the same
indices), and `LoadBalancer` with the policy `Even` and with the default one. Their order
alternates. Prints the ratios of median step times, as medians over all pairs of blocks with 95 %
bootstrap intervals. Absolute times depend on the machine and its load.
"""

from __future__ import annotations

from side_by_side import main, report

X = 64


def train(blocks: int, steps: int, channels: int) -> None:
    """Trains as one of the workers; the chief prints."""
    import tensorflow as tf
    from keras_blocks import Side, step_seconds
    from networks import SAMPLES, convolutional, data

    import lbbsp_core
    import lbbsp_tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    even = lbbsp_tf.LoadBalancer(strategy, X, policy=lbbsp_core.Even())
    default = lbbsp_tf.LoadBalancer(strategy, X)
    x, y = data()
    order = lbbsp_core.GlobalOrder(SAMPLES, X)
    constants = tf.constant(x), tf.constant(y)

    def slices():
        for step in range(10**9):
            yield order.slice(step, even.rank, (X // 2, X // 2))

    def stock_data(context):
        spec = tf.TensorSpec([None], tf.int64)
        indices = tf.data.Dataset.from_generator(slices, output_signature=spec)
        batches = indices.map(lambda i: tuple(tf.gather(c, i) for c in constants))
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return batches.apply(endless).prefetch(1)

    fixed = strategy.distribute_datasets_from_function(stock_data)
    sides = {
        "stock": Side(convolutional(strategy, channels), fixed),
        "Even": Side(convolutional(strategy, channels), even.dataset(x, y), (even,)),
        "default": Side(convolutional(strategy, channels), default.dataset(x, y), (default,)),
    }
    times = step_seconds(sides, blocks, steps=steps, steps_per_epoch=even.steps_per_epoch)
    for name in ("Even", "default") if even.rank == 0 else ():
        report("stock Keras", times["stock"], times[name], name)


if __name__ == "__main__":
    question = __doc__.splitlines()[0]
    main(__file__, question, train, framework="tensorflow", blocks=60, channels=48)
