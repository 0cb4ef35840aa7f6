"""Gluon trainer for asynchronous training on ``dist_async``: `AsyncTrainer`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import mxnet as mx
from mxnet import gluon

from lbbsp_core.order import SampleStream
from lbbsp_core.runtime.asynchronous.async_session import AsyncSession
from lbbsp_core.runtime.options.options import AsyncOptions, SessionOptions
from lbbsp_core.sync import Synchroniser
from lbbsp_core.validate import require_flag, require_integer, require_positive
from lbbsp_mx import cluster
from lbbsp_mx.asynchronous.servers import ParameterServers, check_are_free
from lbbsp_mx.data.drawing import count_samples
from lbbsp_mx.data.sampler import Data, Draws
from lbbsp_mx.fence import wait_for
from lbbsp_mx.parameters import (
    Parameters,
    as_created,
    devices_of,
    normalises_batches,
    require_dense,
    settings_of,
)
from lbbsp_mx.store.native import runtime
from lbbsp_mx.trainer.base import OwnTrainer, Unavailable
from lbbsp_mx.trainer.peers import with_peers
from lbbsp_mx.trainer.session import with_granularity
from lbbsp_mx.trainer.stages import GradientStage, clear_stale, mark_gradients

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("lbbsp.mx")


class AsyncTrainer(OwnTrainer):
    """Trains a gluon network under SSP, ASP, DSSP or ElasticBSP: workers may run ahead of others.

    The optimizer runs on MXNet's parameter servers (``dist_async``), where each push enters the
    model on arrival. The first server also runs a coordinator, which runs the same synchronisers
    as ``lbbsp simulate``, assigns the samples, and asks the policy for batch sizes. With `BSP`,
    and at the barriers of `ElasticBSP`, pushes are kept and enter together, as one update; under
    `BSP` it is the mean over the samples of the iteration, which is short at the end of a loop over
    the loader.

    A push of x samples moves the model by ``x / X`` of a step along their mean gradient, so that
    under plain SGD every sample has the same weight in every scheme. (Adam and similar optimizers
    make a full step at every push, and weight decay and momentum act at every push.) For exact
    learning, and for speed where no worker needs to run ahead, use `lbbsp_mx.Trainer`.

    Without ``DMLC_*`` variables there is one worker, which trains in this process.

    Args:
        params: Parameters of the network, all initialised.
        optimizer: Name or object of the optimizer. To change the learning rate, give it an
            ``lr_scheduler``, which counts pushes.
        optimizer_params: Options of the optimizer.
        sync: Decides which workers wait for which: `SSP`, `ASP`, `DSSP`, `ElasticBSP`, `BSP`, or
            a synchroniser of your own; the same on all workers. A name such as ``"ssp:3"`` will do,
            see `lbbsp_core.registry`.
        global_batch_size: X, the samples in one batch of each of the N workers.
        wait_seconds: Maximum seconds that an iteration waits for other workers or for a server.
        share_work: Whether a part of each iteration is left to whoever has finished its own, see
            docs/sharing.md; needs ``sync=BSP()``, and a DataLoader that draws each batch when it is
            needed: without ``num_workers`` and ``prefetch``. True and ``"auto"`` do so where
            measured times say that it saves time; a number in [0.01, 0.8] is the part of every
            iteration that is shared.
        **options: Options of `lbbsp_core.SessionOptions`. The policy defaults to `Even`;
            `FixedShares` and `LoadBalanced` (for LB + SSP, LB + ASP) work as well and decide
            whenever every worker has pushed once more. The cost must be `Proportional` or
            `Affine`. Options of common steps are refused, such as ``metrics_file``.

    Raises:
        ValueError: The options cannot be satisfied, exclude each other, or have no effect here.

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
        trainer.finish()              # waits for the other workers, and reads the final model
    """

    _session: AsyncSession

    def __init__(
        self,
        params: Parameters,
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: dict[str, object] | None = None,
        *,
        sync: Synchroniser | str,
        global_batch_size: int,
        wait_seconds: float = 1800.0,
        share_work: bool | str | float = False,
        **options: Unpack[AsyncOptions],
    ) -> None:
        chosen = SessionOptions.of(options, AsyncTrainer.__init__)
        require_positive("wait_seconds", wait_seconds)
        params = list(as_created(params))
        for param in params:
            if param._deferred_init:
                raise ValueError(
                    f"parameter {param.name} must be initialised, with its shape known: give "
                    "in_units or in_channels, or call the network once before creating the trainer"
                )
            require_dense(param)
        if cluster.in_cluster():
            check_are_free()
            _refuse_layers_in_step(params)
        runtime().use_options(chosen)
        super().__init__(params, optimizer, optimizer_params, None, None, False)
        self._updaters: list[mx.optimizer.Updater] = []
        self._draws, self._steps, self._shares = Draws(), 0, bool(share_work)
        self._sampler: StreamSampler | None = None  # of the running iteration over the data, which
        self._first = self._limit = 0  # draws samples from this position on, and before this one
        self._servers = servers = ParameterServers(params, wait_seconds)
        self.rank, self.num_workers = servers.rank, servers.workers
        self._sent = self._settings()
        self._stages: list[GradientStage] = []
        self._has_warned = False
        if chosen.granularity is None:  # that devices differ, workers notice when they compare
            counts = [len(self._contexts)] * self.num_workers
            chosen = with_granularity(chosen, counts, global_batch_size)
        self._session = AsyncSession(
            servers, sync, global_batch_size, chosen,
            framework="mxnet", versions={"mxnet": mx.__version__},
            facts=f"parameters of {[tuple(param.shape) for param in params]}",
            share_work=share_work,
            devices=devices_of(self._contexts).names,
        )  # fmt: skip
        self._optimizer.rescale_grad = self._scale / global_batch_size
        service = self._session.make_service() if self.rank == 0 else None
        if cluster.in_cluster():
            runtime().optimizer_of = "AsyncTrainer"
        servers.start(self._optimizer, service, keeps_pushes=self._session.sync.keeps_pushes)
        self._session.start()
        self._read(range(len(params)))
        runtime().endings.add(self._session.depart)
        if self.num_workers > 1:
            with_peers()[id(self)] = self
        self._warn_if_unfair()

    def batch_sampler(
        self,
        data: Data,
        *,
        epochs: int = 1,
        seed: int | None = None,
        shuffle: bool = True,
        **others: object,
    ) -> StreamSampler:
        """Creates the ``batch_sampler`` of the DataLoader, with the same arguments on all workers.

        Workers are assigned samples on request: each sample occurs once per epoch, and a fast
        worker gets more of them. Samples that a worker has drawn but not used when it leaves an
        iteration are dropped; so are those that no worker has drawn when the first one begins with
        another sampler.

        Args:
            data: The whole data set, or its number of samples.
            epochs: Number of epochs that one iteration over the loader covers.
            seed: Seed of the order. Defaults to the trainer's.
            shuffle: False keeps the order of the data set in all epochs.
            **others: None; further arguments of `lbbsp_mx.Trainer.batch_sampler` are refused.
        """
        if others:
            raise ValueError(
                f"batch_sampler of an AsyncTrainer takes data, epochs, seed and shuffle, got "
                f"{', '.join(others)}: leave it out, or train with lbbsp_mx.Trainer"
            )
        num_samples = require_integer("number of samples", count_samples(data), 1)
        require_integer("epochs", epochs, 1)
        require_flag("shuffle", shuffle)
        return StreamSampler(self, self._session.use_samples(num_samples, seed, shuffle), epochs)

    def step(self, batch_size: int, ignore_stale_grad: bool = False, weight: object = None) -> bool:
        """Pushes this worker's gradient, waits until it may proceed, and reads the model.

        With `share_work` the next batch may be a further part of the same iteration: then the
        gradient is kept until the last part of this worker.

        Args:
            batch_size: Samples in the batch, as drawn.
            ignore_stale_grad: Whether parameters that the batch does not use stay out of the push;
                otherwise they are refused, as by gluon.
            weight: None; weights, which divide by those of all workers, are refused.

        Returns:
            Whether the iteration has ended.

        Raises:
            ValueError: The batch size differs from that of the batch which was drawn, a batch was
                drawn without a step, or what the servers have received at the start has changed.
        """
        if weight is not None:
            raise ValueError(
                f"weight must be None, got {weight!r}: each push is divided by the constant "
                "global_batch_size; leave it out, or train with lbbsp_mx.Trainer"
            )
        self._refuse_changes()
        self._draws.require_steps(self._steps, ())
        self._session.check_batch(batch_size)
        params = [self._params[number] for number in self._servers.learning]
        clear_stale(params)
        self._update(ignore_stale_grad)  # without updaters it only checks the gradients
        wait_for(param.list_grad() for param in params)
        self._steps += 1
        if self._session.claim_part(batch_size):
            self._servers.keep_gradients()
            mark_gradients(params, is_fresh=False)
            return False
        self._end_iteration(batch_size)
        return True

    def _leave_iteration(self) -> None:
        """Pushes what is kept of an iteration that the user's loop has left before its end.

        Also takes part in iterations of others for which no samples were left.
        """
        while self._session.must_end_step():
            self._end_iteration(0)

    def _end_iteration(self, batch_size: int) -> None:
        self._session.end_step(batch_size)
        mark_gradients([self._params[i] for i in self._servers.learning], is_fresh=False)
        self._read(self._servers.learning)

    def finish(self) -> None:
        """Leaves the training, waits until all workers have left, and reads the final model."""
        self._leave_iteration()
        self._session.finish()
        self._read(self._servers.learning)
        self._session.close()

    def sum_for_clipping(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Warns once if a script clips its own gradients by their global norm before a push."""
        if self._has_warned:
            return
        own = {id(array) for i in self._servers.learning for array in self._params[i]._grad or ()}
        if not own.isdisjoint(map(id, arrays)):
            self._has_warned = True
            logger.warning(
                "clip_global_norm clips the gradients of each push, and not those of a global "
                "batch, so that what is learned depends on how batches are divided: to learn what "
                "one process learns, train with lbbsp_mx.Trainer"
            )

    # What gluon's trainer and `lbbsp_mx.Trainer` have besides

    allreduce_grads = update = Unavailable(
        "gradients enter the model only by step(): call trainer.step(batch_size)"
    )
    set_learning_rate = Unavailable(
        "the optimizer runs on the servers: give it an lr_scheduler, which counts pushes"
    )
    save = load = resume = save_states = load_states = Unavailable(
        "the optimizer's state is on the servers: save the parameters (net.save_parameters), or "
        "train with lbbsp_mx.Trainer"
    )
    sizes = rows = Unavailable(
        "the coordinator assigns the samples of each batch: draw them by trainer.batch_sampler(...)"
    )
    epoch = Unavailable("workers are in epochs of their own: count the iterations over the loader")
    stopping = request_stop = Unavailable(
        "a worker may leave without the others: call trainer.finish()"
    )
    mean_over_workers = Unavailable(
        "workers make no common steps: evaluate the final model after trainer.finish()"
    )
    broadcast_parameters = Unavailable(
        "all workers read the model from the servers: load or set parameters before the trainer "
        "is created"
    )
    kvstore = Unavailable("the servers are its own: read trainer.rank and trainer.num_workers")

    def _read(self, numbers: Sequence[int]) -> None:
        """Reads the parameters with these indices from the servers."""
        self._optimizer.num_update = self._session.begin_read()  # for its lr_scheduler
        self._servers.read(numbers)
        self._session.end_read()

    def _warn_if_unfair(self) -> None:
        """Warns if the optimizer or the network makes a comparison of schemes unfair."""
        optimizer = self._optimizer
        scales = type(optimizer) is mx.optimizer.SGD and not optimizer.wd
        if self.num_workers > 1 and not (scales or self._session.sync.keeps_pushes):
            logger.warning(
                "%s with wd = %g makes a full step at every push, that is %d steps for the samples "
                "of one step of BSP: use SGD without weight decay for a fair comparison",
                type(optimizer).__name__,
                optimizer.wd,
                self.num_workers,
            )
        if normalises_batches(self._params):
            logger.warning(
                "BatchNorm normalises each worker's batch separately, and each worker keeps its "
                "own running moments: use another normalisation for asynchronous training"
            )

    def _settings(self) -> dict[str, object]:
        """Returns by name what the servers receive once; a scheduler may have the learning rate."""
        rates = {name: getattr(self._optimizer, name) for name in ("lr", "wd")}
        known = {f"{k} of the optimizer": float(v) for k, v in rates.items() if v is not None}
        return {**settings_of(self._params, self._servers.learning), **known}

    def _refuse_changes(self) -> None:
        """Raises an error if settings that the servers received at the start have changed."""
        for name, now in self._settings().items():
            if now != (before := self._sent.get(name)):
                raise ValueError(
                    f"{name} must be those of the time when the trainer was created, with which "
                    f"the optimizer runs on the servers ({before}), got {now}: set them before, "
                    "and change the learning rate by an lr_scheduler, which counts pushes"
                )
        if self._shares and any(param.grad_req == "add" for param in self._params):
            raise ValueError(
                "share_work adds up the gradients of the parts of an iteration itself, and "
                "grad_req='add' would count them again: let it be 'write', or leave share_work out"
            )
        if not self._servers.is_unchanged():
            raise ValueError(
                "parameters have changed since the trainer read them (by load_parameters, set_data "
                "or the like), and the model is on the servers: load or set them before the "
                "trainer is created, or train with lbbsp_mx.Trainer"
            )
        if self._loss_scaler is not None:
            raise ValueError(
                "amp cannot be used, because it changes the scale of the loss and the servers "
                "divide by a constant: leave amp out, or train with lbbsp_mx.Trainer"
            )


class StreamSampler(gluon.data.Sampler):
    """Batches of this worker, assigned by the coordinator on request."""

    def __init__(self, trainer: AsyncTrainer, stream: SampleStream, epochs: int) -> None:
        self._trainer, self._stream = trainer, stream
        self._samples = epochs * stream.num_samples  # of an iteration
        self._begun = 0  # samples of the iterations so far

    def __len__(self) -> int:
        raise TypeError(
            "len() is not available, because the number of batches that a worker draws is known "
            "only at the end: iterate over the sampler"
        )

    def __iter__(self) -> Iterator[list[int]]:
        trainer, session = self._trainer, self._trainer._session
        trainer._leave_iteration()
        session.begin_epoch()
        trainer._draws.begin(trainer._steps)
        if trainer._sampler is not self:
            trainer._sampler, trainer._first = self, trainer._limit
        offset = self._begun - trainer._limit  # of positions that all samplers share
        self._begun += self._samples
        trainer._limit += self._samples
        while True:
            begin, end = session.claim(trainer._limit, trainer._first)
            if begin >= end:
                if not session.is_ahead:
                    trainer._leave_iteration()
                return
            trainer._draws.count()
            yield self._stream.take(begin + offset, end + offset).tolist()


def _refuse_layers_in_step(params: Sequence[gluon.Parameter]) -> None:
    """Raises ValueError if a layer exchanges moments with the other workers in every step."""
    if any(hasattr(param, "lbbsp_synchronised") for param in params):
        raise ValueError(
            "SyncBatchNorm needs workers in step: use a normalisation of single samples, such as "
            "LayerNorm or GroupNorm, or train with lbbsp_mx.Trainer"
        )
