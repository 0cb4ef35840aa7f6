"""MXNet: several trainers on the same batches share a plan, and learn what one process learns."""

import pytest
from jobs import needs_mxnet

pytestmark = needs_mxnet
TOLERANCE = 4e-6
CASES = [
    "leader_last",
    "leader_first",
    "leader_first_ahead",
    "leader_first_every_second",
    "leader_last_every_second",
    "before_and_after",
    "weighted",
    "clipped",
    "synchronised",
    "sharpness_aware",
]
MISUSES = {
    "differing_rates": "learning rate of trainer 1 (0.02 on worker 0, 0.02 on worker 1, 0.5 on",
    "thawed_beside": "grad_req of parameters of trainer 1 ('as at the start' on worker 0, 'as at "
    "the start' on worker 1, '2: write, 3: write' on worker 2)",
    "other_order": "makes its first step of trainer 1",
    "wrong_size": "step must be called with the ",
    "other_total": "global_batch_size must be that of the trainer beside which this one steps, 24",
    "other_parts": "accumulate must be that of the trainer beside which this one steps, 1, got 2",
    "no_size": "pass batch_size",
    "other_means": "disagree on mean_loss: worker 0 has 0, worker 1 has 1",
    "no_trainer": "beside must be an lbbsp_mx.Trainer, got 'other'",
    "own_options": "takes no options of the plan, got seed",
    "own_sampler": "call batch_sampler of the other one",
    "own_checkpoint": "checkpoints hold one trainer",
    "checkpoint": "checkpoints hold one trainer",
    "of_third": "pass the other one as `beside`",
    "no_total": "or beside=trainer for a trainer that steps on the batches of another one",
}


@pytest.fixture(scope="module")
def seen(clusters, tmp_path_factory):
    """What each rank reported."""
    folder = tmp_path_factory.mktemp("trainers")
    done = clusters.run("mx_trainers", str(folder), workers=3, servers=2, framework="mxnet")
    assert done.status == 0
    return [done.results(rank) for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_both_networks_learn_what_one_process_learns(seen, case):
    found = seen[0][case]
    assert found["moved"] > 0.01, "a case that learns nothing would prove nothing"
    assert found["sizes"] > 2
    assert found["difference"] <= TOLERANCE


def test_no_trainer_measures_the_waits_of_another_one(seen):
    """Worker 1 is slow in the first part of each iteration, worker 2 in the second."""
    assert seen[0]["busy_seconds"]
    for busy in seen[0]["busy_seconds"]:
        assert busy == pytest.approx([0, 0.2, 0.2]), "a wait takes a second"


def test_trainers_that_do_not_know_of_each_other_warn_once(seen):
    for rank in seen:
        (said,) = rank["apart"]
        assert "pass beside=trainer to one of them" in said
        assert rank["one_after_the_other"] == []


@pytest.mark.parametrize("misuse", MISUSES)
def test_all_workers_name_the_value_and_the_remedy(seen, misuse):
    for rank in seen:
        assert MISUSES[misuse] in rank[misuse]
