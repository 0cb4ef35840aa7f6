"""Resource usage of the machine and the process: the driving factors of a worker's speed.

`ResourceSampler` samples them once per step. LB-BSP's predictor (NARX) takes them as its
exogenous inputs. The flow within this package:

    sources (by cgroup, host), gpu ──> totals and levels ──> sampler ──> percents, rates
"""

from lbbsp_core.resources.base import FACTORS
from lbbsp_core.resources.sampler import ResourceSampler

__all__ = ["FACTORS", "ResourceSampler"]
