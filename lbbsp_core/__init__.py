"""LB-BSP without a framework: measure, predict, exchange, allocate, synchronise, record.

`WorkerSession` is the loop of a training worker around a `Balancer`; the other names are its
stages. A name is imported when it is used first (PEP 562), so that `import lbbsp_core.types` does
not load the loop. The launcher, the profiler, the simulator and the reports are separate packages.
"""

from importlib import import_module
from typing import Any, Final

from lbbsp_core._version import __version__ as __version__

_NAMES: Final = {
    "measure": "BusyTimer OutlierFilter",
    "types": "Limits Measurement",
    "resources": "ResourceSampler",
    "predict": "Arima Ema LastValue Mixture Narx Predictor Recurrent",
    "cost": "Affine Cost Profile Proportional Saturating",
    "cost.online": "CostShape CostShapeState",
    "allocation": "allocate",
    "policy": "BatchConstraints EpochBalanced Even FixedShares LeaderStraggler LoadBalanced "
    "Observation Observe Policy ProportionalControl",
    "order": "GlobalOrder",
    "sync": "ASP BSP DSSP SSP ElasticBSP SyncDecision Synchroniser ZipLineResult zipline",
    "runtime.planning.balancer": "Balancer",
    "runtime.loop.session": "WorkerSession",
    "runtime.options.options": "AsyncOptions Options SessionOptions",
    "runtime.exchange.collectives": "Collectives SingleWorker",
    "runtime.exchange.protocol": "DisagreementError StepMessage",
    "runtime.record.events": "EventLine",
    "runtime.record.record": "PushLine Run RunHeader StepLine read_run",
    "runtime.record.writer": "RunRecord",
}
"""Public names by the module that defines them, in the order of the stages of a step."""

_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
