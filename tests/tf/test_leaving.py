"""End of a job: workers wait for each other unless they have failed."""

import atexit
import sys

import pytest

from lbbsp_tf.leaving import leave_together


@pytest.mark.parametrize(("status", "waits"), [(0, True), (None, True), (3, False), ("no", False)])
def test_a_worker_that_exits_with_a_failure_does_not_wait(status, waits, monkeypatch):
    registered = []
    monkeypatch.setattr(atexit, "register", lambda function, *_: registered.append(function))
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    monkeypatch.setattr(sys, "exit", sys.exit)
    leave_together.cache_clear()
    leave_together(1)
    with pytest.raises(SystemExit) as caught:
        sys.exit(status)
    assert caught.value.code == status
    assert bool(registered) is waits
