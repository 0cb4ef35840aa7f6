"""MXNet's numpy mode: several workers learn what one process learns."""

import pytest
from jobs import campaign, chosen, needs_mxnet

pytestmark = needs_mxnet
CASES = [
    "loaded",
    "sent",
    "weighted",
    "normalised",
    *campaign("loaded_deferred", "normalised_compiled"),
]


@pytest.fixture(scope="module")
def found(request, clusters, tmp_path_factory):
    """Results by rank."""
    folder, cases = tmp_path_factory.mktemp("numpy"), chosen(request, "case")
    done = clusters.run("mx_numpy", str(folder), *cases, workers=3, servers=2, framework="mxnet")
    assert done.status == 0
    return [done.results(rank) for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_several_workers_learn_what_one_process_learns(found, case):
    for each in found:
        assert each[case]["moved"] > 0.01, "a case that learns nothing would prove nothing"
        assert each[case]["difference"] <= 2e-6
