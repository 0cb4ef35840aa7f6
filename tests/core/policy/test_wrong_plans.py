"""Plans of a policy of the user that would lose samples, or starve a worker: all refuse them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from teams import team

from lbbsp_core import BatchConstraints, Even, LastValue, Limits, Observation, Proportional
from lbbsp_core.sim.cluster import ReplayedCluster
from lbbsp_core.sim.config import SimConfig
from lbbsp_core.sim.engine import run_bsp
from lbbsp_core.sync.rounds import Rounds
from lbbsp_core.testing import exchange_in_process

LIMITS = Limits(2, 9)
PLANS = [(3, 3), (18, -6), (12,), (6, 6, 0), (11, 1)]


@dataclass(frozen=True)
class Wrong(Even):
    """Even batches, then a wrong plan."""

    plan: tuple[int, ...] = ()
    is_static: ClassVar[bool] = False

    def update(self, state: Any, constraints: Any, observation: Observation) -> Any:
        return state._replace(sizes=self.plan)


def in_arrays(policy: Wrong) -> None:
    cluster = ReplayedCluster(np.full((3, 2), 4.0), ((), ()) * 3, 12)
    run_bsp(cluster, SimConfig(12, limits=LIMITS), policy, LastValue())


def in_balancers(policy: Wrong) -> None:
    exchange_in_process(team(2, 12, policy=policy, limits=LIMITS), [0.1, 0.2])


def in_rounds(policy: Wrong) -> None:
    rounds = Rounds(BatchConstraints(12, (LIMITS,) * 2), policy)
    for rank in range(2):
        rounds.ran(rank, 6, 0.3, Proportional(20.0))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("run", [in_arrays, in_balancers, in_rounds])
def test_a_wrong_plan_is_refused_with_the_name_of_its_policy(run: Any, plan: Any) -> None:
    with pytest.raises(ValueError) as refused:
        run(Wrong(plan))
    message = str(refused.value)
    assert message.startswith(f"policy Wrong(plan={plan}) made the plan {plan}, but it must give 2")
    assert "check_policy" in message


@pytest.mark.parametrize("run", [in_arrays, in_balancers, in_rounds])
def test_a_plan_that_loses_nothing_is_none(run: Any) -> None:
    """Even if it exceeds a maximum, which `check_policy` finds."""
    run(Wrong((10, 2)))


def test_the_first_plan_is_checked_too() -> None:
    class First(Wrong):
        def init(self, constraints: BatchConstraints) -> Any:
            return super().init(constraints)._replace(sizes=(3, 3))

    with pytest.raises(ValueError, match=r"First.* made the plan \(3, 3\)"):
        team(2, 12, policy=First())
