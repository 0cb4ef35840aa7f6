"""Names that workers tell each other, on their way through the handshake."""

import sys
from types import SimpleNamespace

import pytest

from lbbsp_core import Affine, Balancer
from lbbsp_core.runtime.exchange.identity import Identity, cpu, gpu, hosts_and_devices
from lbbsp_core.runtime.loop.start import agree


class Rows:
    """Collectives of two workers, of which the other one has longer names."""

    rank, workers = 0, 2

    def __init__(self, other):
        self.other, self.gathers = other, 0

    def all_gather(self, values):
        self.gathers += 1
        theirs = list(values)
        if len(values) == 1:
            return [list(values), [len(self.other)]]
        if self.gathers == 3:
            theirs = self.other
            longest = max(len(values), len(theirs))
            return [[*row, *[0] * (longest - len(row))] for row in (values, theirs)]
        return [list(values), theirs]


def test_the_handshake_carries_names_without_another_gather():
    mine = Balancer(rank=0, workers=2, global_batch_size=12, cost=Affine(0.1, 0.01))
    other = Balancer(rank=1, workers=2, global_batch_size=12)
    names = Identity("höst-with-a-long-name", ("GPU:0", "GPU:1")).pack()
    rows = Rows([*other.static_info(), *names])
    peers = agree(mine, None, rows, {}, Identity("a", ("cpu",)).pack())
    assert rows.gathers == 3  # facts, lengths, rows
    assert hosts_and_devices(peers) == (("a", "höst-with-a-long-name"), ("cpu", "GPU:1"))


def test_a_process_with_several_replicas_names_the_device_of_each():
    two = Identity("h", ("GPU:0", "GPU:1"))
    assert [two.device(rank) for rank in range(4)] == ["GPU:0", "GPU:1", "GPU:0", "GPU:1"]
    assert Identity().device(3) == ""
    assert Identity.unpack([]) == Identity.unpack([0, 0]) == Identity()


@pytest.mark.parametrize("devices", [(), ("a\x1b[31m\nb",), ("x" * 500, "y")])
def test_names_stay_short_and_on_one_line(devices, monkeypatch):
    monkeypatch.setenv("LBBSP_HOST", "pod\x07-1\u2028x")
    here = Identity.here(devices)
    assert here.host == "pod?-1?x"
    assert here.devices == {0: (cpu(),), 1: ("a?[31m?b",), 2: ("x" * 80, "y")}[len(devices)]
    assert Identity.unpack([*here.pack(), 0, 0, 0]) == here


def test_without_a_driver_a_gpu_has_a_number(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu(3) == "gpu 3"


class NVMLError(Exception):
    """As in nvidia-ml-py: it is no OSError."""


@pytest.mark.parametrize("failing", [None, "nvmlDeviceGetName", "nvmlShutdown"])
def test_a_gpu_whose_name_cannot_be_read_has_a_number(monkeypatch, failing):
    def answer(function):
        def call(*_):
            if function == failing:
                raise NVMLError("Unknown Error")
            return b"H100" if function == "nvmlDeviceGetName" else None

        return call

    names = ("Init", "Shutdown", "DeviceGetHandleByIndex", "DeviceGetUtilizationRates",
             "DeviceGetMemoryInfo", "DeviceGetName")  # fmt: skip
    functions = {name: answer(name) for name in (f"nvml{each}" for each in names)}
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **functions))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu(0) == ("gpu 0" if failing else "H100")
