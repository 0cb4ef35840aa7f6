"""MXNet's own tests of stores and trainers, with those of this package."""

import os
import subprocess
import sys
from importlib.util import find_spec

import mxnet_source
import pytest
from mxnet_source import NIGHTLY, UNIT

from lbbsp_core.launch import launch

pytestmark = [
    pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'"),
    pytest.mark.skipif(
        mxnet_source.source() is None,
        reason="LBBSP_MXNET_SOURCE names no source tree of MXNet 1.9.1",
    ),
]


@pytest.mark.parametrize(
    ("name", "passes"),
    [("test_kvstore", 10), ("test_kvstore_custom", 7), ("test_gluon_trainer", 11)],
)
def test_in_one_process(tmp_path, name, passes):
    (test,) = mxnet_source.copy(mxnet_source.source(), tmp_path, [UNIT / f"{name}.py"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert f"{passes} passed" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("dist_sync_kvstore", ["--type=default_cpu"]),
        ("dist_sync_kvstore", ["--type=default_cpu", "--no-multiprecision"]),
        ("dist_sync_kvstore", ["--type=compressed_cpu", "--no-multiprecision"]),
        ("dist_sync_kvstore", ["--type=gluon_type_cpu"]),
        ("dist_sync_kvstore", ["--type=gluon_step_cpu"]),
        ("dist_sync_kvstore", ["--type=gluon_sparse_step_cpu"]),
        ("dist_sync_kvstore", ["--type=invalid_cpu"]),
        ("dist_sync_kvstore", ["--type=init_gpu", "--no-gpu"]),
        ("dist_async_kvstore", []),
        ("dist_device_sync_kvstore", []),
        ("dist_device_sync_kvstore_custom", ["--name=lbbsp_dist_device_sync"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "all",
)
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
def test_on_a_cluster(tmp_path, monkeypatch, script, options, workers, servers):
    (copied,) = mxnet_source.copy(mxnet_source.source(), tmp_path, [NIGHTLY / f"{script}.py"])
    monkeypatch.chdir(tmp_path)  # to which the scripts write
    # In the test of compression a push can overtake a pull, with MXNet's own store as well.
    attempts = 6 if "--type=compressed_cpu" in options else 1
    for _ in range(attempts):
        lines = []
        status = launch(
            [str(copied), *options],
            workers=workers,
            servers=servers,
            framework="mxnet",
            timeout=600,
            output=lambda rank, line, lines=lines: lines.append(f"[{rank}] {line}"),
        )
        if status == 0:
            break
    assert status == 0, "\n".join(lines)
