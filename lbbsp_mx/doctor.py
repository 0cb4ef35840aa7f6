"""Checks of MXNet for `lbbsp doctor`, which runs ``python -m lbbsp_mx.doctor``."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import mxnet as mx
import numpy as np

from lbbsp_core.doctor.finding import Finding, ok, print_findings, problem
from lbbsp_mx import compat

_REMEDY = "install the version that lbbsp knows: pip install 'lbbsp[mx]'"


def findings() -> list[Finding]:
    """Returns all findings of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = f"MXNet {mx.__version__}, NumPy {np.__version__}"
    return [
        ok("import lbbsp_mx", f"{versions}; {peak:.0f} MB of memory"),
        _features(),
        *_patches(),
    ]


def _features() -> Finding:
    features = mx.runtime.Features()
    names = [name for name in ("CUDA", "MKLDNN", "OPENMP", "DIST_KVSTORE") if name in features]
    enabled = [name for name in names if features.is_enabled(name)]
    if "DIST_KVSTORE" not in enabled:
        return problem(
            "features", "it is built without DIST_KVSTORE, which connects workers", _REMEDY
        )
    return ok("features", f"{', '.join(enabled)}; {mx.context.num_gpus()} GPUs")


def _patches() -> Iterator[Finding]:
    """Yields each patch, whether it is needed, and whether it is in place."""
    restored = compat.restored_names()
    text = f"needed, and in place: {', '.join(restored)}" if restored else "not needed: it has all"
    yield ok("patch: names of NumPy", text)
    for purpose, is_there in (
        ("sample weights of losses", compat.watch_sample_weights(lambda: None)),
        ("handlers of estimators", compat.add_handlers(lambda _: [])),
    ):
        if is_there:
            yield ok(f"patch: {purpose}", "needed, and in place")
        else:
            yield problem(f"patch: {purpose}", "not in place: it has no such function", _REMEDY)


if __name__ == "__main__":
    print_findings(findings())
