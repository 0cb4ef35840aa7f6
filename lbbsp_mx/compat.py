"""All patches for MXNet: a NumPy name that 1.9.1 needs; hooks in losses, estimators, the profiler.

MXNet reads ``numpy.bool``, which NumPy 1.24 removed, while it is imported and while it runs
(apache/mxnet#21165; the project is retired, so it will not be fixed there). With NumPy 2 it cannot
be imported at all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from lbbsp_core.installation import extra
from lbbsp_mx import env

_SERVER_MODULE = "mxnet.kvstore.kvstore_server"

_UNSUPPORTED_PYTHON = (3, 13)
"""Oldest Python without a release of NumPy 1, on which MXNet 1.9.1 depends."""


def import_mxnet() -> None:
    """Imports MXNet, after restoring the name that it needs in NumPy.

    If ``DMLC_ROLE`` is server or scheduler, MXNet would serve within the import, where nothing can
    watch over the job: its module that does so is left out, and `lbbsp_mx.server` serves instead.
    """
    restore_numpy_names()
    if "mxnet" not in sys.modules and "mxnet.base" in sys.modules:
        raise ImportError(
            "an earlier `import mxnet` has failed in this process and left a partial module: "
            "restart Python, with `import lbbsp_mx` before `import mxnet`"
        )
    if env.role() in ("server", "scheduler"):
        sys.modules.setdefault(_SERVER_MODULE, ModuleType(_SERVER_MODULE))
    try:
        import mxnet  # noqa: F401
    except (ModuleNotFoundError, AttributeError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "mxnet":
            missing = f"mxnet is not installed: {_installation()}"
            raise ModuleNotFoundError(missing, name="mxnet") from error
        remedy = f"{_installation()}, which installs compatible versions"
        if isinstance(error, OSError):
            remedy = "install libgomp1, libquadmath0 and libstdc++6"
        elif "distutils" in str(error):
            remedy = "pip install setuptools"
        raise ImportError(f"mxnet cannot be imported ({error}): {remedy}") from error


def restore_numpy_names() -> None:
    """Restores the name that MXNet 1.9.1 reads and that NumPy lacks."""
    vars(np).setdefault("bool", bool)


def watch_sample_weights(notice: Callable[[], None]) -> None:
    """Calls `notice` whenever a gluon loss has a `sample_weight`; its result stays as it was.

    Gluon has no such hook.
    """
    from mxnet.gluon import loss as losses

    weighted = losses._apply_weighting

    def watched(F: Any, loss: Any, weight: Any = None, sample_weight: Any = None) -> Any:
        if sample_weight is not None:
            notice()
        return weighted(F, loss, weight, sample_weight)

    losses._apply_weighting = watched


def watch_clipping(notice: Callable[[Sequence[Any]], None]) -> None:
    """Calls `notice` with the arrays that `gluon.utils.clip_global_norm` is about to clip."""
    from mxnet.gluon import utils

    clip = utils.clip_global_norm

    @functools.wraps(clip)
    def noticed(arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        notice(arrays)
        return clip(arrays, *args, **kwargs)

    utils.clip_global_norm = noticed


def watch_backward(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls `before` and `after` each call that computes gradients."""
    from mxnet import autograd
    from mxnet.ndarray import NDArray

    def watched(backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def watched_backward(*args: Any, **kwargs: Any) -> None:
            before()
            backward(*args, **kwargs)
            after()

        return watched_backward

    autograd.backward, NDArray.backward = map(watched, (autograd.backward, NDArray.backward))


def add_handlers(further: Callable[[Sequence[Any]], list[Any]]) -> None:
    """Lets estimators run further handlers, at their place among the event handlers of a fit.

    Gluon sorts handlers by one priority each, and has no way to add one later. `further` returns
    those that belong to the handlers of a fit.
    """
    from mxnet.gluon.contrib.estimator import Estimator

    categorize = Estimator._categorize_handlers

    @functools.wraps(categorize)
    def categorize_all(self: Any, event_handlers: Sequence[Any]) -> Any:
        if not (added := further(event_handlers)):
            return categorize(self, event_handlers)
        union = [*event_handlers, *added]
        return categorize(self, sorted(union, key=lambda handler: getattr(handler, "priority", 0)))

    Estimator._categorize_handlers = categorize_all


@functools.lru_cache
def refuse_fixed_batches(kind: type) -> None:
    """Lets the classes of MXNet whose batches keep one size refuse iterators of a kind."""
    import mxnet as mx

    for cls in (mx.model.FeedForward, mx.mod.SequentialModule):

        def checked(self: Any, *args: Any, fit: Any = cls.fit, **options: Any) -> Any:
            if any(isinstance(argument, kind) for argument in (*args, *options.values())):
                raise ValueError(
                    f"{type(self).__name__} cannot train on a balanced iterator, because its "
                    "batches keep one size: use mx.mod.Module, or leave balance out"
                )
            return fit(self, *args, **options)

        cls.fit = functools.wraps(cls.fit)(checked)


def guard_profiler(quiet: Callable[[], AbstractContextManager[object]]) -> None:
    """Starts MXNet's profiler in a context: calls of other threads that it finds running abort.

    The profiler of the servers concerns no thread of this process, and a start may wait for them.
    """
    from mxnet import profiler

    def guarded(start: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(start)
        def start_quietly(*args: Any, **kwargs: Any) -> None:
            in_servers = "server" in (*args, *kwargs.values())
            with nullcontext() if in_servers else quiet():
                start(*args, **kwargs)

        return start_quietly

    profiler.set_state, profiler.resume = map(guarded, (profiler.set_state, profiler.resume))


def _installation() -> str:
    """Returns how to install MXNet for this Python, or where it can be installed."""
    command = f"pip install {extra('mx')}"
    if sys.version_info[:2] < _UNSUPPORTED_PYTHON:
        return f"{command} (Linux on x86-64)"
    running = ".".join(map(str, sys.version_info[:2]))
    return (
        f"MXNet 1.9.1 needs NumPy 1, which Python {running} does not have; create a virtual "
        f"environment with Python 3.10 to 3.12, and run {command} there"
    )
