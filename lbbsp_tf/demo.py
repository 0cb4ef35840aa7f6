"""Worker of ``lbbsp demo``: trains a small CNN on handwritten digits.

``lbbsp demo`` starts it once with the policy ``bsp`` (even batches) and once with ``lbbsp``. Both
runs use the same samples in the same order and the same initial weights. They differ only in time
and in rounding, because sums are computed in a different order.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from lbbsp_core.demo.digits import GLOBAL_BATCH_SIZE, SEED, digits, parse, repeated, save
from lbbsp_tf import LoadBalancer


def main() -> None:
    """Trains as one of the workers; rank 0 writes the record and the result to the run folder."""
    arguments = parse(__doc__)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    training, held_out = digits()
    data = repeated(training, arguments.steps)
    balancer = LoadBalancer(
        strategy, GLOBAL_BATCH_SIZE, policy=arguments.policy, record=arguments.run_dir
    )
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = build()
    model.fit(balancer.dataset(data.x, data.y, seed=SEED), callbacks=[balancer], verbose=0)
    if balancer.rank == 0:
        logits = model(held_out.x, training=False)  # without collectives
        save(arguments.run_dir / "final.npz", logits, held_out, model.get_weights())


def build() -> keras.Model:
    """Builds a CNN with few weights and much computation, about 1 ms per sample on one core.

    With smooth activations, average pooling and SGD, differences in the rounding of float32 sums,
    which depends on the batch sizes, do not grow over the steps.
    """
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.UpSampling2D(4, interpolation="bilinear"),
            layers.Conv2D(48, 3, padding="same", activation="tanh"),
            layers.Conv2D(48, 3, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Conv2D(48, 3, padding="same", activation="tanh"),
            layers.AveragePooling2D(4),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


if __name__ == "__main__":
    main()
