"""What a balanced fit must not leave behind, and parts of steps that only look exact."""

import pytest

REFUSED = {
    "clips": "call gradients = balancer.sum_gradients(gradients) after each tape",
    "compiled_step": "Compiled.train_step must not be a tf.function",
    "doubled": "batch_map must return as many samples as it is given",
}


@pytest.fixture(scope="module")
def found(clusters):
    job = clusters.run("isolation", workers=1, devices=2)
    assert job.status == 0
    return job.results(0)


def test_a_function_that_was_traced_for_the_proof_is_traced_again(found):
    assert found["noise"] > 2, "in the proof, all samples have the same noise"


def test_a_vector_of_added_losses_is_exact_when_run_eagerly(found):
    assert found["add_loss_eagerly"] <= 2e-6


def test_a_plain_fit_after_a_failed_one_trains_on_its_own_data(found):
    assert found["plain_fit"] == 0


def test_a_fit_may_run_inside_the_scope_of_the_strategy(found):
    assert found["in_scope"] == ""


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_weighted_wrongly_is_refused(found, case):
    assert REFUSED[case] in found[case]
