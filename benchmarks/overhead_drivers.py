"""Measures what a step takes longer for the exchange of fresh driving factors.

Two equal workers train the same network on the same even batches in one pair of processes, in
interleaved blocks, with the default predictor, whose forecasts no plan follows: with
`fresh_drivers=False`, where messages are exchanged with the gradients, and with
`fresh_drivers=True`, where they are exchanged once more after each step, as after steps of 0.1 s or
more in training. The order of the two alternates. Prints the ratio of their median step times, as
the median over all pairs of blocks with a 95 % bootstrap interval.
"""

from __future__ import annotations

from side_by_side import main, report

X = 64


def train(blocks: int, steps: int, channels: int) -> None:
    """Trains as one of the workers; the chief prints."""
    import tensorflow as tf
    from keras_blocks import Side, step_seconds
    from networks import convolutional, data

    import lbbsp_core
    import lbbsp_tf
    from lbbsp_core.runtime.loop import session

    session.LONG_STEP_SECONDS = 0.0
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    sides = {}
    for name, fresh in (("once", False), ("twice", True)):
        balancer = lbbsp_tf.LoadBalancer(
            strategy, X, policy=lbbsp_core.LoadBalanced(interval=10**9), fresh_drivers=fresh
        )
        sides[name] = Side(
            convolutional(strategy, channels), balancer.dataset(*data()), (balancer,)
        )
    times = step_seconds(sides, blocks, steps=steps, steps_per_epoch=balancer.steps_per_epoch)
    if balancer.rank == 0:
        report("one exchange", *times.values(), other="two exchanges")


if __name__ == "__main__":
    question = __doc__.splitlines()[0]
    main(__file__, question, train, framework="tensorflow", blocks=60, channels=48)
