"""What the chief makes of iterations that end out of order, fail, or are run again."""

import numpy as np
import pytest
import tensorflow as tf

from lbbsp_core import RunRecord, read_run
from lbbsp_tf.parameter_server import _Ledger, _Push, _results


def push(number, samples=8, loss=1.0, **changes):
    values = dict.fromkeys(_Push._fields, 0) | {"push": number, "samples": samples, "loss": loss}
    return _Push(**{**values, "busy_seconds": 0.5, "entered": 100.0 + number, **changes})


class Coordinator:
    """Answers each fetch by the next of its values; raises those that are errors."""

    def __init__(self, *answers, failure=None, idle=False):
        self._answers, self._failure, self._idle = list(answers), failure, idle

    def fetch(self, result):
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return np.array(answer, np.float64)

    def done(self):
        if self._failure is not None:
            raise self._failure
        return self._idle


GONE = tf.errors.UnavailableError(None, None, "Connection reset by peer")


def test_a_result_that_went_with_its_worker_is_waited_for_again():
    coordinator = Coordinator(push(0), GONE, GONE, push(2))
    assert _results(coordinator, ["first", "second"]) == [push(0), push(2)]


def test_what_failed_first_is_raised_and_not_what_was_cancelled_after_it():
    cancelled = tf.errors.CancelledError(None, None, "please reschedule")
    with pytest.raises(ValueError, match="the labels"):
        _results(Coordinator(cancelled, failure=ValueError("the labels")), ["first"])


def test_a_result_that_nobody_will_bring_is_an_error():
    with pytest.raises(tf.errors.UnavailableError):
        _results(Coordinator(GONE, idle=True), ["first"])


def test_integers_survive_the_way_as_floats():
    told = push(2**53, worker=3, staleness=2, lead=1, loss=0.1, entered=1.5)
    sent = _Push.packed(**{name: tf.constant(v) for name, v in told._asdict().items()})
    assert _Push.unpacked(sent.numpy()) == told._replace(loss=pytest.approx(0.1))
    assert isinstance(_Push.unpacked(sent.numpy()).push, int)


def test_the_record_is_in_the_order_of_pushes_and_whole_though_one_is_missing(tmp_path):
    ledger = _Ledger(RunRecord(tmp_path / "run.jsonl", {}), tf.constant(100.0))
    assert ledger.enter([push(1, loss=4.0, samples=1), push(0, loss=1.0, samples=3)]) == 1.75
    ledger.enter([push(4), push(2), push(5)])  # 3 came from a worker that died
    assert [line["push"] for line in read_run(tmp_path).pushes] == [0, 1, 2]
    ledger.close()
    lines = read_run(tmp_path).pushes
    assert [line["push"] for line in lines] == [0, 1, 2, 4, 5]
    assert [line["seconds"] for line in lines] == [0, 1, 2, 4, 5]
    assert "loss" not in lines[0]


def test_without_a_record_there_is_still_a_loss():
    ledger = _Ledger(None, tf.constant(0.0))
    assert ledger.enter([push(0, loss=2.0)]) == 2.0
    ledger.close()
