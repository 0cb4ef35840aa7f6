"""Data on unequal workers: samplers, data iterators, several loaders, parts of a data set."""

from itertools import chain

import numpy as np
import pytest
from jobs import needs_mxnet

pytestmark = needs_mxnet
X, SAMPLES, WORKERS = 24, 79, 3
EVERY = list(range(SAMPLES))
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = rng.normal(size=SAMPLES).astype("f4")


@pytest.fixture(scope="module")
def said(clusters, tmp_path_factory):
    """What each rank has drawn, learned, and answered to misuse."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    job = clusters.run("mx_data", folder, workers=WORKERS, servers=2, framework="mxnet")
    assert job.status == 0
    return [job.results(rank) for rank in range(WORKERS)]


def steps_of(said, case):
    """Global batches: the workers' batches of each step, in the order of their ranks."""
    parts = zip(*(each[case] for each in said), strict=True)
    return [list(chain(*batches)) for batches in parts]


def learned(steps):
    """What one process learns from whole batches."""
    weights = np.zeros(4)
    for index in steps:
        x, y = FEATURES[index].astype(float), LABELS[index]
        weights -= 0.1 * x.T @ (x @ weights - y) / len(index)
    return weights


def epochs(steps):
    return steps[: len(steps) // 2], steps[len(steps) // 2 :]


@pytest.mark.parametrize(
    "case",
    ["sampler", "sampler_threads", "weighted", "buckets", "in_order", "iterator", "restarted",
     "rows", "by_work", "buckets_by_work", "restarted_by_work"],
)  # fmt: skip
def test_all_learn_what_one_process_learns_from_the_global_batches(said, case):
    expected = learned(steps_of(said, case))
    assert np.abs(expected).max() > 0.01
    for each in said:
        np.testing.assert_allclose(each[f"{case}_weights"], expected, atol=2e-6)
    if case != "rows":
        assert len({len(batch) for batch in said[0][case]}) > 2, "the plan changes"


@pytest.mark.parametrize(
    "case",
    ["sampler", "sampler_threads", "iterator", "restarted", "by_work", "restarted_by_work"],
)
def test_each_sample_occurs_once_in_every_epoch(said, case):
    """Also if the workers' samplers differ, or the job starts again within an epoch."""
    steps = steps_of(said, case)
    for epoch in epochs(steps):
        assert [len(step) for step in epoch] == [24, 24, 24, 7]
        assert sorted(chain(*epoch)) == EVERY
    assert steps[:4] != steps[4:]


def test_without_shuffle_batches_are_those_of_the_data_set(said):
    expected = [EVERY[i : i + X] for i in range(0, SAMPLES, X)]
    assert steps_of(said, "in_order") == 2 * expected


def test_a_weighted_sampler_gives_each_of_its_samples_as_often_as_worker_0_draws_it(said):
    first, second = epochs(steps_of(said, "weighted"))
    assert sorted(chain(*first)) == sorted(chain(*second)), "of the one list of worker 0"
    assert len(set(chain(*first))) < 60 == len(list(chain(*first)))
    assert first != second


def test_steps_are_cut_where_their_work_is(said):
    plans = [(16, 5, 3), (4, 18, 2), (8, 8, 8), (1, 9, 14)]
    drawn = [
        tuple(len(each["by_work"][step]) for each in said)
        for step in range(len(said[0]["by_work"]))
    ]
    assert sum(sizes not in plans for sizes in drawn) >= 5


@pytest.mark.parametrize("case", ["buckets", "buckets_by_work"])
def test_batches_of_buckets_are_not_mixed(said, case):
    for epoch in epochs(steps_of(said, case)):
        assert sorted(map(len, epoch)) == [4, 7, 24, 24, 24]
        longer = [step for step in epoch if len(step) != 4]
        assert sorted(chain(*longer)) == EVERY


def test_another_data_set_is_drawn_in_the_same_steps(said):
    steps = steps_of(said, "beside")
    assert [len(step) for step in steps] == 2 * [24, 24, 24, 7]
    flat = list(chain(*steps))
    for begin in range(0, len(flat) - 31, 31):
        assert sorted(flat[begin : begin + 31]) == list(range(31))


def test_rows_stay_with_their_workers(said):
    for rank, (begin, end) in enumerate([(0, 12), (12, 20), (20, 24)]):
        expected = [[3 * row + column for row in range(begin, end)] for column in range(3)]
        assert said[rank]["rows"] == expected


EXPECTED = {
    "part_of_a_length": "have data sets of [60, 61, 62] samples: pass the whole data set",
    "part_of_data": "workers disagree on the data: samples of worker 1 differ",
    "part_of_ranges": "each worker's sampler gives another part of the data set",
    "part_of_strides": "each worker's sampler gives another part of the data set",
    "beside_length": "number of samples beside: worker 0 has 50, worker 1 has 51",
    "rows_of_a_plan": "ChangingPlans changes the plan: use policy=lbbsp_core.Even()",
    "random_transform": "accepted",
    "work_beside": "work must be left out with beside=",
    "other_work": "workers disagree on work of each sample (work=): worker 0 has 79 samples",
}


@pytest.mark.parametrize("misuse", EXPECTED)
def test_all_workers_name_what_is_wrong_with_the_data(said, misuse):
    for each in said:
        assert EXPECTED[misuse] in each[misuse]
        assert "Error: " in each[misuse]


def test_an_error_of_one_sampler_is_raised_on_all_workers(said):
    assert [each["failing"].split(":")[0] for each in said] == [
        "DisagreementError",
        "OSError",
        "DisagreementError",
    ]
    assert "the sampler of worker 1 has raised an error" in said[0]["failing"]
