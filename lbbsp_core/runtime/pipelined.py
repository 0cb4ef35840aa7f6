"""The balancer's loop as a gluon training drives it: epochs, drawing ahead, stopping together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from lbbsp_core import Balancer, BusyTimer, DisagreementError, GlobalOrder, ResourceSampler
from lbbsp_core.order import Indices
from lbbsp_core.runtime.background import Opening
from lbbsp_core.runtime.balancer import BalancerState
from lbbsp_core.runtime.protocol import WIDTH, decode, encode, fingerprint, pack, unpack

Introductions = list[list[int]]
_URGENT = 1 << 20  # an exchange travels before all gradients


class Loop:
    """Runs one `Balancer` beside a training on one store.

    A step's barrier is passed behind the training's back: a thread waits for the gradients, notes
    when, exchanges, and waits for the sums; what it brings is looked at when somebody asks for
    the balancer, at the latest in the next step. A loader that fetches nothing ahead asks at once
    for the very next plan, and so waits for it (lag 1, the paper's own). With any other the next
    step is under way while this one is still computed, as in stock gluon, for one more step of lag.

    How far a loader fetches ahead shows when it draws its first batches: the loop's lag grows
    with it, and every step makes sure that all workers have come to the same.

    Args:
        store: Carries the exchange.
        make: Makes the balancer for a lag.
        on_first_step: Called at the first step, by all workers, before its exchange; returns
            what they say of their costs.
        drivers: Names of the driving factors that the predictor is told of; None for those that
            measured best.
    """

    def __init__(
        self,
        store: Any,
        make: Callable[[int], Balancer],
        on_first_step: Callable[[Balancer], Introductions],
        drivers: Sequence[str] | None = None,
    ) -> None:
        self.store = store
        self.order: GlobalOrder | None = None
        self.timer = BusyTimer()
        self.wants_stop = False
        self._make = make
        self._balancer = make(1)
        self._opening: Opening | None = None
        predicts = self._balancer.policy.uses_costs and self._balancer.workers > 1
        self.sampler = ResourceSampler(drivers if predicts else ())
        self._on_first_step = on_first_step
        self._peers: Introductions | None = None
        self._excluded = True
        self._resumes = False
        self._iteration = 0
        self._lock = threading.Lock()
        self._pauses = 0
        self.timer.start()

    @property
    def balancer(self) -> Balancer:
        """After the barrier that was reached last, for which it waits."""
        self.settle()
        return self._balancer

    def settle(self) -> None:
        """Leaves the barrier that was reached last: takes what the peers said there."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self._take(*opening.result())

    def use_order(self, order: GlobalOrder) -> None:
        """From now on steps hold what `order` says."""
        self.balancer.use_order(order)
        self.order = order

    def begin_epoch(self, order: GlobalOrder) -> Iterator[int]:
        """The steps of an epoch; the rest of one that was left half-way is skipped.

        Raises:
            RuntimeError: The training has gone elsewhere since: the batch belongs to no step.
        """
        self.use_order(order)
        if not self._resumes:
            self.balancer.begin_epoch(0)
        self._resumes = False
        self._iteration += 1
        self.exclude_step()
        iteration = self._iteration
        for step in range(self.balancer.step, self.balancer.epoch_end_step()):
            if iteration != self._iteration:
                raise RuntimeError(
                    f"the batch of step {step} was to be drawn, but the training has gone on to "
                    f"step {self.balancer.step}: iterate the loader anew, and make it after "
                    "load_states"
                )
            yield step

    def local_indices(self, step: int) -> Indices:
        """This worker's samples of a step, which may lie ahead: then the lag grows with it."""
        if step >= self._balancer.step + self._balancer.lag:
            self.settle()
        ahead = step - self._balancer.step
        reads_late = ahead > 0 and self._opening is None  # or will, while a barrier is to open
        lag = 1 + ahead + reads_late
        if lag > self._balancer.lag and self._balancer.workers > 1:
            self._remake(self._balancer.state(), lag)
        return self._balancer.local_indices(step)

    def restore(self, state: BalancerState) -> None:
        """Goes on where `state` was taken; what loaders have drawn before belongs to no step."""
        self._remake(state, self.balancer.lag)
        self._resumes = True
        self._iteration += 1
        self.exclude_step()

    def exclude_step(self) -> None:
        """The running step is not like the others: nothing is learned from its time."""
        self.sampler.sample()  # what drove an evaluation is not what drives a step
        self._excluded = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A collective inside the step, on any thread: its wait is not busy time."""
        with self._lock:
            self._pauses += 1
            if self._pauses == 1:
                self.timer.pause()
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if self._pauses == 0:
                    self.timer.resume()

    def reach(self, computed: Callable[[], None], summed: Callable[[], None]) -> None:
        """The end of a step: measures, predicts, exchanges, behind the training's back.

        Args:
            computed: Waits for the gradients of this worker: the barrier is reached.
            summed: Waits for those of all workers: the barrier is left.
        """
        self.settle()
        if self._peers is None:
            computed()
            with self.paused():
                self._peers = self._on_first_step(self._balancer)
                self._gather(np.zeros(WIDTH + 2))()  # keys are made here, in the same order
        told = {"excluded": self._excluded, "stop": self.wants_stop}
        self._excluded = False
        place = pack([self._place()])
        self._opening = Opening(partial(self._pass, computed, summed, told, place))

    def _gather(self, row: Any) -> Callable[[], Any]:
        return self.store.begin_gather(row, slot=1, priority=_URGENT)

    def _remake(self, state: BalancerState, lag: int) -> None:
        balancer = self._balancer = self._make(lag)
        if self._peers is not None:
            balancer.set_peers(self._peers)
        balancer.restore(state)
        if self.order is not None:
            balancer.use_order(self.order)

    def _pass(
        self,
        computed: Callable[[], None],
        summed: Callable[[], None],
        told: dict[str, bool],
        place: Any,
    ) -> tuple[Any, float]:
        """The barrier; beside this, the training only draws by plans that are known."""
        computed()
        busy_seconds = self.timer.reach()
        message = self._balancer.report(busy_seconds, drivers=self.sampler.sample(), **told)
        rows = self._gather([*encode(message), *place])
        with self.store.waiting("for the gradients and messages of the others"):
            summed()
            received = rows()
        return received, self.timer.leave()

    def _take(self, received: Any, wall_seconds: float) -> None:
        self._check_places([unpack(row[WIDTH:])[0] for row in received])
        balancer = self._balancer
        balancer.receive([decode(row[:WIDTH]) for row in received], wall_seconds)
        self.wants_stop = self.wants_stop and not balancer.stopping  # all have heard of it

    def _place(self) -> int:
        """Where this worker is in the training, as an integer."""
        order, balancer = self.order, self._balancer
        seen = (order.num_samples, order.seed) if order else ()
        return fingerprint(repr((balancer.step, balancer.lag, seen)))

    def _check_places(self, places: list[int]) -> None:
        for rank, place in enumerate(places):
            if place != places[0]:
                raise DisagreementError(
                    f"worker {rank} is at another step or in another order than worker 0 (here, "
                    f"worker {self.store.rank}, step {self._balancer.step} is next): all workers "
                    "must leave an epoch, and load states, at the same step"
                )
