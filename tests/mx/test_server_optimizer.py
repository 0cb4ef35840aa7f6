"""Optimizers on their way to the servers, which are processes of their own."""

import pickle
import sys

from mxnet import lr_scheduler, optimizer
from scripts import errors_of

from lbbsp_mx.store.server_optimizer import ScriptOptimizer

SCHEDULE = """
from mxnet.lr_scheduler import LRScheduler
class Halving(LRScheduler):
    def __call__(self, num_update):
        return self.base_lr / 2**num_update
"""
SERVER = """
import os, sys, warnings
warnings.simplefilter("ignore")
os.chdir("/")
from lbbsp_mx.server import read_optimizer
received = read_optimizer(open(sys.argv[1], "rb").read())
print(received.optimizer.lr_scheduler(2), file=sys.stderr)
"""


def sent(scheduler, path):
    """Writes what MXNet sends to a server into a file."""
    rule = optimizer.SGD(learning_rate=0.5, lr_scheduler=scheduler)
    path.write_text(pickle.dumps(ScriptOptimizer(rule, {}), 0).decode())
    return path


def test_a_server_imports_modules_from_beside_the_script(tmp_path, monkeypatch):
    (tmp_path / "schedules.py").write_text(SCHEDULE)
    monkeypatch.syspath_prepend(tmp_path)
    import schedules

    path = sent(schedules.Halving(), tmp_path / "sent")
    assert errors_of(SERVER, str(path))[-1] == "0.125"


def test_classes_of_the_script_itself_are_refused_with_the_remedy(tmp_path, monkeypatch):
    class Own(lr_scheduler.LRScheduler):
        pass

    monkeypatch.setattr(sys.modules["__main__"], "Own", Own, raising=False)
    Own.__module__, Own.__qualname__ = "__main__", "Own"
    *_, last = errors_of(SERVER, str(sent(Own(), tmp_path / "sent")), status=1)
    assert "define classes of your own in a module beside the script, and import it" in last
