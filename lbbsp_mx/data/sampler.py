"""Draw: takes the samples that the plan of each step gives to this worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.gluon.data import Sampler

from lbbsp_core.order import Indices, Order, SampleStream
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_core.validate import require_flag
from lbbsp_core.work import Work
from lbbsp_mx.data.drawing import EpochDrawer, check_same_data

Data: TypeAlias = "int | Sequence[Any]"
"""A data set with a length and samples by number, or its number of samples."""


class Draws:
    """Loader batches that a sampler has handed out, compared with the steps that were made.

    A loader that prefetches is ahead of the steps by a constant number of batches. If gradients
    accumulate over more batches than planned, or a batch has no step, it moves further ahead. The
    first step of an epoch cannot tell, because the depth of the loader is unknown, nor can a
    sampler that another thread reads. Parts are multiples of `unit`, this worker's devices, where
    they can be.
    """

    def __init__(self, parts: int = 1, unit: int = 1) -> None:
        self.parts, self.unit = parts, unit
        self._first: int | None = None
        self._drawn = 0
        self._depth: int | None = None
        self._thread = 0

    def begin(self, step: int) -> None:
        """Starts to count the batches of an epoch, or of its rest, from global step `step`."""
        self._first, self._drawn, self._depth = step, 0, None

    def count(self) -> None:
        """Counts a loader batch."""
        self._drawn += 1
        self._thread = threading.get_ident()

    def check(self, step: int, params: Sequence[gluon.Parameter]) -> int:
        """Checks accumulated gradients; returns the number of batches that have had no step."""
        adding = self.check_adding(params)
        if self._first is None or step < self._first:
            return 0
        ahead = self._drawn - self.parts * (step - self._first)
        if 1 < self.parts > ahead:
            raise ValueError(
                f"step must follow {self.parts} batches of the loader, as accumulate = "
                f"{self.parts} says, got {ahead}: call it once after every {self.parts} batches"
            )
        if self._thread != threading.get_ident():
            return 0
        self._depth = ahead if self._depth is None else self._depth
        unused = max(0, ahead - self._depth)
        if unused and any(adding):
            more = self.parts + unused
            raise ValueError(
                f"step must follow {self.parts} batches of the loader, got {more} since the last "
                f"step: to accumulate the gradients of {more} batches in one step, create the "
                f"trainer with accumulate={more}; global_batch_size counts the samples of all"
            )
        return unused

    def require_steps(self, step: int, params: Sequence[gluon.Parameter]) -> None:
        """Raises ValueError if a batch has had no step, or a step has no batch."""
        unused = self.check(step, params)
        if self._first is not None and 0 <= step - self._first >= self._drawn // self.parts:
            raise ValueError(
                f"step {step} has no new batch, because the last one has had its step: for further "
                "sums of its gradients, as in SAM, create a trainer of the same parameters with "
                "beside=trainer, and call allreduce_grads(batch_size=...) of that one"
            )
        if unused:
            raise ValueError(
                f"the batch of step {step} was drawn, and no step was made before the next one: "
                "call step for every batch on all workers (zero_grad() before it leaves out "
                "gradients that are not finite); to add up the gradients of several batches, pass "
                "accumulate to lbbsp_mx.Trainer; try out learning rates without batch_sampler"
            )

    def check_adding(self, params: Sequence[gluon.Parameter]) -> list[bool]:
        """Returns which parameters accumulate gradients."""
        adding = [param.grad_req == "add" for param in params if param.grad_req != "null"]
        if self.parts > 1 and not all(adding):
            raise ValueError(
                f"accumulate = {self.parts} needs gradients that accumulate, and grad_req='write' "
                "would keep those of the last batch: call "
                "net.collect_params().setattr('grad_req', 'add'), and zero_grad() after each step"
            )
        return adding

    def cut(self, samples: Indices) -> list[Indices]:
        """Cuts the samples of a worker's step into its parts."""
        size, parts = len(samples), self.parts
        if size < parts:
            raise ValueError(
                f"the plan must give each worker at least accumulate = {parts} samples, got "
                f"{size}: let the policy respect the limits, or lower accumulate"
            )
        grain = self.unit if size % self.unit == 0 and size >= parts * self.unit else 1
        return np.split(samples, [size // grain * i // parts * grain for i in range(1, parts)])


class BatchSampler(Sampler):
    """Batches of this worker, for ``DataLoader(dataset, batch_sampler=...)``.

    Each iteration is an epoch of an order that is the same on all workers; each sample of the
    order occurs exactly once in it, for any plans. Batches are drawn by the number of their
    *step*: a loader that prefetches uses older plans, the same ones on all workers, and neither
    repeats nor drops a sample. `lbbsp_mx.Trainer.batch_sampler` creates it.
    With ``accumulate=k``, the samples of a step are k consecutive batches, so that an epoch has k
    batches per step.

    Args:
        session: Session of the training.
        order: Samples of each step.
        draws: Counts the batches.
        drawer: Draws each epoch of the order, if it does not follow from a seed.
    """

    def __init__(
        self,
        session: PipelinedSession,
        order: Order,
        draws: Draws,
        drawer: EpochDrawer | None = None,
    ) -> None:
        self._session, self._draws, self._drawer, self.order = session, draws, drawer, order
        self.running: Spans | None = None
        self.before_draw: Callable[[], None] | None = None  # called when an iteration begins

    def __len__(self) -> int:
        return self.order.steps_per_epoch * self._draws.parts

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches of the next epoch, or of the rest of an epoch after `load_states`.

        Raises:
            RuntimeError: Another epoch was started, or a state loaded, so that the batch belongs
                to no step.
        """
        if self.before_draw is not None:
            self.before_draw()
        spans, length = Spans(), self.order.steps_per_epoch
        for step in self._session.epoch_steps(self.order):
            if self.running is not spans:  # the first step of an epoch, or of its rest
                epoch, done = divmod(self._session.step_of_order(step), length)
                if self._drawer is not None:
                    self._drawer.draw(epoch)
                self._draws.begin(step)
                spans.steps, self.running = range(step, step + length - done), spans
            indices = self._session.local_indices(step)
            spans[step] = self._session.local_span(step)
            for part in self._draws.cut(indices):
                self._draws.count()
                yield part.tolist()


class Spans(dict[int, tuple[int, int]]):
    """Places in the order of the batches drawn in an epoch, by global step."""

    steps = range(0)


class CompanionSampler(BatchSampler):
    """Batches of another data set, drawn in the same steps as those of a `BatchSampler`, `leader`.

    In each step it draws as many samples as the leader, at the same place in an order of its own,
    whose passes follow each other whatever the epochs are. If its data set has the length, the seed
    and `shuffle` of the other one, its samples have the same numbers.
    """

    def __init__(
        self, session: PipelinedSession, leader: BatchSampler, stream: SampleStream
    ) -> None:
        super().__init__(session, leader.order, leader._draws)
        self._leader, self._stream = leader, stream

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches of the epoch that the leader has begun.

        Raises:
            RuntimeError: The leader is not yet, or no longer, in the step of the batch.
        """
        spans = self._leader.running
        if spans is None or spans is self.running:
            raise _not_leading("no new epoch has begun")
        self.running = spans
        for step in spans.steps:
            if spans is not self._leader.running:
                raise _not_leading("another epoch has begun")
            if step not in spans:
                raise _not_leading(f"step {step} has not been drawn")
            begin, count = spans[step]
            for part in self._draws.cut(self._stream.take(begin, begin + count)):
                yield part.tolist()


def make_sampler(
    session: PipelinedSession,
    draws: Draws,
    data: Data,
    seed: int | None,
    shuffle: bool,
    sampler: Iterable[object] | None = None,
    beside: BatchSampler | None = None,
    work: npt.ArrayLike | None = None,
    drop_last: bool = False,
) -> BatchSampler:
    """Creates the sampler of a trainer; see `lbbsp_mx.Trainer.batch_sampler`.

    With `drop_last`, an order by the seed has no short last steps.
    """
    require_flag("shuffle", shuffle)
    num_samples = check_same_data(session, data)
    if beside is not None:
        if work is not None:
            raise ValueError(
                "work must be left out with beside=, because the sampler follows the cuts of the "
                "other one: pass to that one the work of both samples together"
            )
        if sampler is not None or type(beside) is not BatchSampler:
            raise ValueError(
                f"beside must be a sampler of trainer.batch_sampler for another data set, without "
                f"sampler=, got beside={beside!r}, sampler={sampler!r}"
            )
        seed = session.options.seed if seed is None else seed
        session.finish_barrier()
        facts = {"number of samples beside": num_samples, "seed beside": seed}
        handshake.compare(session.collectives, {**facts, "shuffle beside": int(shuffle)})
        return CompanionSampler(session, beside, SampleStream(num_samples, seed, shuffle))
    drawer = None
    if sampler is None:
        made: Order = session.make_order(
            num_samples, seed, shuffle=shuffle, drop_last=drop_last, work=work
        )
    elif seed is not None or not shuffle:
        raise ValueError(
            f"a sampler decides the order itself, got seed={seed!r} and shuffle={shuffle!r} "
            "besides: leave them out"
        )
    else:
        drawer = EpochDrawer(session, sampler, num_samples)
        drawer.order.work = None if work is None else Work(work, num_samples)
        made = drawer.order
    session.use_order(made)
    return BatchSampler(session, made, draws, drawer)


def _not_leading(state: str) -> RuntimeError:
    return RuntimeError(
        f"a sampler created with beside= follows the other sampler, of which {state}: iterate over "
        "the other loader first, as in zip(loader, this_loader), with the same num_workers, "
        "prefetch and thread_pool for both"
    )
