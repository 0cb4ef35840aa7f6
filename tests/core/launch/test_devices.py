"""Devices of the workers, with an invented number of GPUs."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

from lbbsp_core.launch import cluster, devices, launch
from lbbsp_core.launch.cluster import KEEP_FREED_MEMORY, job_spec
from lbbsp_core.launch.devices import NO_GPU, VARIABLE, assign_devices
from lbbsp_core.resources.gpu import count_gpus

# Prints what a worker sees. The first worker of the first attempt is killed.
SCRIPT = """
import json, os, signal, time
rank, restart = json.loads(os.environ["TF_CONFIG"])["task"]["index"], os.environ["LBBSP_RESTART"]
names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_FORCE_GPU_ALLOW_GROWTH")
print(json.dumps([restart, *map(os.environ.get, names)]))
while restart == "0":
    if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Returns a function that sets the number of GPUs; there are none at first."""
    for name in (VARIABLE, "CUDA_DEVICE_ORDER", "TF_FORCE_GPU_ALLOW_GROWTH"):
        monkeypatch.delenv(name, raising=False)

    def with_gpus(number):
        monkeypatch.setattr(devices, "count_gpus", lambda: number)
        monkeypatch.setattr(devices, "gpu_uuids", list)

    with_gpus(0)
    return with_gpus


def visible(given, workers, **options):
    assigned = assign_devices(given, workers, **options)
    return None if assigned is None else [own[VARIABLE] for own in assigned.environments]


@pytest.mark.parametrize(
    ("gpus", "users", "workers", "values", "note"),
    [
        (0, None, 2, None, None),
        (1, None, 1, ["0"], None),
        (2, None, 2, ["0", "1"], None),
        (2, None, 3, ["0", "1", "0"], "3 workers share 2 GPUs, which NCCL does not support: start"),
        (4, None, 2, ["0", "1"], "each worker uses one of 4 GPUs: to use all of them, give --dev"),
        (5, None, 2, ["0", "1"], "each worker uses one of 5 GPUs: to use more of them, give --de"),
        (4, None, 3, ["0", "1", "2"], "1 of 4 GPUs is not used, because all workers need the sa"),
        (8, "4,5,6", 3, ["4", "5", "6"], None),
        (8, "3,1", 1, ["3,1"], None),
        (8, "4,5,6,7", 2, ["4,5", "6,7"], None),
        (8, "4,5,6", 2, ["4", "5"], "1 of 3 GPUs is not used, "),  # strategies need equal numbers
        (8, "1", 2, ["1", "1"], "2 workers share 1 GPU,"),
        (8, "GPU-a1,MIG-b2", 2, ["GPU-a1", "MIG-b2"], None),
        (8, "4, 5,-1,6", 2, ["4", "5"], None),  # CUDA ignores those after an invalid one
        (8, "", 2, None, None),
        (8, "-1", 2, None, None),
        (8, "none", 2, None, None),
    ],
)
def test_each_worker_gets_a_gpu_of_its_own_or_its_part_of_the_users(
    machine, gpus, users, workers, values, note
):
    machine(gpus)
    environ = {} if users is None else {VARIABLE: users}
    assert visible(None, workers, environ=environ) == values
    if values is not None:
        said = assign_devices(None, workers, environ=environ).note
        assert said is None if note is None else said.startswith(note)


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("0,1", ["0", "1"]),
        ("0+1,2+3", ["0,1", "2,3"]),
        (["0+1", "GPU-a1b2"], ["0,1", "GPU-a1b2"]),
        ([0, 3], ["0", "3"]),
        ("1,none", ["1", "-1"]),
        ("2,2", ["2", "2"]),
        ("GPU-a1b2,GPU-c3", ["GPU-a1b2", "GPU-c3"]),  # CUDA takes beginnings, too
        ("none", ["-1", "-1"]),
        (["none", "none"], ["-1", "-1"]),
        ("all", None),
    ],
)
def test_devices_are_those_that_are_named(machine, monkeypatch, given, values):
    machine(4)
    monkeypatch.setattr(devices, "gpu_uuids", lambda: ["GPU-a1b2", "GPU-c3d4"])
    assert visible(given, 2) == values


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ("0", {}, "one entry per worker = 2, got 1 ('0'): give each worker its devices, such as"),
        ("0,1,2", {}, "per worker = 2, got 3"),
        ("0,", {}, "numbers or UUIDs of different GPUs, got ''"),
        ("0,one", {}, "got 'one'"),
        ("0,-1", {}, "got '-1'"),
        ("0,\N{ARABIC-INDIC DIGIT ONE}", {}, "got '\N{ARABIC-INDIC DIGIT ONE}'"),
        ("0,1+1", {}, "different GPUs, got '1+1'"),
        ("0,all", {}, "got 'all'"),
        ("0,4", {}, "from 0 to 3, because this machine has 4 GPUs, got 4"),
        ("0,1", {"gpus": 0}, "on which none is found, got 0: give none, or install"),
        ("0+1,GPU-a1", {"gpus": 0, "framework": "mxnet"}, "on which none is found, got 0"),
        ("0,1", {"users": "2,1"}, "must be among those of CUDA_VISIBLE_DEVICES = '2,1', got 0"),
        ("0,1", {"users": "-1"}, "DEVICES = '-1', got 0: choose from these, or unset"),
        ("GPU-a1,GPU-c4", {}, "this machine (GPU-a1b2, GPU-c3d4), got GPU-c4: choose"),
        ("0,none", {}, "collectives, got '0,none': give each worker a GPU"),
        ("0,1", {"speeds": [1, 1]}, "omit one of them, or give devices none"),
        ("all", {"speeds": [1, 1]}, "omit one of them, or give devices none"),
    ],
)
def test_impossible_devices(machine, monkeypatch, given, options, words):
    asked = dict(options)
    machine(asked.pop("gpus", 4))
    monkeypatch.setattr(devices, "gpu_uuids", lambda: ["GPU-a1b2", "GPU-c3d4"])
    if "users" in asked:
        monkeypatch.setenv(VARIABLE, asked.pop("users"))
    with pytest.raises(ValueError, match=re.escape(words)):
        launch([__file__], workers=2, devices=given, **asked)


def test_only_the_collectives_of_tensorflow_need_one_type_of_device(machine):
    machine(2)
    for given in ("0,1", "none,none"):
        assert assign_devices(given, 2, may_mix=False) == assign_devices(given, 2)
    for may_mix, words in ((True, "let some of them use the CPU, by an entry"), (False, "let all")):
        assert words in assign_devices(None, 3, may_mix=may_mix).note
    with pytest.raises(ValueError, match="there is no script"):  # a later error
        launch(["none.py"], workers=2, devices="0,none", framework="mxnet")


def test_emulation_hides_the_gpus(machine):
    machine(2)
    for given, users in ((None, {}), (None, {VARIABLE: "0,1"}), ("none", {})):
        assert visible(given, 2, emulated=True, environ=users) == ["-1", "-1"]


def test_devices_are_numbered_as_by_the_driver_and_shared_ones_are_not_filled(machine):
    machine(2)
    first, _, third = assign_devices("0,1,0", 3, environ={}).environments
    assert first == third == {
        VARIABLE: "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }  # fmt: skip
    (own,) = assign_devices(None, 1, environ={VARIABLE: "1"}).environments
    assert own == {VARIABLE: "1"}, "the user's numbers are CUDA's own"
    users = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "TF_FORCE_GPU_ALLOW_GROWTH": "false"}
    assert set(assign_devices("0,0", 2, environ=users).environments[0]) == {VARIABLE}


def test_processes_beside_the_workers_use_no_gpu(monkeypatch, tmp_path):
    (tmp_path / "driver").touch()
    monkeypatch.setattr(cluster, "GPU_DEVICES", (tmp_path / "driver",))
    given = [{VARIABLE: "3"}, NO_GPU]
    job = job_spec("mxnet", 2, emulated=False, run_dir=None, servers=1, devices=given)
    assert [worker[VARIABLE] for worker in job.workers] == ["3", "-1"]
    beside = [helper.environment for helper in job.helpers]
    assert {own[VARIABLE] for own in beside} == {"-1"}
    kept = [own.items() >= KEEP_FREED_MEMORY.items() for own in [*job.workers, *beside]]
    assert kept == [False, True, *[True] * len(beside)], "where tensors are on the CPU"


@pytest.mark.slow
def test_workers_see_their_devices_and_survivors_keep_them(machine, tmp_path, capfd):
    machine(2)
    (tmp_path / "see.py").write_text(SCRIPT)
    seen = {}

    def note(rank, line):
        restart, *values = json.loads(line)
        seen[restart, rank] = values

    command = [str(tmp_path / "see.py")]
    assert launch(command, workers=3, output=note, max_restarts=1, elastic=1) == 0
    assert seen["0", 0] == ["0", "PCI_BUS_ID", "true"]
    assert seen["1", 0] == ["1", "PCI_BUS_ID", None]
    assert seen["1", 1] == ["0", "PCI_BUS_ID", "true"]
    assert capfd.readouterr().err.count("3 workers share 2 GPUs") == 1, "said once"


# The number of GPUs


def test_gpus_are_counted_by_the_driver_or_by_device_files(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    calls = []
    driver = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert count_gpus(tmp_path) == 3
    assert calls == ["init", "shutdown"]
    driver.nvmlDeviceGetCount = None  # an error of the driver
    assert count_gpus(tmp_path) == 0
    driver.nvmlInit = None
    assert count_gpus(tmp_path) == 2
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert count_gpus(tmp_path) == 2
    assert count_gpus(tmp_path / "none") == 0
