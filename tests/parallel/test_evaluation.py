"""Evaluation and prediction on replicas equal those of one process, whatever the rows."""

import pytest
from jobs import campaign, chosen

CASES = [
    "own_test_step",
    "only_metrics",
    "sum",
    "masked",
    "auc",
    "summed_function",
    "summed_compute_loss",
    "average_loss",
    "two_kinds_of_sums",
    "metrics_by_hand",
    "functions_by_hand",
    *campaign(
        "summed_class",
        "one_of_two_outputs",
        "sample_weight",
        "own_tracker",
        "scalar_loss",
        "recurrent",
        "convolution",
        "two_outputs",
        "nested_inputs",
        "ctc",
        "added_loss",
    ),
]
MIRRORED_CASES = ["own_test_step", "scalar_loss", "recurrent", "sum", "masked", "metrics_by_hand"]
SOURCES = ["unknown_length", *campaign("tf_data", "py_dataset", "generator")]
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def seen(request, clusters):
    """What each rank reported."""
    names = [*chosen(request, "case"), *chosen(request, "source")]
    job = clusters.run("evaluation", "workers", *names, workers=2)
    assert job.status == 0
    return [job.results(rank) for rank in range(2)]


@pytest.fixture(scope="module")
def mirrored(request, clusters):
    """What a worker with two devices reported."""
    names = [*chosen(request, "mirrored_case"), *chosen(request, "mirrored_source")]
    job = clusters.run("evaluation", "mirrored", *names, workers=1, devices=2)
    assert job.status == 0
    return [job.results(0)]


def check_like_one_process(seen, name):
    """Checks the results of all ranks against those of one process, which rank 0 reports."""
    chief, *others = (each[name] for each in seen)
    assert chief["logs"] == pytest.approx(chief["expected"], rel=TOLERANCE, abs=TOLERANCE)
    assert chief["same_shapes"]
    assert chief["predictions"] <= TOLERANCE
    for other in others:
        assert other["logs"] == chief["logs"]
        assert other["sum_of_predictions"] == chief["sum_of_predictions"]


@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_one_row_gives_what_one_process_gives(seen, case):
    check_like_one_process(seen, case)


@pytest.mark.parametrize("source", SOURCES)
def test_each_kind_of_data_is_evaluated_whole(seen, source):
    check_like_one_process(seen, source)


def test_steps_are_steps_of_the_job(seen):
    assert seen[0]["steps"] <= TOLERANCE


def test_validation_may_have_fewer_rows_than_workers(seen):
    expected = pytest.approx(seen[0]["expected_validation"], abs=TOLERANCE)
    assert seen[0]["validation"] == seen[1]["validation"] == expected


def test_no_step_asks_all_workers_for_another_batch(seen):
    # Keras 3.16 does so in each step on TensorFlow's distributed iterators.
    for each in seen:
        assert each["collective_draws"] == []


def test_arrays_of_different_lengths_are_an_error(seen):
    for each in seen:
        assert "all arrays of a batch must have the same length" in each["different_lengths"]


DIFFERENT = "workers disagree on the data of evaluate, predict or validation: "
OTHER_SAMPLES = "samples of worker 1 differ from those of worker 0"


@pytest.mark.parametrize(
    ("case_of_data", "message"),
    [
        ("different_evaluated", OTHER_SAMPLES),
        ("different_predicted", OTHER_SAMPLES),
        ("different_validation", OTHER_SAMPLES),
    ],
)
def test_data_that_differ_between_workers_are_refused(seen, case_of_data, message):
    for each in seen:
        assert DIFFERENT + message in each[case_of_data]


def test_numbers_of_batches_that_differ_are_refused(seen):
    for each in seen:
        assert (
            "number of batches of evaluate, predict or validation: worker 0 has 2, worker 1"
            in (each["different_batches"])
        )


def test_each_worker_gets_the_rows_of_its_own_batch(seen):
    for each in seen:
        assert each["on_batch"]["rows"] == 5
        assert each["on_batch"]["logs"] == pytest.approx(seen[0]["on_batch"]["expected"], TOLERANCE)
    assert seen[0]["on_batch"]["difference"] <= TOLERANCE
    assert seen[0]["on_batch"]["alone"] <= TOLERANCE


def test_a_worker_that_predicts_alone_is_told_to_call_it_on_all(seen):
    told = seen[0]["evaluated_alone"]
    assert "RuntimeError: worker 0 has called evaluate or predict, and worker 1 is" in told
    assert "waiting for the others: call it on all workers" in told


@pytest.mark.campaign
@pytest.mark.parametrize("mirrored_case", MIRRORED_CASES)
def test_devices_of_one_worker_give_what_one_process_gives(mirrored, mirrored_case):
    check_like_one_process(mirrored, mirrored_case)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "mirrored_source", ["tf_data", "unknown_length", "py_dataset", "generator"]
)
def test_each_kind_of_data_is_evaluated_whole_on_devices(mirrored, mirrored_source):
    check_like_one_process(mirrored, mirrored_source)


@pytest.mark.campaign
def test_validation_may_have_fewer_rows_than_devices(mirrored):
    (found,) = mirrored
    assert found["validation"] == pytest.approx(found["expected_validation"], abs=TOLERANCE)
