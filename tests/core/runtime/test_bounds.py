"""The chain of bounds: each is one function and one entry, without which the loop runs."""

from __future__ import annotations

import pytest

from lbbsp_core import Balancer, BatchConstraints, LastValue, Limits, LoadBalanced, Profile
from lbbsp_core.runtime.exchange.protocol import LINE, PeerInfo
from lbbsp_core.runtime.loop import bounds
from lbbsp_core.runtime.loop.bounds import BatchBounds, Situation
from lbbsp_core.testing import exchange_in_process


def run(steps: int = 6) -> list[Balancer]:
    """Balancers of three workers with all bounds, the first of which is ten times as fast."""
    given = BatchBounds(
        parts=2, granularity=8, default_maximum=True, short_step_seconds=0.1, first_uses=True
    )
    profile = Profile([8, 16], [0.1, 0.2], out_of_memory_at=21)
    made = [
        Balancer(
            rank=rank,
            workers=3,
            global_batch_size=104,
            policy=LoadBalanced(min_gain=0.0),
            predictor=LastValue(),
            cost=profile if rank == 2 else None,
            bounds=given,
        )
        for rank in range(3)
    ]
    for _ in range(steps):
        sizes = made[0].sizes(made[0].step)
        exchange_in_process(made, [0.001 * x * (1, 10, 10)[i] for i, x in enumerate(sizes)])
    return made


def test_the_trace_says_what_each_bound_does() -> None:
    trace = run()[0].trace
    assert list(trace) == [each.__name__ for each in bounds.FIXED]
    assert [each.minimum for each in trace["parts"].limits] == [2, 2, 2]
    assert [each.maximum for each in trace["memory"].limits] == [None, None, 40]
    assert [each.granularity for each in trace.values()] == [1, 1, 8, 8]
    assert [each.maximum for each in trace["default_maximum"].limits] == [72, 72, 40], "twice 35"


@pytest.mark.parametrize(("given", "most"), [(None, 20), (12, 12), (30, 20)])
def test_of_a_given_maximum_and_a_known_memory_the_smaller_one_counts(
    given: int | None, most: int
) -> None:
    constraints = BatchConstraints(8, (Limits(1, given),))
    now = Situation(LoadBalanced(), (PeerInfo(LINE, max_batch=20),), True, BatchBounds())
    assert bounds.memory(constraints, now).limits == (Limits(1, most),)


@pytest.mark.parametrize("bound", [*bounds.FIXED, *bounds.MOVING], ids=lambda each: each.__name__)
def test_the_loop_runs_without_each_of_them(
    bound: bounds.Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run()[0].latest_plan[0]
    for name in ("FIXED", "MOVING"):
        chain = tuple(each for each in getattr(bounds, name) if each is not bound)
        monkeypatch.setattr(bounds, name, chain)
    made = run()
    assert sum(made[0].latest_plan[0]) == sum(whole) == 104
    assert {each.latest_plan[0] for each in made} == {made[0].latest_plan[0]}
