"""What loggers and TensorBoard get, without a cluster."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import keras
import pytest

from lbbsp_core.runtime.record.record import StepLine
from lbbsp_tf.monitoring import WorkerScalars

DOCUMENT = Path(__file__).parents[2] / "docs" / "monitoring.md"
CALLBACKS = re.findall(r"```python\n(class .*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)


def test_each_worker_has_curves_and_so_have_all_together(tmp_path):
    observers = []
    scalars = WorkerScalars(SimpleNamespace(rank=0, observers=observers))
    scalars.begin_fit([keras.callbacks.TensorBoard(tmp_path)])
    line = StepLine(step=0, sizes=(4,), busy_seconds=(0.1,), predicted_seconds=(None,),
                    wall_seconds=0.2, excluded=(), values={"parts": (3.0,)})  # fmt: skip
    for observer in observers:
        observer(line)
    scalars.end_epoch()
    scalars.end_fit()
    assert {path.name for path in (tmp_path / "lbbsp").iterdir()} == {"all", "worker_0"}
    (curves,) = (tmp_path / "lbbsp" / "worker_0").iterdir()
    assert b"lbbsp/parts" in curves.read_bytes()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("module", "function", "name"),
    [("wandb", "log", "batch_size/{}"), ("mlflow", "log_metrics", "batch_size_{}")],
)
def test_the_documented_callbacks_log_on_one_worker(monkeypatch, module, function, name, rank):
    given = []
    fake = ModuleType(module)
    setattr(fake, function, lambda values, step: given.append((step, values)))
    monkeypatch.setitem(sys.modules, module, fake)
    (code,) = (each for each in CALLBACKS if f"{module}." in each)
    assert len(code.splitlines()) == 5
    balancer = SimpleNamespace(rank=rank, sizes=(3, 5))
    names = {"keras": keras, "balancer": balancer, module: __import__(module)}
    exec(code, names)
    (callback,) = (
        each for each in names.values()
        if isinstance(each, type) and issubclass(each, keras.callbacks.Callback)
    )  # fmt: skip
    logs = {"loss": 0.5, "waiting": 0.1, "speedup": 1.5}
    callback().on_epoch_end(4, logs)
    expected = (4, {**logs, name.format(0): 3, name.format(1): 5})
    assert given == ([expected] if rank == 0 else [])
