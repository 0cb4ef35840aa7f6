"""Contract checks for predictors, policies and synchronisers, ours and yours.

A test of a new one needs one line::

    def test_mine() -> None:
        check_predictor(Mine(window=8))

The checks are assertions, which ``python -O`` leaves out.
"""

from lbbsp_core.testing.fakes import ChangingPlans, exchange_in_process
from lbbsp_core.testing.policies import check_plan, check_policy
from lbbsp_core.testing.predictors import check_predictor
from lbbsp_core.testing.synchronisers import check_synchroniser

__all__ = [
    "ChangingPlans",
    "check_plan",
    "check_policy",
    "check_predictor",
    "check_synchroniser",
    "exchange_in_process",
]
