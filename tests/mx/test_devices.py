"""Devices of a trainer, and whether the memory of a GPU shows what batches need."""

from __future__ import annotations

import mxnet as mx
import pytest

from lbbsp_core.runtime.exchange.handshake import Devices, cpu
from lbbsp_mx import parameters


def test_devices_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "gpu", lambda index: f"GPU {index}")
    assert parameters.devices_of([mx.cpu()]) == Devices((cpu(),))
    assert parameters.devices_of([mx.cpu(0), mx.cpu(1)]) == Devices((f"2 x {cpu()}",))
    assert parameters.devices_of([mx.gpu(0)]) == Devices(("GPU 0",), True, True)
    assert parameters.devices_of([mx.gpu(1)]) == Devices(("GPU 1",), True), "another one is sampled"
    assert parameters.devices_of([mx.gpu(0), mx.gpu(1)]) == Devices(("GPU 0, GPU 1",), True)
