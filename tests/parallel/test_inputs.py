"""Each kind of input on 2 and 3 workers: exact, each wrong use refused, nothing kept."""

import pytest
from jobs import chosen, on

LAGS = {
    "hdf5": 2,
    "items": 3,
    "py_dataset": 2,
    "images": 2,
    "tfrecords": 2,
    "shuffled_stream": 2,
    "batched_stream": 2,
    "in_order": 1,
    "own_steps": 1,
    "validation_split": 1,
    "batch_map": 2,
    "padded": 2,
    "by_work": 3,
}
SAMPLES = 4 * 32 + 11
LATER = ["hdf5", "items", "py_dataset", "tfrecords", "in_order", "own_steps", "batch_map"]
KINDS = [
    *on(2, *(kind for kind in LAGS if kind not in LATER), campaign=LATER),
    *on(3, campaign=["items", "by_work", "shuffled_stream", "own_steps"]),
]
ONLY_BY_FIT = "can only be trained on by fit(..., callbacks=[balancer])"
REFUSED = {
    "without_callback": ONLY_BY_FIT,
    "evaluate": ONLY_BY_FIT,
    "predict": ONLY_BY_FIT,
    "validation_of_itself": "validation_data must be arrays or a tf.data.Dataset",
    "other_arrays": "fit needs the data of the balancer",
    "other_records": "have read different records up to step 0",
    "records_that_differ_late": "have read different records up to step 4",
    "shards": "number of samples: worker 0 has 70, worker 1 has 69; pass the whole data set",
    "shards_of_arrays": "number of samples: worker 0 has 70, worker 1 has 69; pass the whole data",
    "shards_in_batches": "number of samples: worker 0 has 70, worker 1 has 69; pass the whole data",
    "shards_of_one_length": "read different records up to step 0: the data must be whole and",
    "images_of_other_seeds": "have read different records up to step 9: the data must be whole and",
    "other_work": "workers disagree on work of each sample (work=): worker 0 has 139 samples",
    "work_on_one_worker": "workers disagree on work of each sample (work=): worker 0 has none",
}
OTHERS = ["repeated_fits", "slow_input"]
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def found(request, clusters, tmp_path_factory):
    """What each rank reported, by number of workers."""
    folder = str(tmp_path_factory.mktemp("inputs"))
    names = {workers: chosen(request, "kind", workers=workers) for workers in (2, 3)}
    names[2] += [*REFUSED, *OTHERS]
    jobs = {
        workers: clusters.run("inputs", folder, *each, workers=workers)
        for workers, each in names.items()
        if each
    }
    assert all(job.status == 0 for job in jobs.values())
    return {workers: [job.results(r) for r in range(workers)] for workers, job in jobs.items()}


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_changing_plans_learn_what_one_process_learns(found, workers, kind):
    chief = found[workers][0][kind]
    assert chief["moved"] > 0.01, "a kind that learns nothing would prove nothing"
    assert chief["steps"] == chief["reference_steps"]
    assert chief["difference"] <= TOLERANCE
    assert {rank[kind]["lag"] for rank in found[workers]} == {LAGS[kind]}


@pytest.mark.parametrize(("workers", "kind"), [*on(2, "by_work"), *on(3, campaign=["by_work"])])
def test_steps_are_cut_where_their_work_is(found, workers, kind):
    sizes, plans = found[workers][0][kind]["sizes"], found[workers][0][kind]["plans"]
    assert all(rank[kind]["sizes"] == sizes for rank in found[workers])
    assert [sum(each) for each in sizes] == 2 * [32, 32, 32, 32, 11]
    assert sum(each not in plans for each in sizes if sum(each) == 32) >= 6


@pytest.mark.parametrize(("workers", "kind"), on(2, "validation_split"))
def test_validation_data_are_the_last_samples(found, workers, kind):
    first, second = (rank[kind]["validation"] for rank in found[workers])
    assert first == second
    assert first[:2] == [28, 28]


@pytest.mark.parametrize("misuse", REFUSED)
def test_wrong_uses_and_different_data_are_refused_on_all_workers(found, misuse):
    for rank in found[2]:
        assert REFUSED[misuse] in rank[misuse]
        assert "Error: " in rank[misuse]


def test_placeholders_are_never_trained_on(found):
    for rank in found[2]:
        steps, same_weights, steps_of_next_fit = rank["after_the_mistake"]
        assert (steps, same_weights, steps_of_next_fit) == (0, True, 5)


def test_different_records_stop_the_fit_at_the_first_step_or_the_end_of_the_epoch(found):
    for rank in found[2]:
        assert rank["steps_with_other_records"] == 0
        assert rank["steps_with_records_that_differ_late"] == 5


def test_further_data_sets_share_the_trace_and_are_released(found):
    for rank in found[2]:
        assert len(set(rank["traces"])) == 1
        assert rank["released"] == [True, True, True, False]  # the balancer knows the last one


def test_input_that_cannot_keep_up_is_named(found):
    for number, rank in enumerate(found[2]):
        (warning,) = rank["slow"]
        assert f"worker {number} waits for input in " in warning
        assert "raise readers (now 1) or prefetch (now 1)" in warning
