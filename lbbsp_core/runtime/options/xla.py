"""XLA's auto-clustering, which ``TF_XLA_FLAGS`` turns on."""

from __future__ import annotations

import re
from typing import Final

AUTO_JIT_REMEDY: Final = (
    "unset TF_XLA_FLAGS, or keep the sizes few (granularity=, interval= of the balancer)"
)

_OFF: Final = ("", "0", "-1", "off")


def auto_jit(flags: str, *, on_gpu: bool = True) -> str:
    """Returns the flag that turns on auto-clustering; empty if it is off.

    On CPUs, clustering needs another flag, too.

    Example:
        >>> [auto_jit("--tf_xla_auto_jit=2", on_gpu=on_gpu) for on_gpu in (True, False)]
        ['--tf_xla_auto_jit=2', '']
    """
    values = re.findall(r"--tf_xla_auto_jit=(\S*)", flags)
    if not values or values[-1] in _OFF or not (on_gpu or "--tf_xla_cpu_global_jit" in flags):
        return ""
    return f"--tf_xla_auto_jit={values[-1]}"
