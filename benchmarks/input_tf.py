"""Measures the input of the Keras plugin: its overhead per step, and resident memory over time.

Two equal workers train the same network on the same samples in one pair of processes, from a
memory map with a function per sample and one prefetched batch. The steps of stock Keras 3, on a
distributed data set of fixed batches, are compared with those of `LoadBalancer` with the policy
`Even`, in interleaved blocks. The ratio is the median over all pairs of blocks, with a 95 %
bootstrap interval. Then the resident memory of a worker is printed over epochs, over fits on new
data sets, and before and after a fit on a memory map of a gigabyte. Absolute times depend on the
machine and its load.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from side_by_side import RESULT, main, report

X, EPOCHS, FITS = 64, 20, 10
GIGABYTE = 2**30


def train(blocks: int, steps: int, channels: int) -> None:
    """Trains as one of the workers; the chief prints."""
    import keras
    import numpy as np
    import psutil
    import tensorflow as tf
    from keras_blocks import Side, step_seconds
    from networks import SAMPLES, convolutional, data

    import lbbsp_core
    import lbbsp_tf

    class Memory(keras.callbacks.Callback):
        """Resident memory at the end of each epoch, in MB."""

        def on_train_begin(self, logs=None):
            self.megabytes = []

        def on_epoch_end(self, epoch, logs=None):
            self.megabytes.append(resident())

    def resident() -> float:
        return psutil.Process().memory_info().rss / 2**20

    def listed(megabytes: list[float]) -> str:
        return " ".join(f"{value:.0f}" for value in megabytes)

    def say(text: str) -> None:
        if balancer.rank == 0:
            print(f"{RESULT}{text}")

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    balancer = lbbsp_tf.LoadBalancer(strategy, X, policy=lbbsp_core.Even())
    images, labels = data()
    folder = tempfile.TemporaryDirectory()
    stored = np.lib.format.open_memmap(
        Path(folder.name) / "x.npy", "w+", images.dtype, images.shape
    )
    stored[:] = images
    stored.flush()
    x = np.load(Path(folder.name) / "x.npy", mmap_mode="r")
    order = lbbsp_core.GlobalOrder(SAMPLES, X)

    def augment(image, label):
        return tf.image.random_flip_left_right(image), label

    def stock_data(context):
        """The pipeline that a user would write for fixed batches."""

        def read(step):
            index = order.slice(int(step), balancer.rank, (X // 2, X // 2))
            return np.asarray(x[index]), labels[index]

        def batch(step):
            image, label = tf.numpy_function(read, [step], [x.dtype, labels.dtype])
            image.set_shape([None, *x.shape[1:]])
            label.set_shape([None])
            return image, label

        samples = tf.data.Dataset.counter().map(batch).unbatch().map(augment)
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return samples.batch(X // 2).prefetch(1).apply(endless)

    fixed = strategy.distribute_datasets_from_function(stock_data)
    model = convolutional(strategy, channels)
    sides = {
        "stock": Side(convolutional(strategy, channels), fixed),
        "balanced": Side(model, balancer.dataset(x, labels, map=augment), (balancer,)),
    }
    times = step_seconds(sides, blocks, steps=steps, steps_per_epoch=balancer.steps_per_epoch)
    if balancer.rank == 0:
        report("stock Keras", times["stock"], times["balanced"])

    def fit(feed, *callbacks, epochs=1):
        model.fit(feed, steps_per_epoch=balancer.steps_per_epoch, epochs=epochs, verbose=0,
                  callbacks=[balancer, *callbacks])  # fmt: skip

    memory = Memory()
    fit(balancer.dataset(x, labels, map=augment), memory, epochs=EPOCHS)
    say(f"resident MB at the ends of {EPOCHS} epochs: {listed(memory.megabytes)}")
    after = []
    for _ in range(FITS):
        fit(balancer.dataset(images.copy(), labels, map=augment))
        after.append(resident())
    say(f"resident MB after {FITS} fits on new arrays: {listed(after)}")

    count = GIGABYTE // images[0].nbytes // X * X
    path = Path(folder.name) / "large.npy"
    np.lib.format.open_memmap(path, "w+", images.dtype, (count, *images.shape[1:])).flush()
    large = np.load(path, mmap_mode="r")
    before = resident()
    feed = balancer.dataset(large, np.zeros(count, labels.dtype), steps_per_epoch=20)
    fit(feed)
    say(f"resident MB before and after 20 steps on a map of 1 GB: {before:.0f} {resident():.0f}")


if __name__ == "__main__":
    question = __doc__.splitlines()[0]
    main(__file__, question, train, framework="tensorflow", blocks=60, channels=48)
