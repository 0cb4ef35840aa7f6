"""What the chief makes of iterations that end out of order, fail, or are run again."""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from lbbsp_core import read_run
from lbbsp_core.runtime.record.record import PushLine, run_header
from lbbsp_core.runtime.record.writer import PushLog
from lbbsp_tf import parameter_server
from lbbsp_tf.parameter_server import _log_epoch, _Push, _results, fit_asynchronously

HEADER = run_header("none", workers=2, global_batch_size=8, versions={})


def push(number, samples=8, loss=1.0, **changes):
    zeros = dict.fromkeys(("worker", "iteration", "staleness", "lead"), 0)
    times = {"busy_seconds": 0.5, "seconds": 100.0 + number}
    return _Push(
        PushLine(**{**zeros, **times, "push": number, "samples": samples, **changes}), loss
    )


def as_floats(each):
    return [*asdict(each.line).values(), each.loss]


class Coordinator:
    """Answers each fetch by the next of its values; raises those that are errors."""

    def __init__(self, *answers, failure=None, idle=False):
        self._answers, self._failure, self._idle = list(answers), failure, idle

    def fetch(self, result):
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return np.array(as_floats(answer), np.float64)

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
    sent = push(2**53, worker=3, staleness=2, lead=1, loss=0.1, seconds=1.5)
    tensors = {name: tf.constant(value) for name, value in asdict(sent.line).items()}
    received = _Push.unpacked(_Push.packed(tf.constant(sent.loss), **tensors).numpy())
    assert received.line == sent.line
    assert received.loss == pytest.approx(0.1)
    assert isinstance(received.line.push, int)


def test_the_record_is_in_the_order_of_pushes_and_whole_though_one_is_missing(tmp_path):
    log = PushLog.open(tmp_path, HEADER)
    first = [push(1, loss=4.0, samples=1), push(0, loss=1.0, samples=3)]
    assert _log_epoch(log, first, began=100.0) == 1.75
    _log_epoch(log, [push(4), push(2), push(5)], began=100.0)  # 3 came from a worker that died
    assert [line.push for line in read_run(tmp_path).pushes] == [0, 1, 2]
    log.close()
    lines = read_run(tmp_path).pushes
    assert [line.push for line in lines] == [0, 1, 2, 4, 5]
    assert [line.seconds for line in lines] == [0, 1, 2, 4, 5]
    assert "loss" not in (tmp_path / "run.jsonl").read_text()


def test_without_a_record_there_is_still_a_loss():
    log = PushLog.open(None, HEADER)
    assert _log_epoch(log, [push(0, loss=2.0)], began=0.0) == 2.0
    log.close()


def test_a_metrics_file_for_all_jobs_is_said_not_to_be_written(monkeypatch, caplog):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(parameter_server, "_check", lambda *values: None)
    monkeypatch.setattr(parameter_server, "fail_fast", stop)
    monkeypatch.setenv("LBBSP_METRICS_FILE", "/metrics/job.prom")
    with pytest.raises(KeyboardInterrupt):
        fit_asynchronously(SimpleNamespace(distribute_strategy=None), [], batch_size=8)
    (text,) = caplog.messages
    assert "LBBSP_METRICS_FILE = /metrics/job.prom has no effect" in text
