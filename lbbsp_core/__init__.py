"""LB-BSP without a framework: measure, predict, exchange, allocate, decide, record.

`Balancer` is the loop; the other names are its stages.
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
from lbbsp_core.profiler import BatchSweep, ProfileResult, profile_step
from lbbsp_core.resources import ResourceSampler
from lbbsp_core.runtime.balancer import Balancer
from lbbsp_core.runtime.protocol import DisagreementError, StepMessage
from lbbsp_core.runtime.record import RunRecord, read_run
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

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "SSP",
    "Affine",
    "Arima",
    "Balancer",
    "BatchConstraints",
    "BatchSweep",
    "BusyTimer",
    "Clipped",
    "Cost",
    "CostShape",
    "CostShapeState",
    "DisagreementError",
    "ElasticBSP",
    "Ema",
    "EpochBalanced",
    "Even",
    "Fallback",
    "Filtered",
    "FixedShares",
    "GlobalOrder",
    "LastValue",
    "LeaderStraggler",
    "Limits",
    "LoadBalanced",
    "Measurement",
    "Mixture",
    "Narx",
    "Observation",
    "OutlierFilter",
    "Policy",
    "Predictor",
    "Profile",
    "ProfileResult",
    "Proportional",
    "ProportionalControl",
    "Recurrent",
    "ResourceSampler",
    "RunRecord",
    "Saturating",
    "StepMessage",
    "SyncDecision",
    "Synchroniser",
    "ZipLineResult",
    "allocate",
    "profile_step",
    "read_run",
    "zipline",
]
