"""Checks of MXNet for `lbbsp doctor`, which runs ``python -m lbbsp_mx.doctor``."""

from __future__ import annotations

import resource

import mxnet as mx
import numpy as np

from lbbsp_core.doctor.finding import Finding, ok, print_findings, problem
from lbbsp_core.installation import extra
from lbbsp_mx import compat

_REMEDY = "install the version that lbbsp knows: pip install " + extra("mx")


def findings() -> list[Finding]:
    """Returns all findings of this process: the import, features, and patches in their places."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = f"MXNet {mx.__version__}, NumPy {np.__version__}"
    known = mx.runtime.Features()
    names = [name for name in ("CUDA", "MKLDNN", "OPENMP", "DIST_KVSTORE") if name in known]
    enabled = [name for name in names if known.is_enabled(name)]
    if "DIST_KVSTORE" in enabled:
        features = ok("features", f"{', '.join(enabled)}; {mx.context.num_gpus()} GPUs")
    else:
        text = "it is built without DIST_KVSTORE, which connects workers"
        features = problem("features", text, _REMEDY)
    restored = compat.restored_names()
    text = f"needed, and in place: {', '.join(restored)}" if restored else "not needed: it has all"
    found = [
        ok("import lbbsp_mx", f"{versions}; {peak:.0f} MB of memory"),
        features,
        ok("patch: names of NumPy", text),
    ]
    for purpose, is_there in (
        ("patch: sample weights of losses", compat.watch_sample_weights(lambda: None)),
        ("patch: handlers of estimators", compat.add_handlers(lambda _: [])),
    ):
        if is_there:
            found.append(ok(purpose, "needed, and in place"))
        else:
            found.append(problem(purpose, "not in place: it has no such function", _REMEDY))
    return found


if __name__ == "__main__":
    print_findings(findings())
