"""Steps of Keras that share work: which cannot, and late answers. What is learned: equivalence."""

import pytest

EXPECTED = {
    "synchronized_batch_norm": "train_step needs all workers before it applies gradients",
    "batch_norm": " besides the optimizer's apply: leave share_work out",
    "frozen_batch_norm": "no error",
    "metric_by_hand": "train_step needs all workers before it applies gradients",
    "averaged_weights": "Averaged.train_step assigns averaged/mean besides the optimizer's apply",
    "mean_of_workers": "MeanOfWorkers.train_step needs all workers before it applies gradients",
    "two_applies": "Twice.train_step applies gradients 2 times",
    "shifted": "noise that no sample has would differ between parts: leave share_work out",
    "run_eagerly": "no error",
    "work": "because plans divide work=, not samples: leave share_work out",
    "tf_data": "because the data set can only be read in its own order: pass arrays",
    "weight_by_sum": 'because weight_by="sum" does not tell what is logged: leave it out',
    "loop": "because a custom loop takes the results of its train step: fit can",
    "no_fraction": 'share_work must be True, False, "auto", or a fraction of each step from 0.01 '
    "to 0.8, got 0.9",
    "dropout": "no error",
    "kept_outside": "reads a tensor after apply that no attribute of a layer keeps",
}


@pytest.fixture(scope="module")
def job(clusters):
    done = clusters.run("sharing", workers=2)
    assert done.status == 0
    return done


@pytest.mark.parametrize("case", EXPECTED)
def test_steps_that_cannot_share_work_are_refused_with_the_reason(job, case):
    for rank in range(2):
        assert EXPECTED[case] in job.results(rank)[case]


def test_what_layers_keep_and_python_values_are_those_of_a_step_without_sharing(job):
    found = job.results(0)["alike"]
    assert found["shared"] >= 10
    assert found["difference"] <= 2e-6


def test_a_second_fit_shares_the_samples_of_its_own_data(job):
    found = job.results(0)["again"]
    assert found["difference"] <= 2e-6
    assert found["samples"] == [16] * 40
    assert all(found["shared"][2:20])
    assert all(found["shared"][22:])


def test_a_claim_that_is_answered_late_ends_sharing_and_loses_no_sample(job):
    """Worker 0, which counts, is stopped for a moment."""
    found = job.results(0)
    assert found["stopped"]["moved"] > 0.01
    assert found["stopped"]["difference"] <= 2e-6
    assert found["stopped"]["logs"] <= 1e-5
    (stopped,) = job.results(1)["stopped_at"]
    assert all(job.results(rank)["last_shared_step"] <= stopped for rank in range(2))
    assert "[0] a claim of samples has taken more than " in job.text
