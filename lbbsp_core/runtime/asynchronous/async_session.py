"""Training session of one worker whose peers need not be in the same step.

It is the counterpart of `lbbsp_core.runtime.loop.session` for SSP, ASP, DSSP and ElasticBSP. A
coordinator on a server (`coordinator.py`) decides which workers proceed and assigns the samples.
The session measures, predicts, asks the coordinator (`client.py`), and pushes gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from lbbsp_core._version import __version__
from lbbsp_core.cost import Cost
from lbbsp_core.cost.online import CostShape
from lbbsp_core.measure import PartTimer
from lbbsp_core.order import SampleStream
from lbbsp_core.policy import BatchConstraints, Even, FirstUses, Policy
from lbbsp_core.predict.estimator import SpeedEstimator
from lbbsp_core.registry import SYNCHRONISERS
from lbbsp_core.reserve import CLAIM_SECONDS, SLOW_CLAIM_SECONDS, PartCosts, mode_of
from lbbsp_core.runtime.asynchronous.client import Client, Servers
from lbbsp_core.runtime.asynchronous.coordination import (
    Answer,
    CoordinatorService,
    Question,
    report_integers,
)
from lbbsp_core.runtime.asynchronous.coordinator import Coordinator
from lbbsp_core.runtime.asynchronous.reserves import PartsReport, Reserves
from lbbsp_core.runtime.exchange import protocol
from lbbsp_core.runtime.exchange.handshake import Identity
from lbbsp_core.runtime.exchange.protocol import LINE, PeerInfo, StepMessage, fingerprint
from lbbsp_core.runtime.options.naming import described, limits_by_rank, read_cost, read_predictor
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.planning.bounds import FIXED, BatchBounds, Situation, last, narrow
from lbbsp_core.runtime.planning.running_step import StepMeter
from lbbsp_core.runtime.record.record import run_header
from lbbsp_core.runtime.record.writer import open_record
from lbbsp_core.sync.base import Synchroniser, ends_together
from lbbsp_core.work import require_work

logger = logging.getLogger("lbbsp.session")


class AsyncSession:
    """Runs one worker's side of training with a synchroniser; every worker of the job runs one.

    Args:
        servers: Parameter servers of the framework.
        sync: Decides which workers wait for which; an object or its name.
        global_batch_size: X, the samples in one batch of each of the N workers.
        options: Options of the user; the policy defaults to `Even`.
        framework: Name of the framework, for the run record.
        versions: Versions of the framework's packages, for the run record.
        facts: Further facts, as text, that must be the same on all workers.
        share_work: See `lbbsp_mx.AsyncTrainer`.
        devices: Devices of this process as short texts, for the run record.

    Raises:
        ValueError: The options cannot be satisfied, exclude each other, or have no effect here.
    """

    def __init__(
        self,
        servers: Servers,
        sync: Synchroniser | str,
        global_batch_size: int,
        options: SessionOptions,
        *,
        framework: str,
        versions: Mapping[str, str],
        facts: str,
        share_work: bool | str | float = False,
        devices: Sequence[str] = (),
    ) -> None:
        sharing = mode_of(share_work)
        options.check_asynchronous(servers.rank)
        self.servers, self.options = servers, options
        self._client = Client(servers)
        self.sync = SYNCHRONISERS.resolve(sync)
        if sharing and not ends_together(self.sync):
            raise ValueError(
                "share_work needs a sync under which all workers end an iteration together, got "
                f"sync={self.sync!r}: use BSP(), or leave share_work out"
            )
        self._sharing = sharing if servers.workers > 1 else 0
        self.policy = policy = options.choose_policy(Even(), rank=servers.rank)
        self.constraints = _constraints(options, policy, global_batch_size, servers.workers)
        shape = _cost_shape(options, global_batch_size, servers.workers)
        predictor = read_predictor(options.predictor) if policy.uses_costs else None
        self._estimator = SpeedEstimator(predictor, shape)
        self._estimate = self._estimator.init()
        self._first_uses = FirstUses()
        self._forecast: Cost | None = None
        self._drivers: tuple[float, ...] = ()
        self._costs, self._claim_seconds = PartCosts(), CLAIM_SECONDS
        self._overhead = 0.0  # of an iteration, in samples
        chosen = f"{described(self.sync)} {self.constraints} {described(policy)} {self._sharing}"
        self._facts = f"{__version__} {chosen}, {facts}"
        self._claims: list[int] = []  # samples of the batches that are drawn
        self._limit = 0
        self._part: tuple[int, int] | None = None  # that has been claimed, and not yet drawn
        self._parts: PartTimer | None = None  # of the running iteration, if it has a reserve
        self._data_sets = 0
        self._iterations = self._updates_seen = 0
        self._departed = False
        self._record_path = options.record_path() if servers.rank == 0 else None
        self._identity = Identity.here(devices)
        self._framework, self._versions = framework, versions
        self._meter = StepMeter()
        self._meter.open(options.choose_drivers(policy))

    def make_service(self) -> CoordinatorService:
        """Creates the service that worker 0 sends to the server, together with the optimizer."""
        grain = self.constraints.granularity
        coordinator = Coordinator(
            self.sync,
            self.constraints,
            self.policy,
            logs=self._record_path is not None,
            is_known=[self.options.limits is not None] * self.servers.workers,
            reserves=Reserves(self._sharing, grain) if self._sharing else None,
        )
        return CoordinatorService(coordinator, fingerprint(self._facts))

    def start(self) -> None:
        """Starts the training; the service must be running.

        Worker 0 waits for the others if it records the run, because the record names their hosts.
        """
        self._client.send_identity(self._identity)
        self._client.compare(0, self._facts)
        if self._record_path is not None:
            names = self._client.identities()
            header = run_header(
                self._framework,
                workers=self.servers.workers,
                global_batch_size=self.constraints.global_batch_size,
                versions=self._versions,
                seed=self.options.seed,
                sync=self.sync,
                policy=self.policy,
                predictor=self._estimator.predictor,
                hosts=[identity.host for identity in names],
                devices=[identity.device(rank) for rank, identity in enumerate(names)],
            )
            self._client.record = open_record(self._record_path, header)

    def use_samples(
        self, num_samples: int, seed: int | None = None, shuffle: bool = True
    ) -> SampleStream:
        """Returns the order of the samples; checks that it is the same on all workers."""
        seed = self.options.seed if seed is None else seed
        stream = SampleStream(num_samples, seed, shuffle)
        self._data_sets += 1
        order = f"{num_samples} samples with the seed {seed}" + ", in order" * (not shuffle)
        self._client.compare(self._data_sets, order)
        return stream

    def exclude_step(self) -> None:
        """Excludes the running iteration from learning, because it contains other work."""
        self._meter.exclude_step()

    def begin_epoch(self) -> None:
        """Starts an iteration over the data, and drops batches that were drawn but not used."""
        self._claims.clear()
        self.exclude_step()

    def claim(self, limit: int, first: int = 0) -> tuple[int, int]:
        """Claims samples before `limit`: positions of the first and after the last.

        Those before position `first`, which are of other data, are dropped.
        """
        part, self._part, self._limit = self._part, None, limit
        if part is None:
            with self._meter.excluded_wait():
                iteration = self._iterations + len(self._claims)
                answer = self._client.ask(Question.CLAIM, limit, iteration, first)
            part = answer.first, answer.second
        begin, end = part
        if end > begin:
            self._claims.append(end - begin)
        return part

    @property
    def is_ahead(self) -> bool:
        """Whether batches were assigned that have had no step yet."""
        return bool(self._claims)

    def must_end_step(self) -> bool:
        """Returns whether `end_step` must follow without samples, where a worker stops drawing.

        It ends an iteration of which this worker has computed a part, and drops the part that was
        claimed next; or it takes part in one of the others in which no samples are left for this.
        """
        if self._parts is not None:
            self._parts.drop()
            self._part = None
            self._claims.clear()
            return True
        question = Question.AWAITED, self._iterations, self._limit
        return ends_together(self.sync) and bool(self._client.ask(*question).first)

    def claim_part(self, samples: int) -> bool:
        """Claims a part of the running iteration, when a batch of `samples` of it is computed.

        Call `check_batch` before. Returns whether there is one: `claim` returns it next, and the
        iteration goes on.
        """
        if self._parts is None:
            is_ahead = len(self._claims) > 1  # what comes next belongs to the next iteration
            if is_ahead or not self._client.answer.reserve:
                return False
            self._parts = PartTimer(samples, self._meter.elapsed)

        def ask(_: float) -> tuple[int, int]:
            answer = self._client.ask(Question.CLAIM_PART, self._limit)
            return answer.first, answer.second

        begin, end = self._parts.claim(ask if self._client.answer.reserve else None)
        if begin < end:
            self._part = begin, end
            del self._claims[0]
        return begin < end

    def check_batch(self, samples: int) -> None:
        """Checks that a batch of `samples` was drawn and is the next one to be pushed."""
        if self._departed or not self._claims or self._claims[0] != samples:
            raise ValueError(
                f"step must be called once for each batch that was drawn, with its number of "
                f"samples ({self._claims[0] if self._claims else 'no batch is drawn'}), got "
                f"{samples!r}: draw batches by trainer.batch_sampler(...)"
            )

    def end_step(self, samples: int) -> None:
        """Pushes the gradients of an iteration, and waits until this worker may proceed.

        Call `claim_part` before; `samples` are those that were passed to it last. Without samples,
        this worker takes part in an iteration of the others, see `must_end_step`.
        """
        busy_seconds, drivers, _ = self._meter.reach()
        if not samples:
            self.exclude_step()
        shared = self._parts_report(samples, busy_seconds)
        if self._parts is not None:
            samples = self._parts.samples
            busy_seconds = self._parts.seconds_of(samples, self._overhead, shared.part_overhead)
        slope, overhead, excluded = self._learn(samples, busy_seconds, drivers)
        self._overhead = 1e3 * overhead / max(slope, 1)
        times = round(busy_seconds * 1e9), slope, overhead
        report = (samples, *times, self._updates_seen, int(excluded), *report_integers(shared))
        if not self.sync.keeps_pushes:
            self.servers.push_gradients(to_sum=False)
        kept = bool(self._client.ask(Question.PUSH, *report).first)
        if kept or self.sync.keeps_pushes:
            self.servers.push_gradients(to_sum=kept)
        self._update_if_complete(self._client.ask(Question.ENTERED))
        del self._claims[:1]
        self._parts = None
        self._iterations += 1
        self._client.wait_for(lambda answer: answer.released > self._iterations, "to be released")

    def begin_read(self) -> int:
        """Returns, and stores, the number of updates in the model that is about to be read."""
        self._updates_seen = self._client.answer.updates
        return self._updates_seen

    def end_read(self) -> None:
        """Starts the next iteration; call it when the model has been read."""
        wall_seconds, _ = self._meter.leave()
        logger.debug("iteration %d took %.4f s, waits included", self._iterations, wall_seconds)
        self._client.drain()

    def depart(self) -> None:
        """Leaves the training, so that no worker waits for this one; later calls do nothing."""
        if not self._departed:
            self._departed = True
            self._update_if_complete(self._client.ask(Question.FINISH))

    def finish(self) -> None:
        """Leaves the training, and waits until all workers have left."""
        self.depart()
        self._client.wait_for(lambda answer: not answer.active, "for all to finish")

    def close(self) -> None:
        """Closes the run record; call it when the final model has been read."""
        self._client.close()

    def _parts_report(self, samples: int, busy_seconds: float) -> PartsReport:
        """Returns what is told of sharing in an iteration; learns what parts cost."""
        parts, count, is_slow = self._parts, 0, False
        if parts is not None:
            samples, busy_seconds, count = parts.samples, parts.seconds, parts.parts
            is_slow = any(wait > SLOW_CLAIM_SECONDS for wait in parts.waits)
            self._claim_seconds = parts.mean_wait(self._claim_seconds)
            for part in parts.paced(self._overhead):
                self._costs = self._costs.after(*part)
        can_share = not (is_slow or len(self._claims) > 1)
        pace = busy_seconds / max(self._overhead + samples, 1)
        overhead = self._costs.overhead(pace)
        return PartsReport(
            count, busy_seconds, self._overhead, overhead, self._claim_seconds, can_share
        )

    def _learn(
        self, samples: int, busy_seconds: float, drivers: tuple[float, ...]
    ) -> tuple[int, int, bool]:
        """Learns from an iteration; returns the predicted cost of the next one as integers.

        Also returns whether the coordinator must not learn from it; whether a first use counts it
        decides by itself.
        """
        before, self._drivers = self._drivers or drivers, drivers
        excluded = self._meter.take_excluded()
        forecast = None if self._forecast is None else float(self._forecast(samples))
        use = samples, busy_seconds, forecast
        measured: float | None = busy_seconds
        if self._parts is None:  # else of batches of several sizes
            measured = self._first_uses.measured(*use)
        self._estimate, accepted = self._estimator.learn(
            self._estimate, samples, measured, before, excluded=excluded
        )
        excluded = excluded or (measured is not None and not accepted)
        if self._parts is None:
            self._first_uses = self._first_uses.after(*use, excluded=excluded)
        slope, overhead = protocol.quantise(*self._estimator.predict(self._estimate, drivers))
        self._forecast = protocol.curve(StepMessage(slope, overhead, 0, 0))
        return slope, overhead, excluded

    def _update_if_complete(self, answer: Answer) -> None:
        """Updates the model by a sum that this worker has completed, by the answer.

        If all workers end an iteration together, the model moves by the mean over its samples, also
        where they are fewer than X.
        """
        if answer.first:
            is_mean = answer.second and ends_together(self.sync)
            total = self.constraints.global_batch_size
            self.servers.apply_sums(total / answer.second if is_mean else 1.0)
            self._client.ask(Question.APPLIED)


def _constraints(
    options: SessionOptions, policy: Policy, global_batch_size: int, workers: int
) -> BatchConstraints:
    """Returns what batch sizes must satisfy, with the bounds by default."""
    limits = limits_by_rank(options.limits, workers)
    now = Situation(
        policy,
        (PeerInfo(LINE),) * workers,
        are_limits_given=options.limits is not None,
        bounds=BatchBounds(default_maximum=True),
    )
    constraints = BatchConstraints(global_batch_size, limits, options.granularity or 1)
    constraints = last(narrow(constraints, now, FIXED))
    require_work(None, constraints.limits, global_batch_size)
    return constraints


def _cost_shape(options: SessionOptions, global_batch_size: int, workers: int) -> CostShape:
    """Returns the shape of a worker's cost; raises ValueError if it is no straight line."""
    shape = CostShape.from_cost(read_cost(options.cost), global_batch_size, workers)
    if shape.marginal_segments() != LINE:
        raise ValueError(
            f"cost must be a straight line (Proportional, Affine), got {shape.prior!r}: "
            "the coordinator plans by an overhead and a slope"
        )
    return shape
