"""LB-BSP without a framework: measure, predict, exchange, allocate, synchronise, record.

`WorkerSession` is the loop of a training worker around a `Balancer`; the other names are its
stages. The launcher, the profiler, the simulator and the reports are separate packages.
"""

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Affine, Cost, Profile, Proportional, Saturating
from lbbsp_core.cost.online import CostShape, CostShapeState
from lbbsp_core.measure import BusyTimer, OutlierFilter
from lbbsp_core.order import GlobalOrder
from lbbsp_core.policy import (
    BatchConstraints,
    EpochBalanced,
    Even,
    FixedShares,
    LeaderStraggler,
    LoadBalanced,
    Observation,
    Policy,
    ProportionalControl,
)
from lbbsp_core.predict import (
    Arima,
    Clipped,
    Ema,
    Fallback,
    Filtered,
    LastValue,
    Mixture,
    Narx,
    Predictor,
    Recurrent,
)
from lbbsp_core.resources import ResourceSampler
from lbbsp_core.runtime.exchange.collectives import Collectives, SingleWorker
from lbbsp_core.runtime.exchange.protocol import DisagreementError, StepMessage
from lbbsp_core.runtime.loop.balancer import Balancer
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.record.record import (
    PushLine,
    Run,
    RunHeader,
    RunRecord,
    StepLine,
    read_run,
)
from lbbsp_core.sync import (
    ASP,
    BSP,
    DSSP,
    SSP,
    ElasticBSP,
    SyncDecision,
    Synchroniser,
    ZipLineResult,
    zipline,
)
from lbbsp_core.types import Limits, Measurement

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (grouped by the stages of the loop)
    # measure
    "BusyTimer",
    "Measurement",
    "OutlierFilter",
    "ResourceSampler",
    # predict
    "Arima",
    "Clipped",
    "Ema",
    "Fallback",
    "Filtered",
    "LastValue",
    "Mixture",
    "Narx",
    "Predictor",
    "Recurrent",
    # cost
    "Affine",
    "Cost",
    "CostShape",
    "CostShapeState",
    "Profile",
    "Proportional",
    "Saturating",
    # allocate
    "Limits",
    "allocate",
    # decide
    "BatchConstraints",
    "EpochBalanced",
    "Even",
    "FixedShares",
    "LeaderStraggler",
    "LoadBalanced",
    "Observation",
    "Policy",
    "ProportionalControl",
    # draw
    "GlobalOrder",
    # synchronise
    "ASP",
    "BSP",
    "DSSP",
    "SSP",
    "ElasticBSP",
    "SyncDecision",
    "Synchroniser",
    "ZipLineResult",
    "zipline",
    # run
    "Balancer",
    "Collectives",
    "DisagreementError",
    "SessionOptions",
    "SingleWorker",
    "StepMessage",
    "WorkerSession",
    # record
    "PushLine",
    "Run",
    "RunHeader",
    "RunRecord",
    "StepLine",
    "read_run",
]
