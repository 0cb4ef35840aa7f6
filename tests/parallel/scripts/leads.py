"""When the gradients of a step were sent and summed, before its barrier was reached."""

import time

from lbbsp_core.runtime.loop.running_step import StepMeter


class Leads:
    """Seconds by which the first gradients of each step were sent, and summed, before the barrier.

    It wraps the meter of a session; 0 where they were not.
    """

    def __init__(self, meter: StepMeter) -> None:
        self.sent, self.summed = [], []
        self._began, self._ended = [], []
        self._meter, self._reach = meter, meter.reach
        begin, end = meter.overlap.begin, meter.overlap.end
        meter.overlap.begin = lambda: (self._began.append(time.perf_counter()), begin())[1]
        meter.overlap.end = lambda: (self._ended.append(time.perf_counter()), end())[1]
        leave = meter.overlap.leave
        meter.overlap.leave = lambda: (self._began.clear(), self._ended.clear(), leave())[2]
        meter.reach = self._reached

    def _reached(self):
        reading, now = self._reach(), time.perf_counter()
        self.sent.append(now - min(self._began, default=now))
        self.summed.append(now - min(self._ended, default=now))
        return reading
