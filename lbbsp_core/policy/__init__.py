"""Policies: which batch sizes to use in the next steps."""

from lbbsp_core.policy.base import (
    BatchConstraints,
    Observation,
    Policy,
    PolicyState,
    Sizes,
    require_asynchronous,
)
from lbbsp_core.policy.epoch_balanced import EpochBalanced, EpochBalancedState
from lbbsp_core.policy.even import Even
from lbbsp_core.policy.first_uses import FirstUses
from lbbsp_core.policy.fixed_shares import FixedShares, FixedState
from lbbsp_core.policy.growth import bound_growth
from lbbsp_core.policy.leader_straggler import LeaderStraggler, LeaderStragglerState
from lbbsp_core.policy.load_balanced import LoadBalanced, LoadBalancedState
from lbbsp_core.policy.proportional_control import ProportionalControl, ProportionalControlState

__all__ = [
    "BatchConstraints",
    "EpochBalanced",
    "EpochBalancedState",
    "Even",
    "FirstUses",
    "FixedShares",
    "FixedState",
    "LeaderStraggler",
    "LeaderStragglerState",
    "LoadBalanced",
    "LoadBalancedState",
    "Observation",
    "Policy",
    "PolicyState",
    "ProportionalControl",
    "ProportionalControlState",
    "Sizes",
    "bound_growth",
    "require_asynchronous",
]
