"""MXNet: idioms of gluon scripts mean on several workers what they mean in one process."""

import pytest
from jobs import needs_mxnet, run

pytestmark = needs_mxnet
TOLERANCE = 4e-6
EXACT = [
    "clipped",
    "clipped_mean_loss",
    "accumulated",
    "accumulated_ahead",
    "devices",
    "devices_accumulated",
    "sparse",
    "sparse_devices",
    "sparse_parameter",
    "sparse_parameter_devices",
    "norm",
    "norm_mean_loss",
    "norm_skipped",
    "norm_accumulated",
    "norm_devices",
    "norm_of_sparse",
    "norm_of_heads",
    "weighted",
    "weighted_mean_loss",
    "weighted_accumulated",
    "few_tokens",
    "few_tokens_sparse",
    "heads",
    "heads_clipped",
    "heads_accumulated",
    "heads_devices",
    "heads_sparse",
]
MISUSES = {
    "update_size": "update must be called with 1, the ",
    "too_many_batches": "create the trainer with accumulate=3",
    "too_many_batches_ahead": "create the trainer with accumulate=2",
    "too_many_parts": "create the trainer with accumulate=4",
    "too_few_parts": "step must follow 2 batches of the loader, as accumulate = 2 says, got 1",
    "no_adding": "call net.collect_params().setattr('grad_req', 'add')",
    "accumulated_means": "mean_loss must be False where gradients accumulate",
    "no_parts": "accumulate must be",
    "more_parts_than_samples": "at least workers * minimum = 51, got 24",
    "different_parts": "disagree on accumulate: worker 0 has 2, worker 1 has 3",
    "sparse_on_one": "disagree on parameters: worker 0 has (12, 6) float32, ",
    "no_weight": "the sum of `weight` over all workers must be > 0, got 0",
    "step_of_means": "call update(batch_size) in its place",
    "negative_weight": "weight must be a finite number >= 0, got -1.0",
    "norm_of_weighted": "call allreduce_grads(weight=...), clip the mean gradients, and call upda",
    "second_sum": "has no new batch, because the last one has had its step: for further sums",
    "weight_on_one": "worker 1 passes a weight with its gradients, and worker 0 none",
}


@pytest.fixture(scope="module")
def seen():
    """What each rank reported; warnings come once a process."""
    done = run("mx_idioms", workers=3, framework="mxnet")
    assert done.status == 0
    return [done.results(rank) for rank in range(3)]


@pytest.mark.parametrize("case", EXACT)
def test_the_update_is_that_of_one_process(seen, case):
    found = seen[0][case]
    assert found["moved"] > 0.01, "a case that learns nothing would prove nothing"
    assert found["sizes"] > 2
    assert found["difference"] <= TOLERANCE


def test_dense_sums_of_sparse_gradients_are_warned_about_once(seen):
    for rank in seen:
        (said,) = [text for text in rank["sparse"]["said"] if "row-sparse" in text]
        assert "summed over workers as dense arrays" in said
        assert not any("row-sparse" in text for text in rank["clipped"]["said"])


def test_a_mean_over_samples_of_weighted_losses_is_warned_about_once(seen):
    for rank in seen:
        for name in EXACT:
            assert not any("sample_weight" in text for text in rank[name]["said"]), name
        for name in ("warned", "warned_twice"):
            (said,) = [text for text in rank[name] if "sample_weight" in text]
            assert "trainer.step(batch_size, weight=...)" in said


def test_gradients_that_each_worker_clips_are_warned_about_once(seen):
    for rank in seen:
        for name in EXACT:
            assert not any("between backward" in text for text in rank[name]["said"]), name
        (said,) = [text for text in rank["by_hand"] if "between backward and step" in text]
        assert "call trainer.allreduce_grads(), change the mean gradients" in said


@pytest.mark.parametrize("misuse", MISUSES)
def test_all_workers_name_the_value_and_the_remedy(seen, misuse):
    for rank in seen:
        assert MISUSES[misuse] in rank[misuse]
