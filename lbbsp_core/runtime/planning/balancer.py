"""State machine of the loop, independent of frameworks: measure, predict, exchange, allocate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from lbbsp_core.cost import Profile
from lbbsp_core.cost.online import CostShape
from lbbsp_core.measure import OutlierFilter
from lbbsp_core.order import Snapshot
from lbbsp_core.policy import BatchConstraints, FirstUses, LoadBalanced, Policy, Sizes
from lbbsp_core.policy.base import PolicyState, first_state, next_state
from lbbsp_core.predict import Predictor
from lbbsp_core.predict.estimator import EstimatorState, SpeedEstimator
from lbbsp_core.resources import FACTORS
from lbbsp_core.resources.sampler import MEMORY_OF_GPU
from lbbsp_core.runtime.exchange.protocol import (
    LINE,
    DisagreementError,
    PeerInfo,
    StepMessage,
    checksum,
    curve,
    quantise,
)
from lbbsp_core.runtime.options.naming import (
    AnyCost,
    LimitsOrMaximum,
    limits_by_rank,
    read_cost,
    read_policy,
    read_predictor,
)
from lbbsp_core.runtime.planning.bounds import BatchBounds, BoundsChain, Situation
from lbbsp_core.runtime.planning.running_step import RunningStep
from lbbsp_core.runtime.planning.schedule import Schedule
from lbbsp_core.runtime.planning.short_steps import ShortStepsState
from lbbsp_core.types import is_plausible


class BalancerState(NamedTuple):
    """State from which this worker, or another worker of the job, can continue a training.

    Args:
        step: Next global step.
        order: `Order.snapshot` of the order, if known.
        order_start: Step at which that order started.
        plans: Plans that are already decided, for the steps from `step` on.
        rank: Rank of the worker to which `predictor`, `estimate` and `drivers` belong.
        predictor: Predictor of its speed.
        policy_state: State of the policy, the same on all workers.
        estimate: State of its speed estimator.
        drivers: Driving factors known when its last measurement ended.
        short_steps: What is known of the time of steps.
    """

    step: int
    order: Snapshot | None
    order_start: int
    plans: tuple[Sizes, ...]
    rank: int
    predictor: Predictor
    policy_state: PolicyState
    estimate: EstimatorState
    drivers: tuple[float, ...]
    short_steps: ShortStepsState


class Balancer:
    """Runs the loop of one worker; all workers run one, and compute the same plans.

    A session calls, for every step::

        sizes = balancer.sizes(step)                       # batch sizes to draw
        message = balancer.report(busy_seconds)            # measure, predict
        messages = ...                                     # the framework's all-gather
        balancer.receive(messages, wall_seconds)           # allocate, for step + lag

    Args:
        rank: Number of this worker, in [0, workers).
        workers: Number of workers, N.
        global_batch_size: X, samples per step over all workers.
        policy: Decides batch sizes; an object or a name, as in `SessionOptions`, where predictor,
            cost and limits are read in the same way. Defaults to `LoadBalanced`.
        predictor: Forecasts *this* worker's speed. Defaults to a `Mixture` for this lag.
        cost: Prior for the shape of this worker's cost; its speed is ignored. Pass a `CostShape`
            to control what is learned of the overhead. Defaults to `Proportional`.
        limits: Bounds of a batch: the same for all workers, or one entry per worker.
        granularity: Batch sizes are multiples of it, in samples.
        lag: Steps between a plan's decision and its use, >= 1: a plan decided after step k
            applies to step ``k + lag``.
        outlier_filter: Decides which measurements reach the predictor.
        bounds: What bounds batches besides; by default nothing does.

    Attributes:
        schedule: Plans by step, and the running step in its order and epoch.
        bounds: Constraints of the plans.
        first_uses: What is known of first uses of batch sizes, by rank; empty: they cost nothing.

    Raises:
        ValueError: No plan can satisfy the options; names the value and the remedy.
        TypeError: An option is of the wrong type.

    Example:
        >>> fast, slow = (Balancer(rank=i, workers=2, global_batch_size=12) for i in (0, 1))
        >>> fast.sizes(0)
        (6, 6)
        >>> messages = [fast.report(0.1), slow.report(0.2)]
        >>> for balancer in (fast, slow):
        ...     ended = balancer.receive(messages, wall_seconds=0.2)
        >>> fast.sizes(1), slow.sizes(1)
        ((8, 4), (8, 4))
    """

    def __init__(
        self,
        *,
        rank: int,
        workers: int,
        global_batch_size: int,
        policy: Policy | str | None = None,
        predictor: Predictor | str | None = None,
        cost: AnyCost | None = None,
        limits: LimitsOrMaximum | Sequence[LimitsOrMaximum] | None = None,
        granularity: int = 1,
        lag: int = 1,
        outlier_filter: OutlierFilter | None = None,
        bounds: BatchBounds | None = None,
    ) -> None:
        if not 0 <= rank < workers:
            raise ValueError(f"rank must be in [0, {workers}), got {rank}: count workers from 0")
        self.rank, self.workers = rank, workers
        bounds = bounds or BatchBounds()
        self.first_uses = (FirstUses(),) * workers if bounds.first_uses else ()
        self.policy: Policy = LoadBalanced() if policy is None else read_policy(policy)
        self._predictor, self._filter = predictor, outlier_filter or OutlierFilter()
        by_rank = limits_by_rank(limits, workers)
        options = BatchConstraints(global_batch_size, by_rank, granularity)
        self.cost_shape = CostShape.from_cost(read_cost(cost), global_batch_size, workers)
        self._needs_peers = self.cost_shape.marginal_segments() != LINE
        self.bounds = BoundsChain(
            options,
            Situation(
                self.policy,
                peers=(PeerInfo(LINE),) * workers,
                are_limits_given=limits is not None,
                bounds=bounds,
            ),
        )
        self.schedule = Schedule(rank, lag, self.bounds)
        self.driver_names: tuple[str, ...] = ()  # those of this machine, in their order
        self._drivers: tuple[float, ...] = ()
        self._drivers_by_name: dict[str, tuple[float | None, ...]] = {}  # those of all workers
        self._continues = False  # whether plans were restored
        self._training: Future[EstimatorState] | None = None
        self._choose_predictor()
        self._start_planning()

    @property
    def step(self) -> int:
        """Global step that is running or comes next."""
        return self.schedule.step

    @property
    def constraints(self) -> BatchConstraints:
        """Constraints of all plans; the next plan may have narrower ones."""
        return self.bounds.constraints

    def sizes(self, step: int) -> Sizes:
        """Returns the samples of each worker in a global step, see `Schedule.sizes`."""
        return self.schedule.sizes(step)

    def _choose_predictor(self) -> None:
        self.predictor: Predictor = read_predictor(self._predictor, self.schedule.lag)
        used = self.predictor if self.policy.uses_costs else None
        self.estimator = SpeedEstimator(used, self.cost_shape, self._filter)
        self._estimate: EstimatorState = self.estimator.init()
        self._forecast: tuple[int, int] | None = None

    def use_lag(self, lag: int) -> None:
        """Changes the lag; plans that are decided stay, a predictor of another horizon does not."""
        self.schedule.use_lag(lag)
        before, estimate = self.predictor, self._learned()
        self._choose_predictor()
        if self.predictor == before:
            self._estimate = estimate

    def _start_planning(self) -> None:
        self.policy_state: PolicyState = first_state(self.policy, self.constraints)
        self.schedule.use_plans([self.policy_state.sizes])

    def static_info(self) -> list[int]:
        """Returns the static facts of this worker as integers, for `set_peers`."""
        prior, here = self.cost_shape.prior, self.bounds.situation.bounds
        return PeerInfo(
            self.cost_shape.marginal_segments(),
            prior.limits().maximum if isinstance(prior, Profile) else None,
            here.granularity,
            here.shows_memory,
            float(prior.effective_samples(0)),
        ).pack()

    def set_peers(self, peer_info: Sequence[Sequence[int]], *, are_drawn: bool = False) -> None:
        """Sets what all workers have told each other; call it before the first step.

        Args:
            peer_info: Result of `static_info` of each worker, by rank.
            are_drawn: Whether batches are drawn by the plans in force, which then stay: memory
                limits bound later plans only.

        Raises:
            ValueError: No plan fits into the memory of the workers.
        """
        self._needs_peers = False
        if not self.bounds.use_peers(tuple(map(PeerInfo.unpack, peer_info))):
            return
        plans = self.schedule.plans
        if not (self._continues and self.bounds.allow([*plans, self.policy_state.sizes])):
            self.policy_state = first_state(self.policy, self.constraints)
            plans = (self.policy_state.sizes,)
        if not are_drawn:
            self.schedule.use_plans(plans)

    def report(
        self, busy_seconds: float, *, excluded: bool = False, drivers: tuple[float, ...] = ()
    ) -> StepMessage:
        """Learns from the running step, predicts, and returns this worker's message.

        Args:
            busy_seconds: Busy time of this step; an invalid value is sent as 0 (rule 7).
            excluded: Whether the step is excluded from learning (the first of an epoch, a retrace).
            drivers: Driving factors known now, before the *next* step starts.

        Raises:
            LookupError: The cost shape is not a straight line, and `set_peers` was not called.
        """
        if self._needs_peers:
            raise LookupError(
                f"the peers do not know the shape of {self.cost_shape.prior!r}: call set_peers() "
                "first"
            )
        running = self.schedule.running_step(self.first_uses)
        excluded = excluded or running.is_short
        ends_span = self.bounds.short_steps.ends_span
        self._estimate, accepted = self.estimator.learn(
            self._learned(),
            running.shares.work[self.rank],
            running.measured(self.rank, busy_seconds),
            self._drivers or drivers,  # nothing was sampled before the first step
            excluded=excluded,
            ends_span=ends_span,
        )
        if ends_span or not self._drivers:
            self._drivers = drivers
        if ends_span or self._forecast is None:
            forecast = self.estimator.predict(self._estimate, self._drivers, self.schedule.lag)
            self._forecast = quantise(*forecast)
        return StepMessage(
            *self._forecast,
            round(busy_seconds * 1e9) if is_plausible(busy_seconds) else 0,
            checksum((self.step, *self.policy_state.sizes)),
            # All workers decide alike whether a first use counts.
            excluded=excluded if running.is_new(self.rank) else not accepted,
        )

    def train(
        self, start: Callable[[Callable[[], EstimatorState]], Future[EstimatorState]]
    ) -> None:
        """Learns on another thread what the last forecast did not wait for, if it was not all.

        `start` runs a function there. Without this call `receive` learns it.
        """
        if self.estimator.trains(estimate := self._learned()):
            self._training = start(partial(self.estimator.train, estimate))

    def finish_training(self) -> None:
        """Waits for the other thread of `train`."""
        self._learned()

    def _learned(self) -> EstimatorState:
        """Returns the state of the estimator, after what is learned on another thread."""
        training, self._training = self._training, None
        if training is not None:
            self._estimate = training.result()
        return self._estimate

    def receive(self, messages: Sequence[StepMessage], wall_seconds: float) -> RunningStep:
        """Ends the running step: decides the plan of ``step + lag`` from the messages.

        Args:
            messages: Messages of all workers by rank, the same on every worker.
            wall_seconds: Time from barrier to barrier, for the record.

        Returns:
            The step, whose `RunningStep.line` is that of the run record.

        Raises:
            DisagreementError: A worker has computed a different plan.
        """
        schedule, bounds = self.schedule, self.bounds
        _check_plans(schedule.step, self.policy_state.sizes, messages)
        if self._training is None and self.estimator.trains(self._estimate):
            self._estimate = self.estimator.train(self._estimate)
        costs = tuple(map(curve, messages, (peer.segments for peer in bounds.situation.peers)))
        busy = tuple(message.busy_nanoseconds / 1e9 for message in messages)
        running = schedule.running_step(self.first_uses)._replace(
            messages=messages,
            busy_seconds=busy,
            next_costs=costs,
            wall_seconds=wall_seconds,
            drivers=self._drivers_by_name,  # before the step
        )
        self._drivers_by_name = _by_name([message.drivers for message in messages])
        self.first_uses = running.first_uses_after()
        observation = running.observation(
            self.first_uses, last_of_epoch=schedule.ends_epoch, lag=schedule.lag
        )
        if self.policy.accepts_narrower_limits:
            bounds.short_steps.observe(observation.busy_seconds, observation.excluded)
        memory = self._drivers_by_name.get(MEMORY_OF_GPU, ())
        constraints = bounds.of_next_plan(self.first_uses, self.policy_state.sizes, memory)
        self.policy_state = next_state(self.policy, self.policy_state, constraints, observation)
        schedule.advance(self.policy_state.sizes, costs)
        return running

    # State

    def state(self) -> BalancerState:
        """Returns a state for `restore`, which can be pickled."""
        return BalancerState(
            *self.schedule.place(),
            self.rank,
            self.predictor,
            self.policy_state,
            self._learned(),
            self._drivers,
            self.bounds.short_steps.state,
        )

    def restore(self, state: BalancerState) -> None:
        """Continues from `state`, also with another lag; call it before the first step.

        The position in the order is restored for any number of workers; plans if this run's
        constraints allow them (a maximum may have been lowered after a worker had run out of
        memory), which `set_peers` checks again; the predictor's state for the same rank and
        predictor; and the time of steps for the same number of workers.
        """
        self.schedule.move_to(state.step, state.order, state.order_start)
        self._start_planning()
        are_allowed = self.bounds.allow([*state.plans, state.policy_state.sizes])
        self._continues = are_allowed and state.step > 0
        if are_allowed:
            self.policy_state = state.policy_state
            self.schedule.use_plans(state.plans)
        self._estimate, self._training = self.estimator.init(), None
        self._drivers, self._drivers_by_name = (), {}
        if state.rank == self.rank and state.predictor == self.predictor:
            self._estimate, self._drivers = state.estimate, state.drivers
        if len(state.policy_state.sizes) == self.workers:
            self.bounds.short_steps.state = state.short_steps


def _check_plans(step: int, here: Sizes, messages: Sequence[StepMessage]) -> None:
    for rank, message in enumerate(messages):
        if message.checksum != messages[0].checksum:
            raise DisagreementError(
                f"at step {step} worker {rank} has a different plan than worker 0, or is at "
                f"another step (checksums {message.checksum} and {messages[0].checksum}; here the "
                f"plan is {here}): run the same lbbsp and Python on all workers; a script that "
                "leaves an epoch before its last step must do so on all of them after the same step"
            )


def _by_name(drivers: Sequence[Mapping[str, float]]) -> dict[str, tuple[float | None, ...]]:
    """Returns driving factors, given by rank, as values by rank of each name."""
    names = [name for name in FACTORS if any(name in worker for worker in drivers)]
    return {name: tuple(worker.get(name) for worker in drivers) for name in names}
