"""Runs scripts in turn in one process of a cluster: ``in_turn.py FRAMEWORK FOLDER``.

`jobs.Cluster` writes the name and the arguments of each script into a file of the folder, in JSON,
which all processes of the cluster read. A script that fails ends the process, and with it the
cluster.
"""

import gc
import itertools
import json
import runpy
import sys
import time
from pathlib import Path

import patience  # noqa: F401, before lbbsp

SCRIPTS = Path(__file__).parent


def next_command(file):
    """Waits for a command; null is the last one."""
    while not file.exists():
        time.sleep(0.01)
    return json.loads(file.read_text())


def run(script, args):
    """Runs a script as if this process had started with it."""
    sys.argv = [str(SCRIPTS / f"{script}.py"), *args]
    runpy.run_path(sys.argv[0], run_name="__main__")


def share_strategies():
    """Lets all scripts have the same strategies: those of a process share keys of collectives."""
    import tensorflow as tf

    for cls in (tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.MirroredStrategy):
        _make_single(cls)


def _make_single(cls):
    instances, init = [], cls.__init__

    def new(cls, *args):
        return instances[0] if instances else object.__new__(cls)

    def init_once(self, *args):
        if not instances:
            init(self, *args)
            instances.append(self)

    cls.__new__, cls.__init__ = new, init_once


def reset_keras():
    """Forgets what a script has set in Keras."""
    import keras

    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session()


if __name__ == "__main__":
    framework, folder = sys.argv[1], Path(sys.argv[2])
    if framework == "tensorflow":
        share_strategies()
    for number in itertools.count():
        command = next_command(folder / f"{number}.json")
        if command is None:
            break
        run(*command)
        if framework == "tensorflow":
            reset_keras()
        gc.collect()
        print(f"END {number}", flush=True)
