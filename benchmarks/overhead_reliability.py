"""Measures what heartbeats and checkpoints cost two equal Keras workers.

Three fits of the same network alternate in one pair of processes: without heartbeats, with them,
and with a checkpoint after every second epoch. Prints the ratio of the median step times of the
first two, and what a checkpoint adds to the time of the last, background work included, as a share
of 100 steps. Absolute times depend on the machine and its load.
"""

from __future__ import annotations

import tempfile

from side_by_side import RESULT, main, report

X, STEPS_PER_CHECKPOINT = 64, 12


def train(blocks: int, steps: int, channels: int) -> None:
    """Trains as one of the workers; the chief prints."""
    import keras
    import numpy as np
    import tensorflow as tf
    from keras_blocks import Side, step_seconds
    from networks import convolutional, data

    import lbbsp_core
    import lbbsp_tf
    from lbbsp_tf.reliability.board import CoordinationBoard

    post = CoordinationBoard.post

    class Silent(keras.callbacks.Callback):
        """Keeps this worker's heartbeat from being sent."""

        def on_train_begin(self, logs: object = None) -> None:
            CoordinationBoard.post = lambda board, row: None

        def on_train_end(self, logs: object = None) -> None:
            CoordinationBoard.post = post

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    options = {"policy": lbbsp_core.Even(), "silence_seconds": 3600.0}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = {"checkpoint": folder, "every": STEPS_PER_CHECKPOINT}
        balancers = {
            name: lbbsp_tf.LoadBalancer(strategy, X, **options, **more)
            for name, more in {"silent": {}, "beating": {}, "saving": checkpoint}.items()
        }
        x, y = data()
        sides = {
            name: Side(convolutional(strategy, channels), balancer.dataset(x, y), (balancer,))
            for name, balancer in balancers.items()
        }
        sides["silent"] = sides["silent"]._replace(callbacks=(balancers["silent"], Silent()))
        saving = balancers["saving"]
        rhythm = {"steps": steps, "steps_per_epoch": saving.steps_per_epoch}
        medians = step_seconds({n: sides[n] for n in ("silent", "beating")}, blocks, **rhythm)
        means = step_seconds(
            {n: sides[n] for n in ("beating", "saving")}, blocks, of_block=np.mean, **rhythm
        )
    if saving.rank == 0:
        report("without heartbeats", medians["silent"], medians["beating"], "with them")
        added = STEPS_PER_CHECKPOINT * (np.array(means["saving"]) - np.array(means["beating"]))
        share = np.median(added) / (100 * np.median(means["beating"]))
        print(f"{RESULT}a checkpoint adds   {np.median(added) * 1e3:.1f} ms")
        print(f"{RESULT}each 100 steps      {share:.2%}")


if __name__ == "__main__":
    question = __doc__.splitlines()[0]
    main(__file__, question, train, framework="tensorflow", blocks=40, channels=48)
