"""The smallest job of each framework, on uneven plans that change in every step."""

from functools import cache

import numpy as np

from lbbsp_core.testing import ChangingPlans

X, STEPS, EPOCHS = 24, 6, 2
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(X * STEPS, 4)).astype("f4")
LABELS = FEATURES.sum(axis=1, keepdims=True)
OPTIONS = {"policy": ChangingPlans(((14, 10), (5, 19))), "seed": 1}


@cache
def keras_strategy():
    """The one of this process: TensorFlow may crash when a second one follows a training."""
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def keras_weights(**options):
    import keras

    import lbbsp_tf

    strategy = keras_strategy()
    balancer = lbbsp_tf.LoadBalancer(strategy, X, logs=True, **OPTIONS, **options)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = balancer.dataset(FEATURES, LABELS)
    model.fit(data, epochs=EPOCHS, callbacks=[balancer], verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def gluon_weights(**options):
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    from mxnet import autograd, gluon

    mx.random.seed(0)
    net = gluon.nn.Dense(1, in_units=4)
    net.initialize(mx.init.Normal())
    rate, options = {"learning_rate": 0.1}, {**OPTIONS, **options}
    trainer = lbbsp_mx.Trainer(net.collect_params(), "sgd", rate, global_batch_size=X, **options)
    data = gluon.data.ArrayDataset(FEATURES, LABELS)
    loader = gluon.data.DataLoader(data, batch_sampler=trainer.batch_sampler(len(data)))
    loss_of = gluon.loss.L2Loss()
    for _ in range(EPOCHS):
        for x, y in loader:
            with autograd.record():
                loss = loss_of(net(x), y)
            loss.backward()
            trainer.step(len(x))
    return np.concatenate([p.data().asnumpy().ravel() for p in net.collect_params().values()])


TRAIN = {"tensorflow": keras_weights, "mxnet": gluon_weights}
