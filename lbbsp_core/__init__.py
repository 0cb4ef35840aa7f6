"""LB-BSP without a framework: measure, predict, exchange, allocate, decide, record.

`Balancer` is the loop; the other names are its stages.
"""

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Affine, Cost, Profile, Proportional, Saturating
from lbbsp_core.cost.online import Shape, ShapeState
from lbbsp_core.measure import BusyTimer, Gate
from lbbsp_core.order import GlobalOrder
from lbbsp_core.policy import (
    Cluster,
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
    Held,
    LastValue,
    Mixture,
    Narx,
    Predictor,
    Recurrent,
)
from lbbsp_core.profiler import Profiling, Search, profile_step
from lbbsp_core.resources import ResourceSampler
from lbbsp_core.runtime.balancer import Balancer
from lbbsp_core.runtime.protocol import DisagreementError, Message
from lbbsp_core.runtime.record import RunRecord, read_run
from lbbsp_core.sync import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Alignment,
    Decision,
    ElasticBSP,
    Synchroniser,
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
    "Alignment",
    "Arima",
    "Balancer",
    "BusyTimer",
    "Clipped",
    "Cluster",
    "Cost",
    "Decision",
    "DisagreementError",
    "ElasticBSP",
    "Ema",
    "EpochBalanced",
    "Even",
    "Fallback",
    "FixedShares",
    "Gate",
    "GlobalOrder",
    "Held",
    "LastValue",
    "LeaderStraggler",
    "Limits",
    "LoadBalanced",
    "Measurement",
    "Message",
    "Mixture",
    "Narx",
    "Observation",
    "Policy",
    "Predictor",
    "Profile",
    "Profiling",
    "Proportional",
    "ProportionalControl",
    "Recurrent",
    "ResourceSampler",
    "RunRecord",
    "Saturating",
    "Search",
    "Shape",
    "ShapeState",
    "Synchroniser",
    "allocate",
    "profile_step",
    "read_run",
    "zipline",
]
