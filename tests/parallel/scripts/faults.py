"""Trains; the worker of the given rank meets with the given fault: FAULT RANK OPTION=VALUE...

The variable FAULT_MARK names a file in which this worker writes its process ID before that. No
worker counts as lost until then, however slow the machine is. Afterwards TensorFlow's own patience
with a silent worker does not end before ours.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

fault, victim = sys.argv[1], int(sys.argv[2])
options = {name: float(value) for name, value in (each.split("=") for each in sys.argv[3:])}
PHASES = ("at_import", "at_strategy", "at_balancer", "in_evaluation", "after_training", "after_fit",
          "in_part")  # fmt: skip
where = next((phase for phase in PHASES if fault.endswith(phase)), "in_step")
what = fault.removesuffix(f"_{where}")
mark = Path(os.environ["FAULT_MARK"])


def own_rank():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def meet(phase):
    if own_rank() == victim and phase == where:
        mark.with_suffix(".part").write_text(f"{os.getpid()}")
        mark.with_suffix(".part").rename(mark)
        FAULTS[what]()


def wait_for(condition):
    while not condition():
        time.sleep(0.02)


def is_over():
    """Returns whether the victim has ended."""
    try:
        return mark.exists() and psutil.Process(int(mark.read_text())).status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_behind_the_other():
    lbbsp_tf.service.wait_for(f"lbbsp/variable/{1 - victim}/0", 300_000)
    addresses = json.dumps(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    # The programs that watch the start end when both workers give signs of life.
    wait_for(lambda: not any(addresses in (each.info["cmdline"] or ())
                             for each in psutil.process_iter(["cmdline"])))  # fmt: skip
    kill()


CONTINUE = """
import psutil, sys, time
stopped = psutil.Process(int(sys.argv[1]))
while stopped.status() != psutil.STATUS_STOPPED: time.sleep(0.02)
time.sleep(float(sys.argv[2]))
stopped.resume()
"""


def stop(seconds=None):
    if seconds is not None:
        subprocess.Popen([sys.executable, "-c", CONTINUE, str(os.getpid()), str(seconds)])
    os.kill(os.getpid(), signal.SIGSTOP)


def fail():
    raise RuntimeError("no data")


def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(10_000)  # unlike CDLL, keeps other threads of Python from running


def fail_with_own_hook():
    sys.excepthook = lambda *_: print("SORRY", flush=True)
    fail()


def terminate(times=1):
    preemption.REPEAT_SECONDS = 0.0  # no second signal is the same request
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(300)


FAULTS = {
    "raise": fail,
    "raise_with_hook": fail_with_own_hook,
    "exit_0": lambda: sys.exit(0),
    "_exit_0": lambda: os._exit(0),
    "exit_3": lambda: sys.exit(3),
    "kill": kill,
    "kill_behind_the_other": kill_behind_the_other,
    "stop": stop,
    "stop_for_5_s": lambda: stop(5),
    "sigterm": terminate,
    "sigterm_twice": lambda: terminate(2),
    "endless_wait_in_c": hold_the_interpreter,
    "endless_wait_in_c_checkpoint": hold_the_interpreter,
    "cut": lambda: subprocess.run(["ip", "link", "set", "lbbsp0", "down"], check=True),
    "endless_wait": lambda: time.sleep(10_000),
    "none": lambda: None,
}

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lbbsp_tf  # noqa: E402
from lbbsp_core.runtime.extensions import work_sharing  # noqa: E402
from lbbsp_core.runtime.reliability import exit, preemption  # noqa: E402
from lbbsp_core.runtime.reliability.heartbeat import Heartbeat  # noqa: E402
from lbbsp_tf.compat import coordination  # noqa: E402
from lbbsp_tf.exchange import claims  # noqa: E402
from lbbsp_tf.step.parts import Parts  # noqa: E402

meet("at_import")
coordination.HEARTBEAT_MILLISECONDS = 300_000
claims._TRIAL_SECONDS = work_sharing.SLOW_CLAIM_SECONDS = 300.0
if own_rank() == victim and what in ("exit_3", "raise_with_hook"):
    exit._PATIENCE_SECONDS = 300.0  # for telling the other one
look, report_and_end = Heartbeat.check, Heartbeat._report_and_end


def looked(heartbeat, seconds):
    return look(heartbeat, seconds) if mark.exists() else None


def told(heartbeat, status, why):
    """Ends this worker when the other one has learnt of the SIGTERM, too, not after seconds."""
    if what.startswith("sigterm"):
        mark.with_suffix(f".{own_rank()}").touch()
        wait_for(mark.with_suffix(f".{1 - own_rank()}").exists)
    report_and_end(heartbeat, status, why)


Heartbeat.check, Heartbeat._report_and_end = looked, told
strategy = tf.distribute.MultiWorkerMirroredStrategy()
meet("at_strategy")
balancer = lbbsp_tf.LoadBalancer(strategy, 16, **options)
meet("at_balancer")
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")


class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 10:
            meet("in_step")


class Evaluated(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        meet("in_evaluation")


claim = Parts.claim


def claimed(parts):
    """Meets with the fault when this worker has claimed a part, for which the other one waits."""
    is_time = where == "in_part" and balancer._session.step > 5
    if is_time and own_rank() != victim:
        wait_for(mark.exists)
    samples = claim(parts)
    if is_time and len(samples):
        meet("in_part")
    return samples


Parts.claim = claimed
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
meet("after_training")
meet("after_fit")
if where == "after_fit":
    wait_for(is_over)  # it ends while this worker is between its last step and its end
if where == "in_evaluation":
    model.evaluate(x[:, :4], x[:, 4:], callbacks=[Evaluated()], verbose=0)
if where == "after_training":
    model.fit(
        balancer.dataset(x[:, :4], x[:, 4:]),
        steps_per_epoch=balancer.steps_per_epoch,
        callbacks=[balancer],
        verbose=0,
    )
