"""The gluon Trainer for workers that need not be in step: `AsyncTrainer`, on ``dist_async``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import mxnet as mx
from mxnet import gluon

from lbbsp_core.order import SampleStream
from lbbsp_core.runtime.async_session import AsyncSession
from lbbsp_core.runtime.coordination import Table, empty_log, empty_questions
from lbbsp_core.runtime.options import SessionOptions
from lbbsp_core.sync import Synchroniser
from lbbsp_mx import cluster, env
from lbbsp_mx.native import runtime
from lbbsp_mx.parameters import Parameters, as_created, require_dense
from lbbsp_mx.server_optimizer import Keys, ServerOptimizer

logger = logging.getLogger("lbbsp.mx")


class AsyncTrainer(gluon.Trainer):
    """Trains a gluon network on workers that need not be in step: SSP, ASP, DSSP, ElasticBSP.

    The optimizer runs on MXNet's parameter servers (``dist_async``), where each push enters the
    model on arrival; beside it runs a coordinator, which drives the same synchroniser as
    `lbbsp simulate`, deals out the samples, and asks the policy for batch sizes. With `BSP`, and
    at the barriers of `ElasticBSP`, pushes are kept and enter together, as one update.

    A push of x samples moves the model by ``x / X`` of a step by their mean gradient, so that
    under plain SGD a scheme learns as much from as many samples as any other. (Adam and its
    relatives make a whole step of every push, and weight decay and momentum act at every push.)
    For exact learning, and for speed where no worker needs to run ahead, use `lbbsp_mx.Trainer`.

    Without ``DMLC_*`` there is one worker, which trains in this process.

    Args:
        params: Parameters of the network, all initialised.
        optimizer: Name or object of the optimizer. Learning rates change by its ``lr_scheduler``,
            which counts pushes.
        optimizer_params: Its options.
        sync: Decides who waits for whom: `SSP`, `ASP`, `DSSP`, `ElasticBSP`, `BSP`, or one of
            your own; the same on all workers.
        global_batch_size: X, the samples of N batches.
        wait_seconds: Longest wait of an iteration for others, or for a server.
        **options: Those of `lbbsp_core.SessionOptions`. The policy defaults to `Even`;
            `FixedShares` and `LoadBalanced` (for LB + SSP and its relatives) work as well, asked
            whenever all workers have pushed once more. The cost must be a straight line.

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
        params: Parameters,
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: dict[str, object] | None = None,
        *,
        sync: Synchroniser,
        global_batch_size: int,
        wait_seconds: float = 1800.0,
        **options: object,
    ) -> None:
        chosen = SessionOptions.of(options)
        params = list(as_created(params))
        _check_initialised(params)
        if cluster.in_cluster() and runtime().serves_optimizer:
            raise ValueError(
                "a process can have one AsyncTrainer in a cluster, and this is the second: the "
                "servers run one optimizer; use another job, or one trainer for all parameters"
            )
        runtime().serves_optimizer = True
        super().__init__(params, optimizer, optimizer_params, None, None, False)
        self._servers = servers = _Servers(params, wait_seconds)
        self.rank, self.num_workers = servers.rank, servers.workers
        self._session = AsyncSession(
            servers,
            sync,
            global_batch_size,
            chosen,
            framework="mxnet",
            versions={"mxnet": mx.__version__},
            facts=f"parameters of {[tuple(param.shape) for param in params]}",
        )
        self._optimizer.rescale_grad = self._scale / global_batch_size
        service = self._session.make_service() if self.rank == 0 else None
        servers.start(
            service and ServerOptimizer(self._optimizer, servers.keys, service),
            keeps_pushes=sync.keeps_pushes,
        )
        self._session.start()
        self._read(range(len(params)))
        runtime().endings.append(self._session.depart)
        self._warn_if_unfair(keeps_pushes=sync.keeps_pushes)

    def batch_sampler(self, num_samples: int, epochs: int = 1) -> StreamSampler:
        """Makes the ``batch_sampler`` of the training's DataLoader; every worker the same.

        The samples are dealt out as the workers ask for them: each comes once an epoch, and a
        fast worker gets more of them. What a worker has drawn when it leaves an iteration
        half-way is dropped.

        Args:
            num_samples: Length of the whole data set.
            epochs: Number of its epochs that one iteration of the loader covers.
        """
        self._session.use_samples(num_samples)
        stream = SampleStream(num_samples, self._session.options.seed)
        return StreamSampler(self._session, stream, epochs)

    def exclude_step(self) -> None:
        """Excludes the running iteration from what is learned: it holds work that others do not."""
        self._session.exclude_step()

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Pushes this worker's gradient, waits until it may proceed, and reads the model.

        Args:
            batch_size: Samples of the batch, as drawn.
            ignore_stale_grad: Ignored.

        Raises:
            ValueError: Another batch size than what was drawn.
        """
        self._refuse_changes()
        self._servers.wait_for_gradients()
        self._session.end_step(batch_size)
        self._read(self._servers.learning)

    def finish(self) -> None:
        """Departs, so that no worker waits for this one; waits for all; reads the final model."""
        self._session.finish()
        self._read(self._servers.learning)
        self._session.close()

    def set_learning_rate(self, lr: float) -> NoReturn:
        """Refuses: the optimizer is on the servers.

        Raises:
            ValueError: Always; says what to do.
        """
        raise ValueError(
            f"the learning rate cannot become {lr!r} here, the optimizer runs on the servers: "
            "give it an lr_scheduler, which counts pushes"
        )

    def allreduce_grads(self) -> NoReturn:
        """Refuses: nothing is summed over workers here.

        Raises:
            ValueError: Always; says what to do.
        """
        raise ValueError("gradients enter the model by step() only: call trainer.step(batch_size)")

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> NoReturn:
        """Refuses, as `allreduce_grads` does."""
        self.allreduce_grads()

    def save_states(self, fname: str) -> NoReturn:
        """Refuses: the optimizer's state is on the servers.

        Raises:
            ValueError: Always; says what to do.
        """
        raise ValueError(
            f"the optimizer's state is on the servers, and cannot be saved to {fname!r}: save the "
            "parameters (net.save_parameters), or train by lbbsp_mx.Trainer"
        )

    def load_states(self, fname: str) -> NoReturn:
        """Refuses, as `save_states` does."""
        self.save_states(fname)

    def _read(self, numbers: Sequence[int]) -> None:
        """Reads the parameters of these numbers from the servers."""
        self._session.begin_read()
        self._servers.read(numbers)
        self._session.end_read()

    def _warn_if_unfair(self, *, keeps_pushes: bool) -> None:
        """Warns where a push is not what it seems."""
        optimizer = self._optimizer
        scales = type(optimizer) is mx.optimizer.SGD and not optimizer.wd
        if not keeps_pushes and self.num_workers > 1 and not scales:
            logger.warning(
                "%s with wd = %g acts in full at every push, %d times for as many samples as one "
                "step of BSP: schemes compare fairly under SGD without weight decay",
                type(optimizer).__name__,
                optimizer.wd,
                self.num_workers,
            )
        if any(param.name.endswith("running_mean") for param in self._params):
            logger.warning(
                "BatchNorm normalises each worker's batch by itself, and its running moments stay "
                "each worker's own: use another normalisation where workers are not in step"
            )

    def _refuse_changes(self) -> None:
        """Refuses changes of what the servers were given at the start."""
        learning, before = _learning(self._params), self._servers.learning
        if learning != before:
            raise ValueError(
                f"the parameters that learn were number {before} when the trainer was made "
                f"and are {learning} now: set grad_req before"
            )
        if getattr(self, "_amp_loss_scaler", None) is not None:
            raise ValueError(
                "mixed precision by amp scales the loss differently each step, and the servers "
                "divide by a constant: leave amp out, or train by lbbsp_mx.Trainer"
            )


class StreamSampler(gluon.data.Sampler):
    """Batches of this worker, dealt out by the coordinator as the workers ask for them.

    Args:
        session: Of the training.
        stream: The samples.
        epochs: Number of its epochs that an iteration covers.
    """

    def __init__(self, session: AsyncSession, stream: SampleStream, epochs: int) -> None:
        self._session, self._stream, self._epochs = session, stream, epochs
        self._limit = 0

    def __len__(self) -> int:
        raise TypeError(
            "the number of batches that a worker draws is known only at the end: do not ask for len"
        )

    def __iter__(self) -> Iterator[list[int]]:
        self._limit += self._epochs * self._stream.num_samples
        self._session.begin_epoch()
        while True:
            begin, end = self._session.claim(self._limit)
            if begin >= end:
                return
            yield self._stream.take(begin, end).tolist()


class _Servers:
    """MXNet's parameter servers, for an `AsyncSession`."""

    def __init__(self, params: list[gluon.Parameter], wait_seconds: float) -> None:
        self._native = runtime().native("dist_async" if cluster.in_cluster() else "local", 120.0)
        self.rank, self.workers = self._native.rank, self._native.num_workers
        self.keys = Keys(len(params), int(env.cluster().get("DMLC_NUM_SERVER", 1)))
        self.learning = _learning(params)
        self._answers = mx.nd.array(empty_questions(self.workers))
        self._params = params
        self._wait_seconds = wait_seconds

    def start(self, optimizer: ServerOptimizer | None, *, keeps_pushes: bool) -> None:
        """Hands the model, the optimizer and the coordinator to the servers; all workers must."""
        context = self._params[0].list_ctx()[0]
        values = {i: param.data(context) for i, param in enumerate(self._params)}
        if keeps_pushes:
            sums = {self.keys.sums + i: mx.nd.zeros_like(values[i]) for i in self.learning}
            values |= sums
        values[self.keys.questions] = mx.nd.array(empty_questions(self.workers))
        values[self.keys.log] = mx.nd.array(empty_log())
        with self.waiting("for all to hand over the model"):
            self._native.init(list(values), list(values.values()))
        if optimizer is not None:
            trained = optimizer.optimizer
            trained.set_lr_mult({i: param.lr_mult for i, param in enumerate(self._params)})
            trained.set_wd_mult({i: param.wd_mult for i, param in enumerate(self._params)})
            with self.waiting("for the servers to take the optimizer"):
                self._native.set_optimizer(optimizer)
        if cluster.in_cluster():
            with self.waiting("for worker 0 to hand over the optimizer"):
                self._native._barrier()

    def ask(self, table: Table) -> None:
        """Pushes a table of questions."""
        self._native.push(self.keys.questions, mx.nd.array(table))

    def read_answers(self) -> Table:
        """Pulls the table of answers."""
        self._native.pull(self.keys.questions, out=self._answers)
        return self._answers.asnumpy()

    def exchange_log(self, table: Table) -> Table:
        """Pushes a request for the log, and pulls what answers it."""
        lines = mx.nd.array(table)
        self._native.push(self.keys.log, lines)
        self._native.pull(self.keys.log, out=lines)
        return lines.asnumpy()

    def push_gradients(self, *, to_sum: bool) -> None:
        """Pushes this worker's gradients, and waits until the servers have them."""
        first = self.keys.sums if to_sum else 0
        with self.waiting("for the servers to take its gradients"):
            self._native.push([first + i for i in self.learning], self._gradients())
            mx.nd.waitall()

    def wait_for_gradients(self) -> None:
        """Waits until this worker has computed its gradients."""
        _wait(self._gradients())

    def read(self, numbers: Sequence[int]) -> None:
        """Pulls the parameters of these numbers."""
        with self.waiting("for the model"):
            arrays = [self._params[i].list_data() for i in numbers]
            self._native.pull(list(numbers), out=arrays)
            _wait(arrays)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Ends the process when the wait inside the context takes too long."""
        return runtime().waiting(self.rank, self._wait_seconds, what, "lbbsp_mx.AsyncTrainer")

    def _gradients(self) -> list[list[mx.nd.NDArray]]:
        return [self._params[i].list_grad() for i in self.learning]


def _learning(params: Sequence[gluon.Parameter]) -> list[int]:
    return [i for i, param in enumerate(params) if param.grad_req != "null"]


def _check_initialised(params: list[gluon.Parameter]) -> None:
    for param in params:
        if param._deferred_init:
            raise ValueError(
                f"parameter {param.name} must be initialised, with its shape known: give in_units "
                "or in_channels, or call the network once before making the trainer"
            )
        require_dense(param)


def _wait(arrays: list[list[mx.nd.NDArray]]) -> None:
    for each in arrays:
        for array in each:
            array.wait_to_read()
