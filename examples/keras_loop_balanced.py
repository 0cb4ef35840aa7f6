"""Trains on handwritten digits by a custom training loop, balanced over unequal workers.

The loop is that of TensorFlow's tutorial on multi-worker training. Run it on any TF_CONFIG
cluster, or on this machine with three unequal workers:
lbbsp launch -n 3 --speeds 1,1,0.4 examples/keras_loop_balanced.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import lbbsp_tf

BATCH, EPOCHS = 192, 8
strategy = tf.distribute.MultiWorkerMirroredStrategy()
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16

with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(5e-3)
    optimizer.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()


def train_step(batch):
    x, y = batch
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, predictions)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    accuracy.update_state(y, predictions)
    return loss


balancer = lbbsp_tf.LoadBalancer(strategy, global_batch_size=BATCH)
data = balancer.dataset(images[:1536], labels[:1536], seed=0)
loop = balancer.loop(train_step, data)
for epoch in range(EPOCHS):
    accuracy.reset_state()
    for _ in loop.epoch():
        pass
    print(f"epoch {epoch}: accuracy {accuracy.result():.4f}", flush=True)
loop.close()
