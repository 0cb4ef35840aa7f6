"""Communication hides behind the backward pass: gradients are sent before the last is computed."""

from importlib.util import find_spec
from statistics import median

import pytest
from surfaces import check_surfaces

# The backward passes of the scripts rest below the top layer, for so many seconds.
KERAS_RESTS, MXNET_RESTS = 0.1, 0.2


def test_gradients_of_the_top_travel_while_those_below_are_computed(clusters, tmp_path):
    """The backward pass waits below the top layer until the sums of that have arrived."""
    job = clusters.run("overlap", str(tmp_path), "1", str(1 << 40), workers=2)
    assert job.status == 0
    results = job.results(0)
    assert min(results[f"{tmp_path}/1"]) > 0
    assert set(results[f"{tmp_path}/{1 << 40}"]) == {0}
    check_surfaces(tmp_path / "1")  # with hidden communication


@pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'")
def test_sums_of_the_top_arrive_while_those_below_are_computed(clusters, tmp_path):
    job = clusters.run("mx_overlap", str(tmp_path), workers=2, servers=1, framework="mxnet")
    assert job.status == 0
    results = job.results(0)
    large, small = results[f"{tmp_path}/512"], results[f"{tmp_path}/8"]
    assert median(large["sent"]) > MXNET_RESTS / 2
    assert max(large["summed"]) > MXNET_RESTS / 2, "not seen in each step"
    assert median(large["hidden"]) > 0
    assert set(small["hidden"] + small["sent"]) == {0}, "a small network is one part"
