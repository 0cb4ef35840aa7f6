"""Policies: which batch sizes to use in the next steps."""

from lbbsp_core.policy.base import Notices, Observation, Policy, PolicyState, require_asynchronous
from lbbsp_core.policy.constraints import BatchConstraints, Sizes
from lbbsp_core.policy.epoch_balanced import EpochBalanced
from lbbsp_core.policy.even import Even, even_plan
from lbbsp_core.policy.first_uses import FirstUses
from lbbsp_core.policy.fixed_shares import FixedShares, FixedState
from lbbsp_core.policy.growth import bound_growth
from lbbsp_core.policy.leader_straggler import LeaderStraggler
from lbbsp_core.policy.load_balanced import LoadBalanced
from lbbsp_core.policy.observe import Observe
from lbbsp_core.policy.proportional_control import ProportionalControl

__all__ = [
    "BatchConstraints",
    "EpochBalanced",
    "Even",
    "FirstUses",
    "FixedShares",
    "FixedState",
    "LeaderStraggler",
    "LoadBalanced",
    "Notices",
    "Observation",
    "Observe",
    "Policy",
    "PolicyState",
    "ProportionalControl",
    "Sizes",
    "bound_growth",
    "even_plan",
    "require_asynchronous",
]
