"""A policy and a synchroniser defined in a test, in a real job of three unequal workers."""

import os
from collections import Counter
from importlib.util import find_spec
from statistics import median

import pytest
from jobs import SCRIPTS, run

from lbbsp_core import read_run

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'"),
]
NEEDS_SKLEARN = True
X, SAMPLES, EPOCHS, PERIOD = 48, 20 * 48 + 13, 2, 2  # of mx_custom
EVEN, RANKED = (16, 16, 16), (28, 7, 13)
"""The first plan, and shares of 1, 1/4 and 1/2: worker 0 is the fastest, worker 1 the slowest."""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The parameter servers import the synchroniser, which they are sent, by its module."""
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(SCRIPTS), path])))


def test_own_synchroniser_and_policy_under_an_asynchronous_trainer(tmp_path):
    done = run("mx_custom", str(tmp_path), workers=3, framework="mxnet")
    assert done.status == 0
    results = [done.results(rank) for rank in range(3)]
    drawn = Counter(sample for one in results for sample in one["drawn"])
    assert set(drawn) == set(range(SAMPLES))
    assert set(drawn.values()) == {EPOCHS}, "every sample is drawn once an epoch"
    pushes = read_run(tmp_path).pushes
    for rank, one in enumerate(results):
        mine = [push for push in pushes if push.worker == rank]
        assert [push.iteration for push in mine] == list(range(len(mine)))
        assert sum(push.samples for push in mine) == len(one["drawn"])
    periods = [push.iteration // PERIOD for push in pushes]
    assert periods == sorted(periods), "no worker starts a period before all have ended the last"
    counts = Counter(zip(periods, (push.worker for push in pushes), strict=True))
    complete = [period for period in set(periods) if period < max(periods)]
    assert len(complete) >= 10
    assert {counts[period, rank] for period in complete for rank in range(3)} == {PERIOD}
    assert {push.lead for push in pushes} <= {0, 1}
    assert max(push.staleness for push in pushes) <= 2 * (PERIOD - 1), "the others' first pushes"
    sizes = Counter(push.samples for push in pushes)
    cut = sizes.total() - sum(sizes[size] for size in {*EVEN, *RANKED})
    assert cut <= EPOCHS * 3, "only the last batches of an epoch are smaller"
    late = pushes[len(pushes) // 2 :]
    typical = [median(p.samples for p in late if p.worker == rank) for rank in range(3)]
    assert tuple(typical) == RANKED
