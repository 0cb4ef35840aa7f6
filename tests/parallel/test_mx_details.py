"""Details of MXNet's trainer on three workers whose names of layers differ."""

import pytest
from jobs import needs_mxnet

pytestmark = needs_mxnet
TOLERANCE = 2e-6
WORKERS = 3


@pytest.fixture(scope="module")
def found(clusters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    job = clusters.run("mx_details", str(folder), workers=WORKERS, servers=2, framework="mxnet")
    assert job.status == 0
    return [job.results(rank) for rank in range(WORKERS)]


@pytest.mark.parametrize("case", ["many_uses", "many_uses_compiled", "double", "one_prefix"])
def test_layers_are_normalised_over_all_workers_whatever_their_names_and_order(found, case):
    for each in found:
        assert each[case]["moved"] > 0.01
        assert each[case]["stock"] <= TOLERANCE
        assert each[case]["alone"] <= TOLERANCE


def test_parameters_of_equal_names_are_refused(found):
    for each in found:
        assert "two parameters are called net_syncbatchnorm0_gamma" in each["equal_names"]


def test_workers_save_to_one_file_at_the_same_time(found):
    assert found[0]["together"]["reads"] > 0
    assert found[0]["together"]["steps"] == [2]
    for each in found:
        assert each["together"]["left"] == ["together"]
        assert each["together"]["same"]


def test_trainers_are_freed_but_for_the_latest(found):
    for each in found:
        assert each["alive"] == [False] * 4 + [True]


def test_the_profiler_starts_whatever_threads_of_this_library_do(found):
    assert [each["profiled"] for each in found] == [3] * WORKERS
