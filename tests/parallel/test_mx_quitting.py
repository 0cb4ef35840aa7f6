"""MXNet workers that end their training before the others: all end, and the remedy is named."""

from importlib.util import find_spec

import pytest
from mx_cluster import by_hand

pytestmark = pytest.mark.skipif(
    find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'"
)
REMEDY = (
    "let all workers make the same number of steps, or call trainer.request_stop(), after which "
    "trainer.stopping is true on all workers after the same step"
)


def ended(way):
    with by_hand("mx_quitting.py", way) as cluster:
        cluster.wait_for_ranks()
        cluster.wait_for_ends()  # by themselves, all of them
        return cluster


@pytest.mark.campaign
@pytest.mark.parametrize(("way", "leaver"), [("break", 0), ("handler", 1)])
def test_a_worker_that_leaves_the_training_early_ends_the_job(way, leaver):
    """By a way, at step 20."""
    workers = ended(way).workers
    left = f"worker {leaver} has left (at the end of its script, before step 20), and others wait"
    assert [worker.status for worker in workers] == [1, 1]
    assert left in workers[0].text  # the others may hear of worker 0's end first
    assert REMEDY in workers[0].text
    assert "END" not in workers[1 - leaver].lines, "it has waited in step 20"
