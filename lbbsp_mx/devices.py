"""Devices of this worker: their kind, and a short text for users."""

from __future__ import annotations

from collections.abc import Sequence

import mxnet as mx

from lbbsp_core.runtime.exchange.handshake import Devices, cpu, gpu


def devices_of(contexts: Sequence[mx.Context]) -> Devices:
    """Returns the devices among which this worker splits its batch, such as "2 x cpu, 2 cores"."""
    names = [gpu(one.device_id) if one.device_type == "gpu" else cpu() for one in contexts]
    text = names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    if len(set(names)) > 1:
        text = ", ".join(names)
    are_gpus = all(context.device_type == "gpu" for context in contexts)
    # Only the memory of the first GPU is sampled.
    return Devices((text,), are_gpus, are_gpus and [each.device_id for each in contexts] == [0])


def devices_of_module(count: int) -> Devices:
    """Returns the devices of a Module, which are unknown before it is bound if there are GPUs."""
    return Devices(("",)) if mx.context.num_gpus() else devices_of([mx.cpu()] * count)
