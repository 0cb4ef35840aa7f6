"""One training over several jobs, which end at given steps by a signal of one worker.

Usage: restarting.py FOLDER dense|noisy [STEP RANK SIGNAL]
"""

import os
import signal
import sys

import keras
import tensorflow as tf
from checkpoints import FEATURES, TARGETS, Watch, X, dense, noisy
from report import largest_difference, result

import lbbsp_tf
from lbbsp_core.testing import ChangingPlans


class End(keras.callbacks.Callback):
    """Sends this process a signal after a global step."""

    def on_train_batch_end(self, batch, logs=None):
        if at and balancer._session.step == int(at) and balancer.rank == int(rank):
            os.kill(os.getpid(), signal.Signals[name])


def train(*callbacks):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = noisy() if kind == "noisy" else dense()
    data = balancer.dataset(FEATURES, TARGETS)
    watch = Watch(balancer=balancer)
    model.fit(data, epochs=3, steps_per_epoch=balancer.steps_per_epoch, verbose=0,
              callbacks=[watch, *callbacks, balancer])  # fmt: skip
    return model, watch


folder, kind, at, rank, name = [*sys.argv[1:], "", "", ""][:5]
# Beyond the default maximum of 44, in some of the steps at which a job continues.
changing = ChangingPlans(((40, 16, 8), (10, 50, 4), (50, 1, 13)))
options = {"policy": changing} if kind == "noisy" else {}
strategy = tf.distribute.MultiWorkerMirroredStrategy()
balancer = lbbsp_tf.LoadBalancer(strategy, X, checkpoint=folder, every=4, **options)
model, watch = train(End())
result("epochs", watch.epochs)
balancer = lbbsp_tf.LoadBalancer(strategy, X, **options)
whole, expected = train()
result("expected", expected.epochs)
result("difference", largest_difference(model, whole))
