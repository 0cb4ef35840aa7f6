"""One worker's side of training in which workers need not be in step.

The counterpart of `lbbsp_core.runtime.session` for SSP, ASP, DSSP and ElasticBSP: a coordinator
on a server (`lbbsp_core.runtime.coordinator`) decides who proceeds and deals out the samples; the
session measures, predicts, asks it, waits for its answers and records the pushes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from lbbsp_core.cost.online import CostShape
from lbbsp_core.policy import BatchConstraints, Even
from lbbsp_core.predict import Mixture
from lbbsp_core.predict.estimator import SpeedEstimator
from lbbsp_core.runtime.coordination import (
    Answer,
    CoordinatorService,
    Question,
    Table,
    log_request,
    question_table,
    read_log,
)
from lbbsp_core.runtime.coordinator import Coordinator
from lbbsp_core.runtime.options import SessionOptions
from lbbsp_core.runtime.protocol import (
    LINE,
    DisagreementError,
    fingerprint,
    quantise,
    unpack,
)
from lbbsp_core.runtime.record import (
    PushLog,
    RunHeader,
    all_versions,
    open_record,
    run_header,
)
from lbbsp_core.runtime.step_meter import StepMeter
from lbbsp_core.sync import Synchroniser
from lbbsp_core.types import training_limits

logger = logging.getLogger("lbbsp.session")

_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.005
"""Between two reads of the coordinator's answers."""


class Servers(Protocol):
    """A framework's parameter servers, as an asynchronous session needs them."""

    rank: int
    workers: int

    def ask(self, table: Table) -> None:
        """Pushes a table of questions, see `lbbsp_core.runtime.coordination`."""
        ...

    def read_answers(self) -> Table:
        """Pulls the table of answers."""
        ...

    def exchange_log(self, table: Table) -> Table:
        """Pushes a request for the log, and pulls what answers it."""
        ...

    def push_gradients(self, *, to_sum: bool) -> None:
        """Pushes this worker's gradients into the model, or into the sum of those kept."""
        ...

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Bounds the time spent inside the context, a wait for others."""
        ...


class AsyncSession:
    """Runs one worker's side of training with a synchroniser; every worker of the job runs one.

    Args:
        servers: Of the framework.
        sync: Decides who waits for whom.
        global_batch_size: X, the samples of N batches.
        options: As the user gave them; the policy defaults to `Even`.
        framework: Its name, for the run record.
        versions: Versions of the framework's packages, for the run record.
        facts: What must be the same on all workers beside the options, as text.

    Raises:
        ValueError: Options that cannot be satisfied, or that do not go together.
    """

    def __init__(
        self,
        servers: Servers,
        sync: Synchroniser,
        global_batch_size: int,
        options: SessionOptions,
        *,
        framework: str,
        versions: Mapping[str, str],
        facts: str,
    ) -> None:
        self.servers = servers
        self.sync = sync
        self.options = options
        self.policy = options.choose_policy(Even())
        workers = servers.workers
        cost_shape = CostShape.from_cost(options.choose_cost(), global_batch_size, workers)
        if cost_shape.marginal_segments() != LINE:
            raise ValueError(
                f"cost must be a straight line (Proportional, Affine), got {cost_shape.prior!r}: "
                "the coordinator plans by an overhead and a slope"
            )
        predictor = (options.predictor or Mixture()) if self.policy.uses_costs else None
        self._estimator = SpeedEstimator(predictor, cost_shape)
        self._estimate = self._estimator.init()
        self._drivers: tuple[float, ...] = ()
        limits = training_limits(options.limits, workers)
        self.constraints = BatchConstraints(global_batch_size, limits, options.granularity)
        self._framework, self._versions = framework, versions
        version = all_versions({})["lbbsp"]
        self._facts = [f"{version} {sync} {self.constraints} {self.policy}, {facts}"]
        self._answer = Answer()
        self._asked = 0
        self._claims: list[int] = []
        self._iterations = 0
        self._updates_seen = 0
        self._departed = False
        self._logged = 0
        self._log: PushLog | None = None
        self._record_path = options.record_path() if servers.rank == 0 else None
        self._meter = StepMeter()
        self._meter.open(options.choose_drivers(self.policy))

    def make_service(self) -> CoordinatorService:
        """Makes what runs on the server: worker 0 hands it over, with the optimizer."""
        logs = self._record_path is not None
        coordinator = Coordinator(self.sync, self.constraints, self.policy, logs=logs)
        return CoordinatorService(coordinator, fingerprint(self._facts[0]))

    def start(self) -> None:
        """Starts the training, once the service runs.

        Raises:
            DisagreementError: Another worker was started with other options.
        """
        self._compare(0)

    def use_samples(self, num_samples: int) -> None:
        """Compares the data set among the workers.

        Raises:
            DisagreementError: Another worker has another length or seed.
        """
        self._facts.append(f"{num_samples} samples with the seed {self.options.seed}")
        self._compare(len(self._facts) - 1)

    def exclude_step(self) -> None:
        """Excludes the running iteration from what is learned: it holds work that others do not."""
        self._meter.exclude_step()

    def begin_epoch(self) -> None:
        """Starts an iteration over the data: batches that were drawn and not used are dropped."""
        self._claims.clear()
        self.exclude_step()

    def claim(self, limit: int) -> tuple[int, int]:
        """Claims the next samples for this worker, by position, up to position `limit`."""
        with self._meter.excluded_wait():
            answer = self._ask(Question.CLAIM, limit)
        if answer.second > answer.first:
            self._claims.append(answer.second - answer.first)
        return answer.first, answer.second

    def check_batch(self, samples: int) -> None:
        """Checks that a batch of `samples` was drawn and is the next one to be pushed.

        Raises:
            ValueError: It was not.
        """
        if self._departed or not self._claims or self._claims[0] != samples:
            raise ValueError(
                f"step must be called once for each batch that was drawn, with its samples "
                f"({self._claims[:1] or 'none drawn'}), got {samples!r}: draw batches by "
                "trainer.batch_sampler(...)"
            )

    def end_step(self, samples: int) -> None:
        """Pushes the gradients of an iteration, and waits until this worker may proceed.

        Args:
            samples: Of its batch; the gradients have been computed.
        """
        self.check_batch(samples)
        busy_seconds, drivers = self._meter.reach()
        said = (samples, round(busy_seconds * 1e9), *self._predict(samples, busy_seconds, drivers))
        if not self.sync.keeps_pushes:
            self.servers.push_gradients(to_sum=False)
        kept = bool(self._ask(Question.PUSH, *said, self._updates_seen).first)
        if kept or self.sync.keeps_pushes:
            self.servers.push_gradients(to_sum=kept)
        self._update_if(self._ask(Question.ENTERED).first)
        del self._claims[0]
        self._iterations += 1
        self._wait_for(lambda answer: answer.released > self._iterations, "to be released")

    def begin_read(self) -> None:
        """Notes how many updates the model has had: this worker is about to read it."""
        self._updates_seen = self._answer.updates

    def end_read(self) -> None:
        """Leaves the barrier: the model has been read, the next iteration starts."""
        wall_seconds = self._meter.leave()
        logger.debug("iteration %d took %.4f s with its waits", self._iterations, wall_seconds)
        self._drain()

    def depart(self) -> None:
        """Leaves the training, so that no worker waits for this one; once is enough."""
        if not self._departed:
            self._departed = True
            self._update_if(self._ask(Question.FINISH).first)

    def finish(self) -> None:
        """Departs, and waits until all workers have."""
        self.depart()
        self._wait_for(lambda answer: not answer.active, "for all to finish")

    def close(self) -> None:
        """Closes the run record; the final model has been read."""
        self._drain()
        self._record_path = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _predict(
        self, samples: int, busy_seconds: float, drivers: tuple[float, ...]
    ) -> tuple[int, int]:
        """Learns from an iteration. Returns the predicted curve of the next one in integers."""
        before, self._drivers = self._drivers or drivers, drivers
        self._estimate, _ = self._estimator.learn(
            self._estimate, samples, busy_seconds, before, excluded=self._meter.take_excluded()
        )
        return quantise(*self._estimator.predict(self._estimate, drivers))

    def _update_if(self, last: int) -> None:
        """Updates the model by the sum, if this worker's gradient was the last one missing."""
        if last:
            self.servers.push_gradients(to_sum=False)  # their values are not read
            self._ask(Question.APPLIED)

    def _compare(self, fact: int) -> None:
        mine = self._facts[fact]
        if self._ask(Question.COMPARE, fact, fingerprint(mine)).first != fingerprint(mine):
            raise DisagreementError(
                f"workers disagree on sync, batches, policy, parameters or samples: worker "
                f"{self.servers.rank} has {mine}, and another something else; start all with the "
                "same"
            )

    def _ask(self, question: Question, *values: int) -> Answer:
        """Asks the coordinator, and waits for its answer."""
        self._asked += 1
        servers = self.servers
        rank, workers = servers.rank, servers.workers
        servers.ask(question_table(workers, rank, question, self._asked, list(values)))
        return self._wait_for(lambda answer: answer.number == self._asked, "for the coordinator")

    def _wait_for(self, done: Callable[[Answer], bool], what: str) -> Answer:
        pause = _FIRST_PAUSE_SECONDS
        with self.servers.waiting(what):
            while True:
                row = self.servers.read_answers()[self.servers.rank]
                self._answer = Answer(*unpack(row))
                if done(self._answer):
                    return self._answer
                self._drain()
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _drain(self) -> None:
        """Records, on rank 0, what has been pushed since the last time."""
        if self._record_path is None:
            return
        if self._log is None and not self._departed:
            self._log = PushLog(open_record(self._record_path, self._header()))
        while self._log is not None and self._logged < self._answer.pushes:
            for line in read_log(self.servers.exchange_log(log_request(self._logged))):
                self._log.add(line)
                self._logged += 1

    def _header(self) -> RunHeader:
        return run_header(
            self._framework,
            workers=self.servers.workers,
            global_batch_size=self.constraints.global_batch_size,
            versions=self._versions,
            seed=self.options.seed,
            sync=self.sync,
            policy=self.policy,
            predictor=self._estimator.predictor,
        )
