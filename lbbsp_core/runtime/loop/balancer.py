"""State machine of the loop, independent of frameworks: measure, predict, exchange, allocate."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy.typing as npt

from lbbsp_core.cost import Cost, Profile, Proportional, Segment
from lbbsp_core.cost.online import CostShape
from lbbsp_core.measure import OutlierFilter
from lbbsp_core.order import GlobalOrder, Indices, Order, Snapshot
from lbbsp_core.policy import (
    BatchConstraints,
    FirstUses,
    LoadBalanced,
    Observation,
    Policy,
    Sizes,
    accepts_narrower_limits,
    bound_growth,
)
from lbbsp_core.policy.base import PolicyState
from lbbsp_core.predict import Mixture, Predictor
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
from lbbsp_core.runtime.loop.bounds import with_cap
from lbbsp_core.runtime.loop.granularity import coarsen
from lbbsp_core.runtime.loop.short_steps import ShortSteps, ShortStepsState
from lbbsp_core.runtime.options.naming import (
    AnyCost,
    LimitsOrMaximum,
    limits_by_rank,
    read_cost,
    read_policy,
    read_predictor,
)
from lbbsp_core.runtime.record.figures import even_seconds
from lbbsp_core.runtime.record.observers import Observers
from lbbsp_core.runtime.record.record import PREEMPTED, REQUESTED, RunRecord, StepLine
from lbbsp_core.sampled_order import order_of
from lbbsp_core.types import Limits, is_plausible
from lbbsp_core.work import StepShares, Work, require_work

logger = logging.getLogger("lbbsp.balancer")


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
        drivers: Driving factors that were sampled last.
        short_steps: What is known of the time of steps; None in states of older versions.
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
    short_steps: ShortStepsState | None = None


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
        wanted_granularity: The same for this worker's device; all workers use the largest one that
            leaves a plan.
        shows_memory: Whether the driving factor `MEMORY_OF_GPU` of this worker bounds its batch.
        lag: Steps between a plan's decision and its use, >= 1: a plan decided after step k
            applies to step ``k + lag``.
        parts: Parts into which each worker cuts its batch, >= 1; a batch has samples for each.
        outlier_filter: Decides which measurements reach the predictor.
        default_maximum: Largest batch of a worker without a maximum of its own and without a
            `Profile` with a memory limit, in samples; None: no limit. See `default_cap`. It is
            raised where other maxima leave no plan within it.
        short_steps: Keeps batches near equal shares while steps are short; None: nothing does.
        first_uses: What is known of first steps with a batch size, by rank, where they may take
            longer than the next ones, and need more memory than there is; None: they do not.

    Raises:
        ValueError: No plan can satisfy the options; names the value and the remedy.
        TypeError: An option is of the wrong type.

    Example:
        >>> fast, slow = (Balancer(rank=i, workers=2, global_batch_size=12) for i in (0, 1))
        >>> fast.sizes(0)
        (6, 6)
        >>> messages = [fast.report(0.1), slow.report(0.2)]
        >>> for balancer in (fast, slow):
        ...     balancer.receive(messages, wall_seconds=0.2)
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
        wanted_granularity: int = 1,
        shows_memory: bool = False,
        lag: int = 1,
        parts: int = 1,
        outlier_filter: OutlierFilter | None = None,
        default_maximum: int | None = None,
        short_steps: ShortSteps | None = None,
        first_uses: tuple[FirstUses, ...] | None = None,
    ) -> None:
        if not 0 <= rank < workers:
            raise ValueError(f"rank must be in [0, {workers}), got {rank}: count workers from 0")
        if lag < 1:
            raise ValueError(
                f"lag must be >= 1, got {lag}: a plan cannot apply to the step after which it is "
                "decided"
            )
        self.known_limits = tuple(
            replace(bounds, minimum=max(bounds.minimum, parts))
            for bounds in limits_by_rank(limits, workers)
        )
        """Limits by rank that are given by the user, or by profiles."""
        self._are_limits_given = limits is not None
        self.short_steps = short_steps or ShortSteps(0.0)
        self.rank = rank
        self.lag = lag
        self.wanted_granularity, self.shows_memory = wanted_granularity, shows_memory
        self.parts = parts
        self.policy: Policy = LoadBalanced() if policy is None else read_policy(policy)
        self.predictor: Predictor = (
            Mixture(horizon=lag) if predictor is None else read_predictor(predictor, lag)
        )
        self._wanted_maximum = default_maximum
        known = BatchConstraints(global_batch_size, self.known_limits, granularity)
        # What restored plans must satisfy: not the default maximum, which a policy of the user need
        # not keep, and which says nothing of what has run before. Noise of layers depends on plans.
        self._required = known
        self.constraints, self.default_maximum = with_cap(known, default_maximum)
        self.given_constraints = self.constraints
        """Constraints that follow from the options alone, before memory limits are known."""
        self.step = 0
        self.stopping = False
        self.preempted = False
        prior = Proportional() if cost is None else read_cost(cost)
        self.cost_shape = CostShape.from_cost(prior, global_batch_size, workers)
        used = self.predictor if self.policy.uses_costs else None
        self._estimator = SpeedEstimator(used, self.cost_shape, outlier_filter or OutlierFilter())
        self._estimate = self._estimator.init()
        self._linear = self.cost_shape.marginal_segments() == LINE
        self._peers: tuple[tuple[Segment, ...], ...] = (LINE,) * workers
        self._show_memory: tuple[bool, ...] = (False,) * workers
        # Steps before this one keep the constraints by which their batches were drawn.
        self._drawn_until, self._drawn_constraints = 0, self.constraints
        self._drivers: tuple[float, ...] = ()
        self._unknown: tuple[None, ...] = (None,) * workers
        self._policy_state: PolicyState
        self._plans: dict[int, tuple[Sizes, Sequence[Cost | None]]]
        self._start_planning()
        self._continues = False  # whether plans were restored
        self._order: Order | None = None
        self._order_start = 0
        self._cut = lru_cache(maxsize=lag + 4)(self._cut_by_work)
        self._record: RunRecord | Observers | None = None
        self.first_uses = first_uses or ()
        """What is known of first uses of batch sizes, by rank; empty: they cost nothing."""
        self._known: dict[str, tuple[float | None, ...]] = {}

    @property
    def workers(self) -> int:
        """Number of workers, N."""
        return self.constraints.workers

    @property
    def is_maximum_raised(self) -> bool:
        """Whether the default maximum was raised, because other workers' maxima left no plan."""
        return self.default_maximum != self._wanted_maximum

    @property
    def estimator(self) -> SpeedEstimator:
        """Estimator of this worker's speed."""
        return self._estimator

    @property
    def latest_plan(self) -> tuple[Sizes, Sequence[Cost | None]]:
        """Plan that was decided last, and the predicted costs for which it was."""
        return self._plans[self.step + self.lag - 1]

    def make_order(
        self,
        num_samples: int,
        seed: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        steps_per_epoch: int | None = None,
        by_batch: bool = False,
        work: npt.ArrayLike | None = None,
        most_workers: int = 0,
    ) -> GlobalOrder:
        """Creates an order of `num_samples` samples in which every worker has samples in each step.

        A short last step with fewer samples than workers, or than parts of all their batches, is
        dropped, with a warning. `most_workers` counts instead, if the job has had so many, since
        its order must stay the same. `work` is the work of each sample, by which steps are cut,
        see `lbbsp_core.work.Work`. The other arguments are those of `GlobalOrder`.

        Raises:
            ValueError: The data set is smaller than one global batch, or `work` is wrong.
        """
        if work is not None and by_batch:
            raise ValueError(
                "work= needs samples with numbers of their own, got a data set whose items are "
                "global batches: pass a data set whose items are samples, or leave work out"
            )
        full, rest = divmod(num_samples, self.constraints.global_batch_size)
        if (steps_per_epoch or full) == 1 and self.workers > 1:
            logger.warning(
                "an epoch of %d samples has one full step of %d: batches will stay even, because "
                "the first step of an epoch and short steps are excluded from learning; make "
                "epochs longer, for example by repeating the data",
                num_samples if steps_per_epoch is None else self.constraints.global_batch_size,
                self.constraints.global_batch_size,
            )
        workers = max(self.workers, most_workers)
        too_small = 0 < rest < workers * self.parts
        if too_small and not drop_last:
            logger.warning(
                "%d of %d samples are dropped in each epoch, because the last step would have "
                "fewer samples than the %d workers%s",
                rest,
                num_samples,
                workers,
                f" times {self.parts} parts of a batch" if self.parts > 1 else "",
            )
        order = GlobalOrder(
            num_samples,
            self.constraints.global_batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last or too_small,
            steps_per_epoch=steps_per_epoch,
            by_batch=by_batch,
        )
        if work is not None:
            order.work = Work(work, num_samples)
        return order

    def use_order(self, order: Order) -> None:
        """Plans for the steps of `order`; an order other than the last one starts at this step.

        Raises:
            ValueError: `Limits.maximum_work` is given and cannot be kept.
        """
        require_work(order.work, self.constraints.limits, self.constraints.global_batch_size)
        if self._order is None or order != self._order:
            self._order_start = self.step
        elif order is not self._order:
            order.adopt(self._order)
        self._order = order
        self._cut.cache_clear()

    def local_indices(self, step: int) -> Indices:
        """Returns this worker's samples of a global step, int64, shape ``(sizes(step)[rank],)``.

        Raises:
            LookupError: There is no order, or the plan of the step is not decided yet.
        """
        if self._order is None:
            raise LookupError("there is no order to draw samples from: call use_order() first")
        if self.workers == 1:  # independent of plans, so steps may be drawn ahead without limit
            return self._order.indices(self.step_of_order(step))
        return self._order.slice(self.step_of_order(step), self.rank, self.sizes(step))

    def step_of_order(self, step: int) -> int:
        """Returns the number of a global step, counted from the start of the order."""
        return step - self._order_start

    def begin_epoch(self, epoch: int) -> None:
        """Moves to the start of the next epoch, or ahead to epoch `epoch` of the order.

        The rest of an unfinished epoch is skipped.
        """
        if self._order is not None:
            per_epoch = self._order.steps_per_epoch
            done = -((self._order_start - self.step) // per_epoch)
            self.skip_to(self._order_start + max(done, epoch) * per_epoch)

    def static_info(self) -> list[int]:
        """Returns the static facts of this worker as integers, for `set_peers`."""
        prior = self.cost_shape.prior
        max_batch = prior.limits().maximum if isinstance(prior, Profile) else None
        segments = self.cost_shape.marginal_segments()
        return PeerInfo(segments, max_batch, self.wanted_granularity, self.shows_memory).pack()

    def set_peers(self, peer_info: Sequence[Sequence[int]], *, are_drawn: bool = False) -> None:
        """Sets what all workers have told each other; call it before the first step.

        Args:
            peer_info: Result of `static_info` of each worker, by rank. Rows may be padded at the
                end to the same length.
            are_drawn: Whether batches are drawn by the plans in force, which then stay: memory
                limits bound later plans only.

        Raises:
            ValueError: No plan fits into the memory of the workers.
        """
        peers = tuple(map(PeerInfo.unpack, peer_info))
        self._peers = tuple(peer.segments for peer in peers)
        self._show_memory = tuple(peer.shows_memory for peer in peers)
        old = self.constraints
        self.known_limits = tuple(
            _within(bounds, peer, self.parts)
            for bounds, peer in zip(self.known_limits, peers, strict=True)
        )
        known = BatchConstraints(old.global_batch_size, self.known_limits, old.granularity)
        known = coarsen(known, max(old.granularity, *(peer.granularity for peer in peers)))
        if are_drawn:
            self._drawn_until, self._drawn_constraints = self.step + self.lag, old
        if self._wanted_maximum is not None:
            self._wanted_maximum = -(-self._wanted_maximum // known.granularity) * known.granularity
        self.constraints, self.default_maximum = with_cap(known, self._wanted_maximum)
        if (known, self.constraints) == (self._required, old):
            return
        self._required = known
        plans = [sizes for sizes, _ in self._plans.values()]
        if not (self._continues and self._may_continue(plans, self._policy_state)):
            drawn = self._plans
            self._start_planning()
            if are_drawn:
                self._plans = drawn

    def record_to(self, record: RunRecord | Observers | None) -> None:
        """Sets the record or the observers to which every step is written; None writes none."""
        self._record = record

    def sizes(self, step: int) -> Sizes:
        """Returns the samples of each worker in global step `step`, by rank.

        Plans are known ``lag - 1`` steps ahead. Where the work of samples is known, a plan divides
        the work of the step, and these are the samples that have it.

        Raises:
            LookupError: The plan of the step is not decided yet, or no longer stored.
            ValueError: The step cannot be divided within `Limits.maximum_work`.
        """
        return self._shares(step)[1].sizes

    def _shares(self, step: int) -> tuple[Sizes, StepShares]:
        """Returns the plan of a step, in mean samples, and what the workers do in it."""
        if step not in self._plans:
            raise LookupError(
                f"plans are known for steps {self.step} to {self.step + self.lag - 1}, not for "
                f"step {step}: a plan decided after step k applies to step k + {self.lag}"
            )
        plan, constraints = self._scaled(step, self._plans[step][0])
        order, in_order = self._order, self.step_of_order(step)
        if order is None or order.work is None or not order.is_drawn(in_order):
            return plan, StepShares(plan, plan)
        return plan, self._cut(in_order, plan, constraints)

    def _cut_by_work(self, in_order: int, plan: Sizes, constraints: BatchConstraints) -> StepShares:
        order = self._order
        assert order is not None
        assert order.work is not None
        limits = [  # the default maximum holds for the work: many small samples may have it
            replace(bounds, maximum=known.maximum)
            for bounds, known in zip(constraints.limits, self.known_limits, strict=True)
        ]
        return order.work.cut(order.indices(in_order), plan, limits, constraints.granularity)

    def report(
        self,
        busy_seconds: float,
        *,
        excluded: bool = False,
        stop: bool = False,
        preempted: bool = False,
        drivers: tuple[float, ...] = (),
    ) -> StepMessage:
        """Learns from the running step, predicts, and returns this worker's message.

        Args:
            busy_seconds: Busy time of this step; an invalid value is sent as 0 (rule 7).
            excluded: Whether the step is excluded from learning (the first of an epoch, a retrace).
            stop: Whether to ask all workers to stop after this step.
            preempted: Whether this worker must leave, so that all save a checkpoint.
            drivers: Driving factors known now, before the *next* step starts.

        Raises:
            LookupError: The cost shape is not a straight line, and `set_peers` was not called.
        """
        if not self._linear and self._peers[self.rank] == LINE:
            raise LookupError(
                f"the peers do not know the shape of {self.cost_shape.prior!r}: call set_peers() "
                "first"
            )
        shares = self._shares(self.step)[1]
        measured = self._measured(self.rank, shares, busy_seconds)
        before = self._drivers or drivers  # nothing was sampled before the first step
        self._drivers = drivers
        # In a short step the overhead has a larger share.
        excluded = excluded or self._is_short(self.step)
        self._estimate, accepted = self._estimator.learn(
            self._estimate,
            shares.work[self.rank],
            measured,
            before,
            excluded=excluded,
        )
        slope, overhead = self._forecast()
        busy_ns = round(busy_seconds * 1e9) if is_plausible(busy_seconds) else 0
        plan = checksum(self._policy_state.sizes)
        return StepMessage(
            slope,
            overhead,
            busy_ns,
            plan,
            stop=stop,
            # Whether a first use counts, all workers decide alike.
            excluded=excluded if self._is_new(self.rank, shares) else not accepted,
            preempted=preempted,
        )

    def revise(self, message: StepMessage, drivers: tuple[float, ...]) -> StepMessage:
        """Returns the message of the running step with a forecast from newer driving factors.

        Args:
            message: From `report`.
            drivers: Driving factors known now, before the *next* step starts.
        """
        self._drivers = drivers
        slope, overhead = self._forecast()
        return replace(message, picoseconds_per_sample=slope, overhead_nanoseconds=overhead)

    def receive(self, messages: Sequence[StepMessage], wall_seconds: float) -> None:
        """Ends the running step: decides the plan of ``step + lag`` from the messages.

        Args:
            messages: Messages of all workers by rank, the same on every worker.
            wall_seconds: Time from barrier to barrier, for the record.

        Raises:
            DisagreementError: A worker has computed a different plan.
        """
        self._check_plans(messages)
        busy = tuple(message.busy_nanoseconds / 1e9 for message in messages)
        costs = tuple(map(curve, messages, self._peers))
        ends = self._order is not None and self.step + 1 == self.epoch_end_step()
        plan, shares = self._shares(self.step)
        measured = [self._measured(rank, shares, seconds) for rank, seconds in enumerate(busy)]
        excluded = tuple(
            rank
            for rank, message in enumerate(messages)
            if message.excluded or measured[rank] is None
        )
        no_speeds = tuple(  # nor are seconds that are corrected
            rank
            for rank, message in enumerate(messages)
            if message.excluded or measured[rank] != busy[rank]
        )
        self._see_first_uses(plan, shares, busy, messages)
        self.stopping = any(message.stop for message in messages)
        self.preempted = any(message.preempted for message in messages)
        self._write(shares, busy, no_speeds, wall_seconds, costs)
        self._known = _by_name([message.drivers for message in messages])
        busy = tuple(t if s is None else s for t, s in zip(busy, measured, strict=True))
        if shares.work is not plan:
            busy = tuple(t * x / w for t, x, w in zip(busy, plan, shares.work, strict=True))
        known = self.first_uses if shares.work is plan else ()
        observation = Observation(self.step, plan, busy, excluded, costs, ends, known)
        constraints = self._next_constraints(busy, excluded)
        self._policy_state = self.policy.update(self._policy_state, constraints, observation)
        self._adopt(self.step + self.lag, self._policy_state.sizes, costs)
        self.step += 1

    def skip_to(self, step: int) -> None:
        """Skips to global step `step`; keeps the latest plan and the state of the predictor."""
        if step > self.step:
            latest = self._plans[self.step + self.lag - 1]
            self.step = step
            self._plans = dict.fromkeys(range(step, step + self.lag), latest)

    def epoch_end_step(self) -> int:
        """Returns the first global step after the running epoch of the order.

        Raises:
            LookupError: There is no order.
        """
        if self._order is None:
            raise LookupError("there are no epochs without an order: call use_order() first")
        per_epoch = self._order.steps_per_epoch
        done = (self.step - self._order_start) // per_epoch
        return self._order_start + (done + 1) * per_epoch

    def state(self) -> BalancerState:
        """Returns a state for `restore`, which can be pickled."""
        return BalancerState(
            self.step,
            self._order.snapshot(self.step_of_order(self.step)) if self._order else None,
            self._order_start,
            tuple(self._plans[step][0] for step in range(self.step, self.step + self.lag)),
            self.rank,
            self.predictor,
            self._policy_state,
            self._estimate,
            self._drivers,
            self.short_steps.state,
        )

    def restore(self, state: BalancerState, *, are_drawn: bool = False) -> None:
        """Continues from `state`, also with a longer lag; call it before the first step.

        The position in the order is restored for any number of workers. The plans are restored if
        this run's constraints allow them, such as a maximum that was lowered after a worker had
        run out of memory; the state of the predictor if the rank and the predictor are the same;
        and the time of steps for the same number of workers. `set_peers`, from which the memory of
        each worker is known, checks the plans again.

        Args:
            state: State of a balancer of the same job, or of one that it continues.
            are_drawn: Whether batches are drawn by the plans, which then stay in any case; the
                state must be of a balancer with the same options.
        """
        self.step = state.step
        self._order = order_of(state.order) if state.order else None
        self._order_start = state.order_start
        plans = [(self._policy_state.sizes, self._unknown)]
        if are_drawn or self._may_continue(state.plans, state.policy_state):
            self._policy_state = state.policy_state
            self._continues = state.step > 0
            plans = [(sizes, self._unknown) for sizes in state.plans]
        if state.rank == self.rank and state.predictor == self.predictor:
            self._estimate, self._drivers = state.estimate, state.drivers
        if state.short_steps is not None and len(state.policy_state.sizes) == self.workers:
            self.short_steps.state = state.short_steps
        self._plans = {state.step + i: plans[min(i, len(plans) - 1)] for i in range(self.lag)}

    def _forecast(self) -> tuple[int, int]:
        """Returns the predicted picoseconds per sample and nanoseconds of overhead."""
        return quantise(*self._estimator.predict(self._estimate, self._drivers, self.lag))

    def _measured(self, rank: int, shares: StepShares, busy_seconds: float) -> float | None:
        """Returns the seconds of the running step to learn from; None: it is a first use."""
        if not self._is_new(rank, shares):
            return busy_seconds
        known = self.first_uses[rank]
        return known.measured(shares.sizes[rank], busy_seconds, self._predicted(rank, shares))

    def _see_first_uses(
        self,
        plan: Sizes,
        shares: StepShares,
        busy_seconds: Sequence[float],
        messages: Sequence[StepMessage],
    ) -> None:
        """Notes the batch sizes of the running step, and what those that are new have cost."""
        self.first_uses = tuple(
            (known.retraced() if messages[rank].retraced else known)
            .after(
                shares.sizes[rank],
                busy_seconds[rank],
                self._predicted(rank, shares) if self._is_new(rank, shares) else None,
                excluded=messages[rank].excluded,
            )
            .ran(plan[rank], busy_seconds[rank])
            for rank, known in enumerate(self.first_uses)
        )

    def _is_new(self, rank: int, shares: StepShares) -> bool:
        """Returns whether the running step may be a costly first use of a worker."""
        known = self.first_uses
        return bool(known) and shares.sizes[rank] not in known[rank].sizes

    def _predicted(self, rank: int, shares: StepShares) -> float | None:
        """Returns the predicted seconds of a worker in the running step, unless it is short."""
        cost = None if self._is_short(self.step) else self._plans[self.step][1][rank]
        return None if cost is None else float(cost(shares.work[rank]))

    def _next_constraints(
        self, busy_seconds: Sequence[float], excluded: Sequence[int]
    ) -> BatchConstraints:
        """Returns the constraints of the next plan, by what has been run and how long it took."""
        constraints = self.constraints
        if self.first_uses and not self.policy.is_static:
            given = self._are_limits_given
            used = self._known.get(MEMORY_OF_GPU, (None,) * self.workers)
            constraints = bound_growth(
                constraints,
                self.first_uses,
                self._policy_state.sizes,
                [given or each.maximum is not None for each in self.known_limits],
                [x if shown else None for x, shown in zip(used, self._show_memory, strict=True)],
            )
        if not accepts_narrower_limits(self.policy):
            return constraints
        self.short_steps.observe(busy_seconds, excluded)
        return self.short_steps.narrow(constraints)

    def _start_planning(self) -> None:
        self._policy_state = self.policy.init(self.constraints)
        first = (self._policy_state.sizes, self._unknown)
        self._plans = dict.fromkeys(range(self.step, self.step + self.lag), first)

    def _may_continue(self, plans: Iterable[Sizes], policy_state: PolicyState) -> bool:
        """Returns whether restored plans satisfy the constraints, as far as they are known."""
        return all(map(self._required.allow, (*plans, policy_state.sizes)))

    def _check_plans(self, messages: Sequence[StepMessage]) -> None:
        for rank, message in enumerate(messages):
            if message.checksum != messages[0].checksum:
                raise DisagreementError(
                    f"at step {self.step} worker {rank} has a different plan than worker 0 "
                    f"(checksums {message.checksum} and {messages[0].checksum}; here the plan is "
                    f"{self._policy_state.sizes}): run the same lbbsp and Python on all workers"
                )

    def _adopt(self, step: int, sizes: Sizes, costs: Sequence[Cost | None]) -> None:
        self._plans[step] = (sizes, costs)
        del self._plans[step - self.lag]

    def _scaled(self, step: int, sizes: Sizes) -> tuple[Sizes, BatchConstraints]:
        """Returns the plan scaled down if the step is short (rule 6), and its constraints.

        Minima are then at most the number of parts, and sizes multiples of the largest divisor of
        the granularity for which that can be.
        """
        constraints = self.constraints if step >= self._drawn_until else self._drawn_constraints
        if not self._is_short(step):
            return sizes, constraints
        total, costs = self._total(step), [Proportional(max(size, 1)) for size in sizes]
        granularity = constraints.granularity
        if (grain := math.gcd(total, granularity)) > 1:
            roomy = self.parts > 1 and total >= granularity * self.workers
            try:  # a part may be split among devices as well
                short = _short(constraints, total, granularity if roomy else self.parts, grain)
                return short.plan(costs), short
            except ValueError:
                pass  # too few samples for multiples
        short = _short(constraints, total, self.parts)
        return short.plan(costs), short

    def _is_short(self, step: int) -> bool:
        return self._total(step) != self.constraints.global_batch_size

    def _total(self, step: int) -> int:
        """Returns X_k, the samples of global step `step`."""
        if self._order is None:
            return self.constraints.global_batch_size
        return self._order.size(self.step_of_order(step))

    def _write(
        self,
        shares: StepShares,
        busy_seconds: tuple[float, ...],
        excluded: tuple[int, ...],
        wall_seconds: float,
        forecasts: Sequence[Cost | None],
    ) -> None:
        if self._record is None:
            return
        line = StepLine(
            step=self.step,
            sizes=shares.sizes,
            busy_seconds=busy_seconds,
            predicted_seconds=tuple(self._predicted(rank, shares) for rank in range(self.workers)),
            wall_seconds=wall_seconds,
            even_seconds=even_seconds(shares.work, busy_seconds, forecasts),
            excluded=excluded,
            short=self._is_short(self.step),
            drivers=self._known,
            work=() if shares.work is shares.sizes else shares.work,
            stop=PREEMPTED if self.preempted else REQUESTED if self.stopping else None,
        )
        self._record.write(line)


def _short(
    constraints: BatchConstraints, total: int, minimum: int, granularity: int = 1
) -> BatchConstraints:
    limits = tuple(replace(old, minimum=minimum) for old in constraints.limits)
    return BatchConstraints(total, limits, granularity)


def _by_name(drivers: Sequence[Mapping[str, float]]) -> dict[str, tuple[float | None, ...]]:
    """Returns driving factors, given by rank, as values by rank of each name."""
    names = [name for name in FACTORS if any(name in known for known in drivers)]
    return {name: tuple(known.get(name) for known in drivers) for name in names}


def _within(limits: Limits, peer: PeerInfo, parts: int) -> Limits:
    """Returns a worker's limits, with the maximum that its memory allows for each part."""
    fitting = None if peer.max_batch is None else peer.max_batch * parts
    known = [bound for bound in (limits.maximum, fitting) if bound is not None]
    return replace(limits, maximum=min(known, default=None))
