"""Every patch for MXNet in one place: what 1.9.1, its last release, needs on today's NumPy.

MXNet reads ``numpy.bool``, which NumPy 1.24 removed, while it is imported and while it runs
(apache/mxnet#21165; the project is retired, so it will not be fixed there). NumPy 2 lacks more of
the names that it lists. Each is restored only where it is missing.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np


def import_mxnet() -> ModuleType:
    """Imports MXNet, with NumPy as it expects it.

    In a process whose ``DMLC_ROLE`` is server or scheduler this serves until the job is over,
    and then exits: that is how MXNet starts them.

    Raises:
        ImportError: It is not installed, an earlier import has failed half-way, or a library of
            the system is missing; names the remedy.
    """
    restore_numpy_names()
    if "mxnet" not in sys.modules and "mxnet.base" in sys.modules:
        raise ImportError(
            "an earlier `import mxnet` has failed in this process and left half of it behind: "
            "start again with `import lbbsp_mx` before `import mxnet`"
        )
    try:
        import mxnet
    except ModuleNotFoundError as error:
        if error.name != "mxnet":
            raise _explained(error) from error
        raise ImportError(
            "mxnet is not installed: pip install 'lbbsp[mx]' (Linux on x86-64, Python 3.10 to 3.12)"
        ) from error
    except (AttributeError, OSError) as error:
        raise _explained(error) from error
    return mxnet


def restore_numpy_names() -> None:
    """Restores the names that MXNet 1.9.1 reads; what NumPy still has stays as it is."""
    for name, value in _names().items():
        if name not in vars(np):
            setattr(np, name, value)


def _names() -> dict[str, object]:
    inf, nan = float("inf"), float("nan")
    numbers = {"Inf": inf, "PINF": inf, "NINF": -inf, "NaN": nan, "NAN": nan}
    functions = {"alltrue": np.all, "sometrue": np.any, "product": np.prod, "round_": np.round}
    return {"bool": bool, "PZERO": 0.0, "NZERO": -0.0, **numbers, **functions}


def _explained(error: Exception) -> ImportError:
    remedy = (
        "install libgomp1, libquadmath0 and libstdc++6"
        if isinstance(error, OSError)
        else "pip install setuptools"
        if "distutils" in str(error)
        else "pip install 'lbbsp[mx]', which brings versions that fit"
    )
    return ImportError(f"mxnet cannot be imported ({error}): {remedy}")
