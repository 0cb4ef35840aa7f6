"""What a user of two unequal GPUs meets first: real commands and workers, an invented driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waits import HANG_SECONDS

from lbbsp_core import read_run

DRIVER = """
from types import SimpleNamespace

class NVMLError(Exception):
    pass

nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 2
nvmlSystemGetDriverVersion = lambda: "570.86.10"
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda device: ["NVIDIA H200", "NVIDIA T4"][device]
nvmlDeviceGetUUID = lambda device: f"GPU-{device}"
nvmlDeviceGetUtilizationRates = lambda device: SimpleNamespace(gpu=[97, 55][device])
nvmlDeviceGetMemoryInfo = lambda device: SimpleNamespace(total=100, used=[30, 40][device])
"""

SCRIPTS = Path(__file__).parents[2] / "parallel" / "scripts"

# A worker without a framework, in virtual time: rows are exchanged through a connection of the two.
WORKER = """
import json, os, time
from multiprocessing.connection import Client, Listener
from lbbsp_core import SessionOptions, WorkerSession
from lbbsp_core.runtime.exchange.handshake import Devices, gpu
from virtual_time import Unequal

config = json.loads(os.environ["TF_CONFIG"])
rank, (host, port) = config["task"]["index"], config["cluster"]["worker"][0].split(":")

class Pair:
    workers = 2

    def __init__(self):
        self.rank = rank
        if rank == 0:
            self.other = Listener((host, int(port))).accept()
        while rank:
            try:
                self.other = Client((host, int(port)))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)

    def all_gather(self, mine):
        self.other.send(mine)
        rows = mine, self.other.recv()
        return rows if rank == 0 else rows[::-1]

pair, devices = Pair(), Devices((gpu(0),), are_gpus=True, show_memory=True)
session = WorkerSession(pair, 256, SessionOptions(), framework="toy", devices=devices)
session.use_order(session.make_order(256 * 30))
session.start({})
compute = Unequal(session, [0.001, 0.002])
for step in range(30):
    session.begin_step()
    session.local_indices(step)
    compute()
    session.after_allreduce(pair.all_gather(session.before_allreduce()))
session.close()
"""


@pytest.mark.slow
def test_the_first_commands_on_two_gpus(tmp_path):
    (tmp_path / "pynvml.py").write_text(DRIVER)
    (tmp_path / "worker.py").write_text(WORKER)
    hidden = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    path = [str(tmp_path), str(SCRIPTS), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path)

    def command(*arguments):
        ran = subprocess.run(
            [sys.executable, "-m", "lbbsp_core", *arguments],
            env=environment, capture_output=True, text=True, timeout=HANG_SECONDS,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    record = str(tmp_path / "run")
    command("launch", "-n", "2", "--devices", "1,0", "--run-dir", record, f"{tmp_path}/worker.py")
    run = read_run(record)
    assert run.header.devices == ("NVIDIA T4", "NVIDIA H200")
    assert {"gpu_percent", "gpu_memory_percent"} <= set(run.header.drivers)
    assert all(size % 8 == 0 for step in run.steps for size in step.sizes), "as on GPUs"
    assert run.steps[-1].sizes[0] > 128, "worker 0 is twice as fast"

    view = command("watch", "--once", record)
    assert "NVIDIA T4" in view
    assert "NVIDIA H200" in view
