"""Contract checks for predictors, policies and synchronisers, ours and yours, and fakes."""

from lbbsp_core.testing.contracts import (
    check_plan,
    check_policy,
    check_predictor,
    check_synchroniser,
)
from lbbsp_core.testing.fakes import FakeClock, exchange_in_process

__all__ = [
    "FakeClock",
    "check_plan",
    "check_policy",
    "check_predictor",
    "check_synchroniser",
    "exchange_in_process",
]
