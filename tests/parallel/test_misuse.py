"""Bad input on a cluster: every worker says what is wrong, with the value and the cure."""

import os
import sys

import pytest
from jobs import SCRIPTS, campaign

from lbbsp_core.launch.cluster import cluster_variables

EXPECTED = {
    "no_callbacks": "can only be trained on by fit(..., callbacks=[balancer])",
    "no_targets": "the data have no targets y: pass them, as in balancer.dataset(x, y)",
    "strategy_left_out": "strategy must be a tf.distribute.Strategy, got 16",
    "fixed_size": "layer 'fixed' fixes the size of a batch, but the sizes of workers change",
    "fixed_size_in_loop": "layer 'fixed' fixes the size of a batch, but the sizes of workers",
    "no_data_of_ours": "fit needs the data of the balancer",
    "arrays": "fit needs the data of the balancer",
    "batch_size_beside_ours": "batch_size must be the global_batch_size = 16 of the balancer, got",
    "replaced_within_an_epoch": "call make_train_function(force=True) in on_epoch_begin or",
    "batch_size": "without batch_size and validation_split",
    "validation_split": "without batch_size and validation_split",
    "validation_split_of_ours": "call balancer.dataset(..., validation_split=0.5)",
    "wrong_steps": "steps_per_epoch must be balancer.steps_per_epoch = 4, got 3",
    "steps_per_execution": "steps_per_execution must be 1, got 2",
    "jit_compile": "jit_compile must be False",
    "validation_of_ours": "validation_data must be arrays or a tf.data.Dataset",
    "different_logs": "disagree on logs: worker 0 has 1, worker 1 has 0",
    "different_epochs": "disagree on epochs: worker 0 has 2, worker 1 has 3",
    "different_first_epoch": "disagree on first epoch: worker 0 has 0, worker 1 has 1",
    "metric_outside_scope": "metric 'top/total' was created outside the strategy's scope",
    "outside_scope": "inside `with strategy.scope():`",
    "batch_below_workers": "at least workers * minimum = 2, got 1",
    "minimum": "at least workers * minimum = 18, got 16",
    "maximum": "at most the sum of maxima = 14, got 16",
    "small_data": "num_samples = 64 < global_batch_size = 128",
    "lengths": "got shapes [(64, 4), (9,)]",
    "other_strategy": "TF_CONFIG names 2 workers",
    "unknown_option": "there is no option 'granularty': did you mean 'granularity'",
    "different_seed": "workers disagree on seed: worker 0 has 0, worker 1 has 7",
    "different_batch": "disagree on global_batch_size: worker 0 has 16, worker 1 has 8",
    "different_samples": "disagree on number of samples: worker 0 has 64, worker 1 has 63",
    "different_layers": "disagree on layers: worker 0 has InputLayer, Dense, Activation, worker 1 "
    "has InputLayer, Dense, ReLU",
    "different_schedule": "decay_steps: 10",
    "different_loss": "disagree on loss: worker 0 has SparseCategoricalCrossentropy(",
    "different_weighting": "sums=(True,), by_tokens",
    "different_order": "disagree on the data: samples of worker 1 differ from those of worker 0",
    "different_labels": "disagree on the data: samples of worker 1 differ from those of worker 0",
    "different_types": "disagree on shapes and types of the data: worker 0 has",
    "loop_rate": "disagree on the learning rate of optimizer 0 (0.01 on worker 0, 0.02 on worker "
    "1); this is so since step 2, and makes their models different: let it follow what loop.epoch",
    "loop_rate_at_the_end": "disagree on the learning rate of optimizer 0 (0.01 on worker 0, 0.02",
    "loop_weights": "workers have different weights at step 3, where they are compared every 50",
    "different_weights": "workers have different weights at step 3, where they are compared every "
    "3 steps",
}

RIGHT = ("equal_but_rounded", "names_for_objects")


@pytest.fixture(scope="module")
def said(clusters):
    """What each rank answered to each misuse."""
    job = clusters.run("misuse", *EXPECTED, *RIGHT, workers=2)
    assert job.status == 0
    return [job.results(rank) for rank in range(2)]


@pytest.mark.parametrize("misuse", EXPECTED)
def test_both_workers_name_the_value_and_the_cure(said, misuse):
    for rank in range(2):
        assert EXPECTED[misuse] in said[rank][misuse]
        assert "Error: " in said[rank][misuse]


def test_tensorflow_listens_on_all_interfaces_and_nothing_else_does(said):
    """As docs/security.md says; if this changes for the better, so must the page."""
    for each in said:
        assert set(each["addresses"]) == {"::"}, each["addresses"]


@pytest.mark.parametrize("right", RIGHT)
def test_data_that_differ_in_the_last_bits_and_names_for_objects_are_the_same(said, right):
    assert [each[right] for each in said] == ["no error"] * 2


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ("layer", "variable 4, counted in the order of creation: worker 0 has int64 (), worker 1 "
         "has float32 (2, 5); build the same model"),
        *campaign(
            ("rate", "worker 0 has float32 () = 0.1 (the learning rate), worker 1 has float32 () = "
             "1.1 (the learning rate); build the same model, with the same optimizer")
        ),
    ],
)  # fmt: skip
def test_workers_that_build_different_models_say_so_by_hand(popen, different, words):
    """Before any collective of these variables, and on all workers, which no launcher ends."""
    command = [sys.executable, SCRIPTS / "other_model.py", different]
    workers = [
        popen(command, env={**os.environ, **variables})
        for variables in cluster_variables("tensorflow", 2).workers
    ]
    for worker in workers:
        said = worker.communicate()[0]
        assert worker.returncode
        assert "DisagreementError: workers disagree on variable " in said
        assert words in said
