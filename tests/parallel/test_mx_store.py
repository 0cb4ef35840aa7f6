"""The store on a real cluster, used as MXNet's own; sums against closed forms."""

import pytest
from jobs import needs_mxnet, run

pytestmark = needs_mxnet
WORKERS = 3


@pytest.fixture(scope="module")
def said():
    """What each rank reported."""
    used = run("mx_store", workers=WORKERS, servers=2, framework="mxnet")
    assert used.status == 0
    return [used.results(rank) for rank in range(WORKERS)]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("sums", [1, 5, 21, 6, 60, 7]),
        ("sent_again", [0, 100, 200]),
        ("rows", [1, 0, 3, 0]),
        ("shared_with_a_trainer", [6, 40]),
        ("created", ["WorkerSideStore", "KVStore"]),
        ("on_the_servers", [7, 8.5, True]),
    ],
)
def test_all_workers_read_the_closed_form(said, case, expected):
    assert [each[case] for each in said] == [expected] * WORKERS


def test_sums_after_a_step_of_uneven_batches_have_no_weights(said):
    assert [each["summed_after_a_step"] for each in said] == [[2, 21], [4, 21], [6, 21]]


@pytest.mark.parametrize(
    ("misuse", "answer"),
    [
        ("another_order", "workers introduce different keys (worker 0 init ['key0'], worker 1"),
        ("other_calls", "worker 0 broadcast ['z'], worker 1 init ['z']"),
        ("second_init", "the keys ['a'] exist already"),
        ("half_known", "'new' is new among ['a', 'new']"),
        ("unknown", "the key 'nowhere' is unknown: introduce it by init or broadcast"),
        ("large_key", "texts or integers in [0, 100000), got 123456"),
        ("with_trainer", "cannot be combined with an lbbsp_mx.Trainer"),
        ("updated", "because an optimizer updates them"),
    ],
)
def test_all_workers_are_told_what_is_wrong(said, misuse, answer):
    assert all(answer in each[misuse] for each in said)
