"""The wait for the next event of a job."""

import math
import threading
import time
from queue import SimpleQueue

import pytest

from lbbsp_core.processes.child import Event, Signalled, next_event

FIRST, SECOND = Signalled(1), Signalled(2)


@pytest.fixture
def events() -> SimpleQueue[Event]:
    return SimpleQueue()


def test_what_has_arrived_is_returned_in_order_even_when_the_time_has_passed(events):
    events.put(FIRST)
    events.put(SECOND)
    assert next_event(events, 0.0) == FIRST
    assert next_event(events, math.inf) == SECOND
    assert next_event(events, 0.0) is None


def test_without_an_event_the_wait_ends_in_time(events):
    until = time.monotonic() + 0.05
    assert next_event(events, until) is None
    assert time.monotonic() >= until


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_an_event_ends_the_wait(events, seconds):
    timer = threading.Timer(0.05, events.put, [FIRST])
    timer.start()
    assert next_event(events, time.monotonic() + seconds) == FIRST
    timer.join()


@pytest.mark.slow
def test_a_time_that_passes_before_the_wait_begins_ends_it(events):
    """Queues before Python 3.13, asked with a timeout alone, fail this in some thousand rounds."""
    for k in range(15_000):
        events.put(FIRST)
        assert next_event(events, math.inf) == FIRST
        assert next_event(events, time.monotonic() + k % 4 * 1e-6) is None
