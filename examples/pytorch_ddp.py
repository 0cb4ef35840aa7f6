"""LB-BSP for PyTorch's DistributedDataParallel: a plugin on `lbbsp_core` alone.

Copy this file, and change three lines of a script (see pytorch_digits_plain.py and
pytorch_digits_balanced.py)::

    balancer = LoadBalancer(DistributedDataParallel(net), global_batch_size=256, keep=[optimizer])
    loader = balancer.loader(dataset)
    for epoch in balancer.epochs(10):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

Start it by ``lbbsp launch --framework torch`` or by torchrun. Each step draws this worker's samples
by the plan. A communication hook weights its gradients by ``x_i / X_k`` and sums them over the
workers; the last bucket, which is ready when the backward pass has ended, is sent together with the
message of the session.

What the hook cannot see is up to the script:

- The loss must be the *mean* over the samples of the batch, with or without regularisers. A sum, or
  a mean over tokens or valid pixels, would be weighted wrongly.
- All workers run the same number of epochs, and change the learning rate alike.
- An evaluation or a save within an epoch, between two steps, is followed by
  ``balancer.session.exclude_step()``, so that its time is not taken for that of a step.
- Dropout draws other noise on each worker, and batch normalisation normalises by the samples of
  each worker, as under plain DistributedDataParallel.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lbbsp_core import SessionOptions, WorkerSession
from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint, newest_checkpoint
from lbbsp_core.runtime.exchange.collectives import gather_bytes
from lbbsp_core.runtime.exchange.handshake import Devices, gpu
from lbbsp_core.runtime.extensions.record_file import Recording
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.extensions.weights import WeightComparison
from lbbsp_core.runtime.loop import checkpoint_schedule as schedule
from lbbsp_core.runtime.loop.session_state import check_same_job
from lbbsp_core.runtime.reliability import marks
from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity
from lbbsp_core.runtime.reliability.exit import fail_fast
from lbbsp_core.runtime.reliability.heartbeat import Heartbeat
from lbbsp_core.runtime.reliability.liveness import print_message
from lbbsp_core.runtime.reliability.preemption import end_with_peers

logger = logging.getLogger("lbbsp.torch")

_BATCH_NORMS = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d


class Group:
    """Collectives of a process group, on the device of the model."""

    def __init__(self, group: Any, device: torch.device, activity: CurrentActivity) -> None:
        self.group, self.device, self._activity = group, device, activity
        self.rank, self.workers = distributed.get_rank(group), distributed.get_world_size(group)

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the values of all workers, by rank."""
        own = torch.tensor(values, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.workers)]
        with self._activity.during(Activity.MEETING):
            distributed.all_gather(rows, own, self.group)
            # A thread of Gloo may still hold them, and Python < 3.14 would abort if it were ending
            # when that thread frees them (pytorch#190489).
            while self.device.type == "cpu" and max(each._use_count() for each in (own, *rows)) > 1:
                time.sleep(0.0001)
            return [row.tolist() for row in rows]

    def sum(self, values: torch.Tensor) -> Any:
        """Starts to sum a tensor over the workers, in place; returns what waits for it."""
        return distributed.all_reduce(values, group=self.group, async_op=True)


class Board:
    """Board of the heartbeats: a store that worker 0 serves."""

    holder = 0

    def __init__(self, group: Group) -> None:
        host, port, self._rank = os.environ.get("MASTER_ADDR", socket.gethostname()), 0, group.rank
        if group.rank == 0:
            self._store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        host, _, at = gather_bytes(group, f"{host} {port}".encode())[0].decode().partition(" ")
        if group.rank > 0:
            self._store = distributed.TCPStore(host, int(at), wait_for_workers=False)

    def post(self, row: Sequence[int]) -> None:
        """Replaces this worker's row."""
        self._store.set(f"beat {self._rank}", " ".join(map(str, row)))

    def read(self, rank: int) -> Sequence[int] | None:
        """Returns the row of a worker, or None if there is none yet."""
        key = f"beat {rank}"
        return [*map(int, self._store.get(key).split())] if self._store.check([key]) else None


class PlannedBatches:
    """Batch sampler: the samples of this worker in the rest of the epoch, by the plans."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session

    def __len__(self) -> int:
        return self._session.order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._session.step, self._session.balancer.schedule.epoch_end_step()):
            yield self._session.local_indices(step).tolist()


class BalancedLoader(DataLoader[Any]):
    """Loader of a `LoadBalancer`, which begins and ends the steps."""

    def __init__(self, balancer: LoadBalancer, dataset: Dataset[Any], **options: Any) -> None:
        self._balancer = balancer
        super().__init__(dataset, batch_sampler=PlannedBatches(balancer.session), **options)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self._balancer.begin_step()
            yield batch
            self._balancer.end_step()
            if self._balancer.session.stopping:
                return


class LoadBalancer:
    """Balances the batches of a `DistributedDataParallel` model, and weights its gradients.

    Args:
        model: Model of the script, without a communication hook. One process works, too.
        global_batch_size: X, samples per step over all workers.
        checkpoint: Folder of checkpoints, from which the same script continues at the same step.
            Worker 0 writes and reads it. On SIGTERM to a worker, all save one and leave.
        every: Steps between two checkpoints, or "epoch".
        keep: What a checkpoint holds besides the model: objects with `state_dict` and
            `load_state_dict`, such as the optimizer and a schedule of learning rates.
        **options: Options of `lbbsp_core.SessionOptions`.

    Attributes:
        session: Session of this worker, with `sizes`, `step` and `request_stop`.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        global_batch_size: int,
        *,
        checkpoint: str | Path | None = None,
        every: schedule.Every = "epoch",
        keep: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"model must be a DistributedDataParallel, got {type(model).__name__}: wrap it, "
                "also in one process (init_process_group with a world size of 1)"
            )
        kinds = {type(each) for each in model.modules()}
        if torch.nn.SyncBatchNorm in kinds:
            raise ValueError(
                "SyncBatchNorm mixes the losses of the workers before their gradients are "
                "weighted, so that unequal batches would learn something else: use GroupNorm or "
                "LayerNorm, or BatchNorm as it is"
            )
        self._device = next(model.parameters()).device
        self._on_gpu = self._device.type == "cuda"
        if kinds.intersection(_BATCH_NORMS) and distributed.get_rank() == 0:
            logger.warning(
                "batch normalisation uses the samples of each worker: with unequal batches the "
                "means of some come from fewer samples; GroupNorm and LayerNorm are exact"
            )
        schedule.require_every(every, checkpoint)
        given, activity = SessionOptions.of(options, LoadBalancer.__init__), CurrentActivity()
        fail_fast()
        marks.begin()
        self._group = Group(model.process_group, self._device, activity)
        number = self._device.index or 0  # among the GPUs that this process sees
        names = (gpu(number),) if self._on_gpu else ()
        self.session = WorkerSession(
            self._group,
            global_batch_size,
            given,
            framework="torch",
            versions={"torch": torch.__version__},
            activity=activity,
            devices=Devices(names, self._on_gpu, self._on_gpu, number),
        )
        self._heartbeat = self._start_heartbeat()
        self._model, self._kept = model, [model.module, *keep]
        self._running: int | None = None  # step whose batch the script has
        self._epochs: int | None = None
        self._schedule = schedule.CheckpointSchedule(
            self.session, self.session.extensions[Stopping], self._collect, self._report_exit
        )
        self._folder = Path(checkpoint) if checkpoint is not None else None
        if self._folder is not None:
            self._schedule.use(schedule.CheckpointWriter(self._folder), every)
        model.register_comm_hook(None, self._reduce)

    # The three parts of a plugin: samples by the plan, the sum of the gradients, collectives

    def loader(
        self, dataset: Dataset[Any], *, work: npt.ArrayLike | None = None, **options: Any
    ) -> BalancedLoader:
        """Returns the loader of the training data, the whole of which each worker passes.

        Args:
            dataset: Data set with ``__len__`` and ``__getitem__``.
            work: Work of each sample, such as its tokens, by which a step is cut; None: all alike.
            **options: Those of `DataLoader`, such as ``num_workers``.
        """
        session = self.session
        session.use_order(session.make_order(len(dataset), work=work))  # type: ignore[arg-type]
        loader = BalancedLoader(self, dataset, **options)
        session.use_lag(1 + loader.num_workers * (loader.prefetch_factor or 0))
        return loader

    def _reduce(self, _, bucket):  # PyTorch refuses annotations that are texts, as here
        """Communication hook: weights a bucket, and sums it; the last one ends the step."""
        session = self.session
        if bucket.index() == 0 and self._running != session.step:
            raise ValueError(
                "backward was called without a batch of balancer.loader(...), or twice for one: "
                "call it once for each batch of the loader, in the loop over it"
            )
        gradients = bucket.buffer().mul_(session.sizes[session.rank] / sum(session.sizes))
        if not bucket.is_last():
            session.meter.overlap.begin()
            return self._group.sum(gradients).get_future().then(self._arrived)
        if self._on_gpu:  # the kernels of this step, and no others: those may wait for workers
            torch.cuda.current_stream(self._device).synchronize()
        rows = torch.zeros(session.workers, session.width, device=self._device)
        rows[session.rank] = torch.from_numpy(session.before_allreduce())
        works = [self._group.sum(each) for each in (gradients, rows)]
        for work in works:
            work.wait()
        session.after_allreduce(rows.tolist())
        return works[0].get_future().then(lambda sums: sums.value()[0])

    def _arrived(self, sums: torch.futures.Future[Any]) -> torch.Tensor:
        self.session.meter.overlap.end()
        return sums.value()[0]

    # A training, in the order of its events

    def epochs(self, number: int) -> Iterator[int]:
        """Trains: yields the numbers of the epochs; after a restart, those that are left."""
        session = self.session
        if session.order is None or self._epochs is not None:
            raise ValueError(
                "epochs(...) trains once, on the data of a loader: call balancer.loader(...) "
                "before, and make a model and a LoadBalancer for each training"
            )
        self._epochs = number
        session.start({"epochs": number})
        self._continue()
        per_epoch = session.order.steps_per_epoch
        session.extensions[Recording].plan(epochs=number - session.step // per_epoch)
        self._schedule.open()
        for epoch in range(session.step // per_epoch, number):
            yield epoch
            if session.stopping:
                break
            session.begin_epoch(epoch + 1)
            if epoch + 1 < number:
                self._schedule.end_step(session.step, ends_epoch=True)
        self._schedule.end()
        session.any_worker(False)  # none leaves before the others have come here
        session.close()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def begin_step(self) -> None:
        """Begins a step, whose batch the loader passes on."""
        if self._epochs is None:
            raise ValueError("iterate over the loader in `for epoch in balancer.epochs(number):`")
        self._running = self.session.step
        weights = (each.detach().float().cpu().numpy() for each in self._model.parameters())
        self.session.extensions[WeightComparison].compare(lambda: weights)
        self.session.begin_step()

    def end_step(self) -> None:
        """Ends a step, whose batch the script has used."""
        session, running, self._running = self.session, self._running, None
        if running == session.step:
            raise ValueError(
                f"no gradients were summed for the batch of step {running}: call backward once for "
                "each batch, through the DistributedDataParallel model and without no_sync()"
            )
        if session.step % session.order.steps_per_epoch:  # else `epochs` ends the epoch
            self._schedule.leave_if_preempted()
            self._schedule.end_step(session.step)

    # Failures and checkpoints

    def _start_heartbeat(self) -> Heartbeat | None:
        session, given = self.session, self.session.options
        if session.workers == 1:
            return None
        heartbeat = Heartbeat(Board(self._group), session.rank, session.workers, session.activity)
        heartbeat.use_times(given.silence_seconds, given.limit_seconds)
        heartbeat.start()
        end_with_peers(heartbeat.leave)
        return heartbeat

    def _continue(self) -> None:
        """Continues from the newest checkpoint, which worker 0 reads."""
        if self._folder is None:
            return
        found = None
        if self.session.rank == 0:
            schedule.claim_folder(self._folder)
            found = newest_checkpoint(self._folder)
        if found is not None:
            check_same_job(self._folder, found.facts, self.session.facts())
            print_message(f"continues after step {found.step} from {self._folder}")
        told = [found]
        distributed.broadcast_object_list(told, 0, self._group.group, self._device)
        if (found := told[0]) is not None:
            self.session.load_state(found.state, found.arrays)
            states = torch.load(io.BytesIO(found.arrays["torch"]), "cpu", weights_only=True)
            for each, state in zip(self._kept, states, strict=True):
                each.load_state_dict(state)

    def _collect(self, writes: bool) -> Checkpoint | None:
        """Returns the state of the job, on the worker that writes it; a collective."""
        with self.session.excluded_wait():
            state, arrays = self.session.save_state()
            if not writes:
                return None
            file = io.BytesIO()
            torch.save([each.state_dict() for each in self._kept], file)
            arrays["torch"] = np.frombuffer(file.getvalue(), np.uint8)
            return Checkpoint(self.session.step, self.session.facts(), state, arrays)

    def _report_exit(self, failed: bool) -> None:
        outcome = "could not be written" if failed else f"is in {self._folder}"
        if self.session.rank == 0:
            why = f"leaves after step {self.session.step}, because a worker got SIGTERM"
            print_message(f"{why}; the checkpoint {outcome}")
