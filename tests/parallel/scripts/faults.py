"""Trains; the worker of the given rank meets with the given fault: FAULT RANK OPTION=VALUE..."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

fault, victim = sys.argv[1], int(sys.argv[2])
options = {name: float(value) for name, value in (each.split("=") for each in sys.argv[3:])}


def own_rank():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def meet(phase):
    if own_rank() == victim and phase == PHASES.get(fault, "step"):
        print(f"FAULT {time.time():.3f}", flush=True)
        FAULTS[fault]()


def stop(seconds=None):
    if seconds is not None:
        again = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {signal.SIGCONT})"
        subprocess.Popen([sys.executable, "-c", again])
    os.kill(os.getpid(), signal.SIGSTOP)


def fail():
    raise RuntimeError("no data")


def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(10_000)  # unlike CDLL, keeps other threads of Python from running


FAULTS = {
    "raise_at_import": fail,
    "exit_0_at_import": lambda: sys.exit(0),
    "_exit_0_at_import": lambda: os._exit(0),
    "raise_in_step": fail,
    "exit_3_in_step": lambda: sys.exit(3),
    "exit_0_in_step": lambda: sys.exit(0),
    "_exit_0_in_step": lambda: os._exit(0),
    "kill_in_step": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": stop,
    "stop_for_5_s": lambda: stop(5),
    "endless_wait_in_c": hold_the_interpreter,
    "endless_wait_in_c_checkpoint": hold_the_interpreter,
    "cut": lambda: subprocess.run(["ip", "link", "set", "lbbsp0", "down"], check=True),
    "endless_wait": lambda: time.sleep(10_000),
    "exit_0_after_training": lambda: sys.exit(0),
    "_exit_0_after_training": lambda: os._exit(0),
    "none": lambda: None,
}
PHASES = {
    "raise_at_import": "import",
    "exit_0_at_import": "import",
    "_exit_0_at_import": "import",
    "exit_0_after_training": "end",
    "_exit_0_after_training": "end",
}

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lbbsp_tf  # noqa: E402

meet("import")

strategy = tf.distribute.MultiWorkerMirroredStrategy()
balancer = lbbsp_tf.LoadBalancer(strategy, 16, **options)
(caught,) = re.findall(r"SigCgt:\s*(\w+)", Path("/proc/self/status").read_text())
print("SIGTERM IS CAUGHT" if int(caught, 16) >> signal.SIGTERM - 1 & 1 else "SIGTERM ENDS")
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")


class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        if batch == 10:
            meet("step")


x = np.random.default_rng(0).normal(size=(16 * 20, 6)).astype("f4")
callbacks = [balancer, Fault()]
if fault.endswith("checkpoint"):  # makes a folder on all workers but the chief
    callbacks.append(keras.callbacks.ModelCheckpoint("never_written.keras"))
model.fit(
    balancer.dataset(x[:, :4], x[:, 4:]),
    steps_per_epoch=balancer.steps_per_epoch,
    callbacks=callbacks,
    verbose=0,
)
print("TRAINED", flush=True)
meet("end")
if fault.endswith("after_training"):
    model.fit(
        balancer.dataset(x[:, :4], x[:, 4:]),
        steps_per_epoch=balancer.steps_per_epoch,
        callbacks=[balancer],
        verbose=0,
    )
