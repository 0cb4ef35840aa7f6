"""Without this a type checker accepts misspelt options of the plugins, and editors know none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from doc_pages import ROOT

pytest.importorskip("mypy")

CONFIG = """
[mypy]
follow_imports = silent
[mypy-keras.*,mxnet.*,tensorflow.*]
follow_imports = skip
ignore_missing_imports = true
"""

SCRIPT = """
import lbbsp_core, lbbsp_mx, lbbsp_tf

options: lbbsp_core.Options = {"policy": "observe", "limits": [lbbsp_core.Limits(8), 64]}
lbbsp_tf.LoadBalancer(None, 64, every=5, **options)
lbbsp_mx.Trainer({}, "sgd", global_batch_size=64, policy=lbbsp_core.Observe(), seed=3)
lbbsp_mx.AsyncTrainer({}, "sgd", sync="asp", global_batch_size=64, record="run")
store = lbbsp_mx.KVStore()
store.balance(None, seed=3, devices=2, compare_weights=None)

lbbsp_tf.LoadBalancer(None, 64, polcy="lbbsp")  # refused
lbbsp_tf.LoadBalancer(None, 64, granularity="8")  # refused
lbbsp_mx.Trainer({}, "sgd", global_batch_size=64, polcy="lbbsp")  # refused
lbbsp_mx.AsyncTrainer({}, "sgd", sync="asp", global_batch_size=64, polcy="bsp")  # refused
lbbsp_mx.AsyncTrainer({}, "sgd", sync="asp", global_batch_size=64, metrics_file="a.prom")  # refused
store.balance(None, polcy="lbbsp")  # refused
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", pytest.param("3.13", marks=pytest.mark.campaign)])
def test_mypy_refuses_misspelt_options_and_wrong_types(tmp_path, version):
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--python-version", version, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    wrong = {line.split(":")[1] for line in done.stdout.splitlines() if ": error: " in line}
    lines = enumerate(SCRIPT.splitlines(), 1)
    assert wrong == {str(number) for number, line in lines if "# refused" in line}, done.stdout
