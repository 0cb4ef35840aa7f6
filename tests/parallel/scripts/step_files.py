"""Names the files of lbbsp through which a step leads: ``step_files.py FRAMEWORK FOLDER``."""

import sys
import threading
import time
from pathlib import Path

from report import result
from tiny import STEPS, TRAIN

from lbbsp_core import WorkerSession

ROOT = Path(__file__).parents[3]
THREADS = ("MainThread", "lbbsp-background", "lbbsp-training", "Dummy")  # on which a step runs
before_allreduce = WorkerSession.before_allreduce
files, is_on = set(), threading.Event()


def trace(frame, event, arg):
    is_of_step = is_on.is_set() and threading.current_thread().name.startswith(THREADS)
    if is_of_step and (path := Path(frame.f_code.co_filename)).is_relative_to(ROOT):
        files.add(path.relative_to(ROOT).as_posix())


def reach(session, *args):
    time.sleep(0.05)  # long enough for a look at the resources
    if session._balancer.step == STEPS + 2:
        is_on.set()
    elif session._balancer.step == STEPS + 4:  # not the last one of the epoch
        is_on.clear()
    return before_allreduce(session, *args)


def traced(call):
    """Traces also what a graph calls, which may run on any thread."""

    def with_trace(function, *args, **options):
        def run(*values):
            sys.setprofile(trace)
            return function(*values)

        return call(run, *args, **options)

    return with_trace


WorkerSession.before_allreduce = reach
if sys.argv[1] == "tensorflow":
    import tensorflow as tf

    tf.numpy_function, tf.py_function = traced(tf.numpy_function), traced(tf.py_function)
threading.setprofile(trace)
sys.setprofile(trace)
TRAIN[sys.argv[1]](record=sys.argv[2])
sys.setprofile(None)
named = {name for name in files if name.startswith("lbbsp_")}
result("files", sorted(named - {"lbbsp_core/testing/fakes.py"}))  # with the policy of this job
