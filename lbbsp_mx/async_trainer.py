"""Workers that need not be in step: `AsyncTrainer`, on MXNet's ``dist_async``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon

from lbbsp_core import BusyTimer, CostShape, Limits, ResourceSampler, __version__
from lbbsp_core.cost import Cost, Proportional
from lbbsp_core.order import SampleStream
from lbbsp_core.policy import BatchConstraints, Even, Policy
from lbbsp_core.predict import Mixture, Predictor
from lbbsp_core.predict.estimator import SpeedEstimator
from lbbsp_core.runtime import handshake
from lbbsp_core.runtime.coordinator import Coordinator
from lbbsp_core.runtime.env import run_dir
from lbbsp_core.runtime.protocol import LINE, DisagreementError, fingerprint, pack, quantise, unpack
from lbbsp_core.sync import BSP, ElasticBSP, Synchroniser
from lbbsp_core.types import training_limits
from lbbsp_mx import cluster, env
from lbbsp_mx.native import process
from lbbsp_mx.parameters import as_created, require_dense
from lbbsp_mx.server_optimizer import (
    APPLIED,
    CLAIM,
    COMPARE,
    ENTERED,
    FINISH,
    LINES,
    LOGGED,
    PUSH,
    WIDTH,
    Answer,
    Keys,
    ServerOptimizer,
)

_LONGEST_PAUSE = 0.005
"""Seconds between two looks at whether a worker may go on."""

logger = logging.getLogger("lbbsp")


class AsyncTrainer(gluon.Trainer):
    """Trains a gluon network on workers that need not be in step: SSP, ASP, DSSP, ElasticBSP.

    The optimizer runs on MXNet's parameter servers (``dist_async``), where each push enters the
    model on arrival; beside it runs a coordinator, which drives the very synchroniser that
    `lbbsp simulate` does, deals out the samples, and asks the policy for batch sizes. With `BSP`,
    and at the barriers of `ElasticBSP`, pushes are kept and enter together, as one update.

    A push of x samples moves the model by ``x / X`` of a step by their mean gradient, so that
    under plain SGD a scheme learns as much from as many samples as any other. (Adam and its kin
    make a whole step of every push, and weight decay and momentum act at every push.) For exact
    learning, and for speed where nobody needs to run ahead, use `lbbsp_mx.Trainer`.

    Without ``DMLC_*`` there is one worker, which trains in this process.

    Args:
        params: Parameters of the network, all initialised.
        optimizer: Name or object of the optimizer. Learning rates change by its ``lr_scheduler``,
            which counts pushes.
        optimizer_params: Its options.
        sync: Who waits for whom: `SSP`, `ASP`, `DSSP`, `ElasticBSP` or `BSP`; alike everywhere.
        global_batch_size: X, the samples of N batches.
        policy: Sizes of the batches: `Even`, `FixedShares`, or `LoadBalanced` for LB + SSP and
            its kin, asked whenever all have pushed once more. Defaults to `Even`.
        predictor: Forecasts this worker's speed, for such a policy. Defaults to `Mixture()`.
        cost: Shape of this worker's batch-time curve, a straight line. Defaults to
            `Proportional()`.
        limits: Bounds on a worker's batch, one for all or one each.
        granularity: Batch sizes are multiples of it.
        record: File for the run record, a line a push, written by rank 0. Defaults to none, or to
            ``RUN_DIR/run.jsonl`` under ``lbbsp launch --run-dir``.
        seed: Seed of the sample order.
        drivers: Names of the driving factors that the predictor is told of.
        wait_seconds: How long an iteration may wait for others, or for a server.

    Raises:
        ValueError: Options that cannot be satisfied, or that do not go together.

    Example::

        trainer = lbbsp_mx.AsyncTrainer(net.collect_params(), "sgd", sync=SSP(3),
                                        global_batch_size=256)
        loader = gluon.data.DataLoader(
            dataset, batch_sampler=trainer.batch_sampler(len(dataset), epochs=5))
        for x, y in loader:
            with autograd.record():
                loss = loss_fn(net(x), y)
            loss.backward()
            trainer.step(x.shape[0])
        trainer.finish()                      # waits for the others, and reads the final model
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        *,
        sync: Synchroniser,
        global_batch_size: int,
        policy: Policy | None = None,
        predictor: Predictor | None = None,
        cost: Cost | CostShape | None = None,
        limits: Limits | Sequence[Limits] | None = None,
        granularity: int = 1,
        record: str | Path | None = None,
        seed: int = 0,
        drivers: Sequence[str] | None = None,
        wait_seconds: float = 1800.0,
    ) -> None:
        params = list(as_created(params))
        _check(params)
        if cluster.in_cluster() and process().serves_optimizer:
            raise ValueError(
                "a process can have one AsyncTrainer in a cluster, and this is the second: the "
                "servers run one optimizer; use another job, or one trainer for all parameters"
            )
        process().serves_optimizer = True
        super().__init__(params, optimizer, optimizer_params, None, None, False)
        self._native = process().native("dist_async" if cluster.in_cluster() else "local", 120.0)
        self.rank, self.num_workers = self._native.rank, self._native.num_workers
        self.seed = seed
        self.wait_seconds = wait_seconds
        policy = policy or Even()
        shape = CostShape.from_cost(cost or Proportional(), global_batch_size, self.num_workers)
        if shape.marginal_segments() != LINE:
            raise ValueError(
                f"cost must be a straight line (Proportional, Affine), got {shape.prior!r}: the "
                "coordinator plans by an overhead and a slope"
            )
        self._sync, self._keeps = sync, isinstance(sync, BSP | ElasticBSP)
        used = (predictor or Mixture()) if policy.uses_costs else None
        self._forecaster = SpeedEstimator(used, shape)
        self._known = self._forecaster.init()
        self._sampler = ResourceSampler(drivers if policy.uses_costs else ())
        self._drivers: tuple[float, ...] = ()
        each = training_limits(limits, self.num_workers)
        self._cluster = BatchConstraints(global_batch_size, each, granularity)
        self._policy = policy
        shapes = [tuple(param.shape) for param in params]
        self._facts = [f"{__version__} {sync} {self._cluster} {policy}, parameters of {shapes}"]
        self._learning = [i for i, param in enumerate(params) if param.grad_req != "null"]
        self._answer = Answer()
        self._asked = 0
        self._claims: list[int] = []
        self._iterations = 0
        self._seen = 0
        self._left = False
        self._excluded = True
        self._logged = 0
        self._record: Any = None
        self._record_path = Path(record) if record else run_dir()
        self._timer = BusyTimer()
        self._serve()
        process().endings.append(self._leave)
        self._warn(params)

    def batch_sampler(self, num_samples: int, epochs: int = 1) -> StreamSampler:
        """The ``batch_sampler`` of the training's DataLoader; every worker the same.

        The samples are dealt out as the workers come for them: each comes once an epoch, and a
        fast worker gets more of them. What a worker has drawn when it leaves an iteration
        half-way is dropped.

        Args:
            num_samples: Length of the whole data set.
            epochs: How many of its epochs one iteration of the loader covers.
        """
        self._facts.append(f"{num_samples} samples with the seed {self.seed}")
        self._compare(len(self._facts) - 1)
        return StreamSampler(self, SampleStream(num_samples, self.seed), epochs)

    def exclude_step(self) -> None:
        """The running iteration is not like others: nothing is learned from its time."""
        self._excluded = True

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Pushes this worker's gradient, waits until it may go on, and reads the model.

        Args:
            batch_size: Samples of the batch, as drawn.
            ignore_stale_grad: Ignored.

        Raises:
            ValueError: Another batch size than what was drawn.
        """
        self._refuse_changes()
        if self._left or not self._claims or self._claims[0] != batch_size:
            raise ValueError(
                f"step must be called once for each batch that was drawn, with its samples "
                f"({self._claims[:1] or 'none drawn'}), got {batch_size!r}: draw batches by "
                "trainer.batch_sampler(...)"
            )
        gradients = [self._params[i].list_grad() for i in self._learning]
        _wait(gradients)
        busy_seconds = self._timer.reach()
        told = (batch_size, round(busy_seconds * 1e9), *self._forecast(batch_size, busy_seconds))
        if not self._keeps:
            self._push(self._learning, gradients)
        if self._ask(PUSH, *told, self._seen).first:
            self._push([self._keys.sums + i for i in self._learning], gradients)
        elif self._keeps:
            self._push(self._learning, gradients)
        self._update_if(self._ask(ENTERED).first, gradients)
        del self._claims[0]
        self._iterations += 1
        self._wait_for(lambda answer: answer.released > self._iterations, "to be released")
        self._read()
        self._drain()

    def finish(self) -> None:
        """Leaves, so that nobody waits for this worker; waits for all; reads the final model."""
        self._leave()
        self._wait_for(lambda answer: not answer.present, "for all to finish")
        self._read()
        self._drain()
        if self._record is not None:
            self._record.close()
            self._record = None

    def set_learning_rate(self, lr: float) -> None:
        """Refused: the optimizer is on the servers.

        Raises:
            ValueError: Always; says what to do.
        """
        raise ValueError(
            f"the learning rate cannot become {lr!r} here, the optimizer runs on the servers: "
            "give it an lr_scheduler, which counts pushes"
        )

    def allreduce_grads(self) -> None:
        """Refused: nothing is summed over workers here.

        Raises:
            ValueError: Always; says what to do.
        """
        raise ValueError("gradients enter the model by step() only: call trainer.step(batch_size)")

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Refused, as `allreduce_grads` is."""
        self.allreduce_grads()

    def save_states(self, fname: str) -> None:
        """Refused: the optimizer's state is on the servers.

        Raises:
            ValueError: Always; says what to do.
        """
        raise ValueError(
            f"the optimizer's state is on the servers, and cannot be saved to {fname!r}: save the "
            "parameters (net.save_parameters), or train by lbbsp_mx.Trainer"
        )

    def load_states(self, fname: str) -> None:
        """Refused, as `save_states` is."""
        self.save_states(fname)

    def drop_claims(self) -> None:
        """A new iteration of the loader begins: what the last one drew and left is dropped."""
        self._claims.clear()

    def claim(self, limit: int) -> tuple[int, int]:
        """The next samples for this worker, by position, up to position `limit`."""
        self._timer.pause()
        answer = self._ask(CLAIM, limit)
        self._timer.resume()
        if answer.second > answer.first:
            self._claims.append(answer.second - answer.first)
        return answer.first, answer.second

    # Parts of the above.

    def _serve(self) -> None:
        """Hands the model, the optimizer and the coordinator to the servers; all workers must."""
        servers = int(env.cluster().get("DMLC_NUM_SERVER", 1))
        self._keys = Keys(len(self._params), servers)
        values = {i: p.data(self._contexts[0]) for i, p in enumerate(self._params)}
        if self._keeps:
            values |= {self._keys.sums + i: mx.nd.zeros_like(values[i]) for i in self._learning}
        values[self._keys.questions] = mx.nd.zeros((self.num_workers, 2 * WIDTH))
        values[self._keys.log] = mx.nd.zeros((1 + LINES, 2 * LOGGED))
        with self._waiting("for all to hand over the model"):
            self._native.init(list(values), list(values.values()))
        if self.rank == 0:
            optimizer = self._optimizer
            optimizer.rescale_grad = self._scale / self._cluster.global_batch_size
            optimizer.set_lr_mult({i: p.lr_mult for i, p in enumerate(self._params)})
            optimizer.set_wd_mult({i: p.wd_mult for i, p in enumerate(self._params)})
            logs = self._record_path is not None
            coordinator = Coordinator(self._sync, self._cluster, self._policy, logs=logs)
            served = ServerOptimizer(
                optimizer, self._keys, coordinator, fingerprint(self._facts[0])
            )
            with self._waiting("for the servers to take the optimizer"):
                self._native.set_optimizer(served)
        if cluster.in_cluster():
            with self._waiting("for worker 0 to hand over the optimizer"):
                self._native._barrier()
        self._compare(0)
        self._read(range(len(self._params)))

    def _compare(self, fact: int) -> None:
        """Raises if this worker was started with other options than the others."""
        mine = self._facts[fact]
        if self._ask(COMPARE, fact, fingerprint(mine)).first != fingerprint(mine):
            raise DisagreementError(
                f"workers disagree on sync, batches, policy, parameters or samples: worker "
                f"{self.rank} has {mine}, and another something else; start all with the same"
            )

    def _warn(self, params: list[Any]) -> None:
        """Of what is not as it seems."""
        optimizer = self._optimizer
        scales = type(optimizer) is mx.optimizer.SGD and not optimizer.wd
        if not self._keeps and self.num_workers > 1 and not scales:
            logger.warning(
                "%s with wd = %g acts in full at every push, %d times for as many samples as one "
                "step of BSP: schemes compare fairly under SGD without weight decay",
                type(optimizer).__name__,
                optimizer.wd,
                self.num_workers,
            )
        if any(param.name.endswith("running_mean") for param in params):
            logger.warning(
                "BatchNorm normalises each worker's batch by itself, and its running moments stay "
                "each worker's own: use another normalisation where workers are not in step"
            )

    def _refuse_changes(self) -> None:
        """What the servers were told at the start cannot change."""
        learning = [i for i, param in enumerate(self._params) if param.grad_req != "null"]
        if learning != self._learning:
            raise ValueError(
                f"the parameters that learn were number {self._learning} when the trainer was made "
                f"and are {learning} now: set grad_req before"
            )
        if getattr(self, "_amp_loss_scaler", None) is not None:
            raise ValueError(
                "mixed precision by amp scales the loss anew each step, and the servers divide by "
                "a constant: leave amp out, or train by lbbsp_mx.Trainer"
            )

    def _forecast(self, samples: int, busy_seconds: float) -> tuple[int, int]:
        """Learns from an iteration; the predicted curve of the next one in integers."""
        before, self._drivers = self._drivers, self._sampler.sample()
        self._known, _ = self._forecaster.learn(
            self._known, samples, busy_seconds, before or self._drivers, excluded=self._excluded
        )
        self._excluded = False
        return quantise(*self._forecaster.predict(self._known, self._drivers))

    def _update_if(self, last: int, gradients: list[Any]) -> None:
        """Updates the model by the sum, if ours was the last gradient that it waited for."""
        if last:
            self._push(self._learning, gradients)  # what is in them is not looked at
            self._ask(APPLIED)

    def _leave(self) -> None:
        """Tells the coordinator that this worker will not push again."""
        if not self._left:
            self._left = True
            gradients = [self._params[i].list_grad() for i in self._learning]
            self._update_if(self._ask(FINISH).first, gradients)

    def _push(self, keys: list[int], gradients: list[Any]) -> None:
        """Until the servers have them."""
        with self._waiting("for the servers to take its gradients"):
            self._native.push(keys, gradients)
            mx.nd.waitall()

    def _read(self, numbers: Sequence[int] | None = None) -> None:
        """The model, from the servers: what learns, or the parameters of these numbers."""
        numbers = list(self._learning if numbers is None else numbers)
        self._seen = self._answer.updates
        with self._waiting("for the model"):
            arrays = [self._params[i].list_data() for i in numbers]
            self._native.pull(numbers, out=arrays)
            _wait(arrays)
        self._timer.leave()

    def _ask(self, what: int, *values: int) -> Answer:
        """Asks the coordinator, and waits for its answer."""
        self._asked += 1
        row = [what, self._asked, *values]
        table = np.zeros((self.num_workers, 2 * WIDTH), np.float32)
        table[self.rank] = pack([*row, *[0] * (WIDTH - len(row))])
        self._native.push(self._keys.questions, mx.nd.array(table))
        return self._wait_for(lambda answer: answer.number == self._asked, "for the coordinator")

    def _wait_for(self, there: Callable[[Answer], bool], what: str) -> Answer:
        pause, table = 0.0005, mx.nd.zeros((self.num_workers, 2 * WIDTH))
        with self._waiting(what):
            while True:
                self._native.pull(self._keys.questions, out=table)
                self._answer = Answer(*unpack(table.asnumpy()[self.rank]))
                if there(self._answer):
                    return self._answer
                self._drain()
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _waiting(self, what: str) -> Any:
        return process().watch.waiting(
            self.wait_seconds,
            f"worker {self.rank} has waited {self.wait_seconds:g} s {what}, and gives up: somebody "
            "has died, or needs longer (then raise wait_seconds of lbbsp_mx.AsyncTrainer)",
        )

    def _drain(self) -> None:
        """Rank 0 writes down what has been pushed since it last looked."""
        if self.rank or not self._record_path:
            return
        if self._record is None and not self._left:
            self._record = handshake.open_record(self._record_path, self._header())
        while self._record is not None and self._logged < self._answer.pushes:
            asked = np.zeros((1 + LINES, 2 * LOGGED), np.float32)
            asked[0] = pack([self._logged, *[0] * (LOGGED - 1)])
            lines = mx.nd.array(asked)
            self._native.push(self._keys.log, lines)
            self._native.pull(self._keys.log, out=lines)
            (count, *_), *rows = map(unpack, lines.asnumpy())
            for worker, iteration, samples, busy, at, staleness, lead in rows[:count]:
                self._record.push(
                    self._logged,
                    worker=worker,
                    iteration=iteration,
                    samples=samples,
                    busy_seconds=busy / 1e9,
                    seconds=at / 1e6,
                    staleness=staleness,
                    lead=lead,
                )
                self._logged += 1

    def _header(self) -> dict[str, Any]:
        return {
            "framework": "mxnet",
            "workers": self.num_workers,
            "global_batch_size": self._cluster.global_batch_size,
            "sync": repr(self._sync),
            "policy": repr(self._policy),
            "predictor": repr(self._forecaster.predictor),
            "seed": self.seed,
            "versions": handshake.all_versions({"mxnet": mx.__version__}),
        }


class StreamSampler(gluon.data.Sampler):
    """This worker's batches, dealt out by the coordinator as the workers come for them.

    Args:
        trainer: Of the training.
        stream: The samples.
        epochs: How many of its epochs an iteration covers.
    """

    def __init__(self, trainer: AsyncTrainer, stream: SampleStream, epochs: int) -> None:
        self._trainer, self._stream, self._epochs = trainer, stream, epochs
        self._limit = 0

    def __len__(self) -> int:
        raise TypeError("how many batches a worker draws shows only in the end: do not ask for len")

    def __iter__(self) -> Iterator[list[int]]:
        self._limit += self._epochs * self._stream.num_samples
        self._trainer.drop_claims()
        self._trainer.exclude_step()
        while True:
            begin, end = self._trainer.claim(self._limit)
            if begin >= end:
                return
            yield self._stream.take(begin, end).tolist()


def _check(params: list[Any]) -> None:
    for param in params:
        if param._deferred_init:
            raise ValueError(
                f"parameter {param.name} must be initialised, with its shape known: give in_units "
                "or in_channels, or call the network once before making the trainer"
            )
        require_dense(param)


def _wait(arrays: list[Any]) -> None:
    for each in arrays:
        for array in each:
            array.wait_to_read()
