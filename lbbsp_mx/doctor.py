"""Checks of MXNet for `lbbsp doctor`, which runs ``python -m lbbsp_mx.doctor``."""

from __future__ import annotations

import resource

import mxnet as mx
import numpy as np

from lbbsp_core.doctor.finding import Finding, ok, print_findings, problem
from lbbsp_core.installation import extra


def findings() -> list[Finding]:
    """Returns all findings of this process: the import, with its patch, and features."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = f"MXNet {mx.__version__}, NumPy {np.__version__}"
    built = mx.runtime.Features()
    names = ("CUDA", "MKLDNN", "OPENMP", "DIST_KVSTORE")
    enabled = [name for name in names if built.is_enabled(name)]
    if "DIST_KVSTORE" in enabled:
        features = ok("features", f"{', '.join(enabled)}; {mx.context.num_gpus()} GPUs")
    else:
        text = "it is built without DIST_KVSTORE, which connects workers"
        remedy = "install the version that lbbsp knows: pip install " + extra("mx")
        features = problem("features", text, remedy)
    return [
        ok("import lbbsp_mx", f"{versions}; {peak:.0f} MB of memory"),
        features,
        ok("patch: names of NumPy", "needed, and in place: bool"),  # else the import had failed
    ]


if __name__ == "__main__":
    print_findings(findings())
