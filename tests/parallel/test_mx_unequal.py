"""Three unequal workers of gluon: busy time is each worker's own, and plans follow it exactly."""

from collections import Counter

import pytest
from jobs import check_unequal, needs_mxnet
from surfaces import check_recent, check_surfaces

from lbbsp_core import read_run

pytestmark = needs_mxnet
CASES = ["even", "balanced", "own_policy"]
STEPS, SHORT = 6, 13  # of mx_unequal


@pytest.fixture(scope="module")
def found(clusters, tmp_path_factory):
    """Records by case, and the samples that each rank drew in each step."""
    folder = tmp_path_factory.mktemp("runs")
    job = clusters.run("mx_unequal", str(folder), *CASES, workers=3, servers=2, framework="mxnet")
    assert job.status == 0
    for case in CASES:
        check_surfaces(folder / case)
        check_recent(folder / case, folder / case / "job.prom")
    runs = {case: read_run(folder / case) for case in CASES}
    return runs, {case: [job.results(rank)[case] for rank in range(3)] for case in CASES}


def test_the_slow_worker_is_seen_and_gets_less(found):
    check_unequal(found[0])


def test_the_header_tells_what_ran(found):
    header = found[0]["balanced"].header
    assert (header.framework, header.workers, header.lag) == ("mxnet", 3, 1)
    assert header.policy.startswith("LoadBalanced")
    assert "runnable" in header.drivers
    assert found[0]["even"].header.policy == "Observe()"


def test_own_policy_decides_the_plans_of_a_trainer(found):
    """Its shares are 1, 1/2 and 1/4, by speed: worker 0 is the fastest, worker 1 the slowest."""
    runs, drawn = found
    plans = [step.sizes for step in runs["own_policy"].steps]
    first, second = plans[: STEPS + 1], plans[STEPS + 1 :]
    assert first[:2] == 2 * [(16, 16, 16)]
    assert {*first[2:STEPS], *second[:STEPS]} == {(28, 7, 13)}
    assert sum(first[STEPS]) == sum(second[STEPS]) == SHORT
    by_rank = [[len(step) for step in steps] for steps in drawn["own_policy"]]
    assert plans == list(zip(*by_rank, strict=True)), "as drawn"
    counts = Counter(number for steps in drawn["own_policy"] for step in steps for number in step)
    assert set(counts) == set(range(STEPS * 48 + SHORT))
    assert set(counts.values()) == {2}, "every sample is drawn once an epoch"
