"""Trains without each extension of the session: ``without_extensions.py FRAMEWORK FOLDER``."""

import sys
from pathlib import Path

import numpy as np
from report import result

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from changing_plans import Cycle

from lbbsp_core import WorkerSession
from lbbsp_core.runtime.extensions.every import EXTENSIONS

X, STEPS, EPOCHS = 24, 4, 2
FRAMEWORK, FOLDER = sys.argv[1], Path(sys.argv[2])
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(X * STEPS, 4)).astype("f4")
LABELS = FEATURES.sum(axis=1, keepdims=True)


def keras_weights(options):
    import keras
    import tensorflow as tf

    import lbbsp_tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    balancer = lbbsp_tf.LoadBalancer(strategy, X, logs=True, **options)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = balancer.dataset(FEATURES, LABELS)
    model.fit(data, epochs=EPOCHS, callbacks=[balancer], verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def gluon_weights(options):
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    from mxnet import autograd, gluon

    mx.random.seed(0)
    net = gluon.nn.Dense(1, in_units=4)
    net.initialize(mx.init.Normal())
    trainer = lbbsp_mx.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, global_batch_size=X, **options
    )
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


train = {"tensorflow": keras_weights, "mxnet": gluon_weights}[FRAMEWORK]
for deleted in (None, *EXTENSIONS):
    name = deleted.__name__ if deleted else "none"
    left = tuple(kind for kind in EXTENSIONS if kind is not deleted)
    WorkerSession.__init__.__kwdefaults__["extensions"] = left
    trained = train(
        {
            "policy": Cycle(((14, 10), (5, 19))),
            "seed": 1,
            "record": FOLDER / name,
            "metrics_file": FOLDER / f"{name}.prom",
        }
    )
    result(name, trained.tolist())
