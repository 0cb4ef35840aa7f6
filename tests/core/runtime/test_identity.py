"""Names that workers tell each other, on their way through the handshake."""

import json
import sys
from types import SimpleNamespace

import pytest

from lbbsp_core import Affine, Balancer
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.exchange.handshake import Identity, cpu, gpu
from lbbsp_core.runtime.loop import start


def test_the_handshake_carries_names(monkeypatch):
    mine = Balancer(rank=0, workers=2, global_batch_size=12, cost=Affine(0.1, 0.01))
    other = Balancer(rank=1, workers=2, global_batch_size=12)
    theirs = json.dumps([other.static_info(), "höst-with-a-long-name", ["GPU:0", "GPU:1"]])
    monkeypatch.setattr(handshake, "gather_bytes", lambda _, data: [data, data])
    monkeypatch.setattr(start, "gather_bytes", lambda _, data: [data, theirs.encode()])
    peers = start.agree(mine, None, None, {}, Identity("a", ("cpu",)))
    assert [peer.identity.host for peer in peers] == ["a", "höst-with-a-long-name"]
    assert [peer.identity.device(rank) for rank, peer in enumerate(peers)] == ["cpu", "GPU:1"]


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
    assert gpu(0) == ("gpu 0" if failing == "nvmlDeviceGetName" else "H100")
