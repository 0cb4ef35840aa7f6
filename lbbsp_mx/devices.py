"""Devices of this worker, as a short text for users."""

from __future__ import annotations

from collections.abc import Sequence

import mxnet as mx

from lbbsp_core.runtime.identity import cpu, gpu


def device_text(contexts: Sequence[mx.Context]) -> str:
    """Returns the devices among which this worker splits its batch, such as "2 x cpu, 2 cores"."""
    names = [_name(context) for context in contexts]
    if len(set(names)) > 1:
        return ", ".join(names)
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def _name(context: mx.Context) -> str:
    return gpu(context.device_id) if context.device_type == "gpu" else cpu()


def unknown_devices_text(count: int) -> str:
    """Returns the devices of a Module, which are unknown before it is bound if there are GPUs."""
    return "" if mx.context.num_gpus() else device_text([mx.cpu()] * count)
