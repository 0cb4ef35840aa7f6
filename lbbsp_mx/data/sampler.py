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


def cut(samples: Indices, parts: int, unit: int) -> list[Indices]:
    """Cuts the samples of a worker's step into parts, multiples of `unit` if that can be."""
    if len(samples) < parts:
        raise ValueError(
            f"the plan must give each worker at least accumulate = {parts} samples, got "
            f"{len(samples)}: let the policy respect the limits, or lower accumulate"
        )
    grain = unit if len(samples) % unit == 0 and len(samples) >= parts * unit else 1
    ends = [len(samples) // grain * (i + 1) // parts * grain for i in range(parts)]
    return np.split(samples, ends[:-1])


def part_sizes(size: int, parts: int, unit: int) -> tuple[int, ...]:
    """Returns the sizes of the parts into which `size` samples are cut."""
    return tuple(len(each) for each in cut(np.arange(size), parts, unit))


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
        drawer: Draws each epoch of the order, if it does not follow from a seed.
        draws: Counts the batches. Defaults to one batch per step.
    """

    def __init__(
        self,
        session: PipelinedSession,
        order: Order,
        drawer: EpochDrawer | None = None,
        draws: Draws | None = None,
    ) -> None:
        self._session = session
        self._draws = draws or Draws()
        self.order = order
        self._drawer = drawer
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
        spans = Spans()
        for step in self._session.epoch_steps(self.order):
            if self.running is not spans:
                self._begin(spans, step)
            indices = self._session.local_indices(step)
            spans[step] = self._session.local_span(step)
            for part in self._parts(indices):
                self._draws.count()
                yield part.tolist()

    def _parts(self, indices: Indices) -> Iterable[Indices]:
        """Cuts the samples of a step into its batches."""
        return cut(indices, self._draws.parts, self._draws.unit)

    def _begin(self, spans: Spans, step: int) -> None:
        """Begins an epoch, or the rest of one, at a global step."""
        in_order = self._session.step_of_order(step)
        epoch, done = divmod(in_order, self.order.steps_per_epoch)
        if self._drawer is not None:
            self._drawer.draw(epoch)
        self._draws.begin(step)
        spans.steps = range(step, step + self.order.steps_per_epoch - done)
        self.running = spans


class Spans(dict[int, tuple[int, int]]):
    """Places in the order of the batches drawn in an epoch, by global step."""

    steps = range(0)


class CompanionSampler(BatchSampler):
    """Batches of another data set, drawn in the same steps as those of a `BatchSampler`.

    In each step it draws as many samples as the other sampler, at the same place in an order of its
    own, whose passes follow each other whatever the epochs are. If its data set has the length,
    the seed and `shuffle` of the other one, its samples have the same numbers.

    Args:
        session: Session of the training.
        leader: Sampler whose steps it follows.
        stream: Samples of the data set by their place in the order.
    """

    def __init__(
        self, session: PipelinedSession, leader: BatchSampler, stream: SampleStream
    ) -> None:
        super().__init__(session, leader.order, draws=leader._draws)
        self._leader, self._stream = leader, stream

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches of the epoch that the other sampler has begun.

        Raises:
            RuntimeError: The other sampler is not yet, or no longer, in the step of the batch.
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
            for part in self._parts(self._stream.take(begin, begin + count)):
                yield part.tolist()


def make_sampler(
    session: PipelinedSession,
    draws: Draws,
    data: Data,
    seed: int | None,
    shuffle: bool,
    sampler: Iterable[object] | None,
    beside: BatchSampler | None,
    drop_last: bool = False,
    work: npt.ArrayLike | None = None,
) -> BatchSampler:
    """Creates the sampler of a trainer; see `lbbsp_mx.Trainer.batch_sampler`.

    With `drop_last`, an order by the seed has no short last steps.
    """
    num_samples = check_same_data(session, data)
    if beside is not None:
        if work is not None:
            raise ValueError(
                "work must be left out with beside=, because the sampler follows the cuts of the "
                "other one: pass to that one the work of both samples together"
            )
        return _companion(session, num_samples, seed, shuffle, sampler, beside)
    if sampler is not None:
        if seed is not None or not shuffle:
            raise ValueError(
                f"a sampler decides the order itself, got seed={seed!r} and shuffle={shuffle!r} "
                "besides: leave them out"
            )
        drawer = EpochDrawer(session, sampler, num_samples)
        drawer.order.work = None if work is None else Work(work, num_samples)
        session.use_order(drawer.order)
        return BatchSampler(session, drawer.order, drawer, draws)
    order = session.make_order(num_samples, seed, shuffle=shuffle, drop_last=drop_last, work=work)
    session.use_order(order)
    return BatchSampler(session, order, draws=draws)


def _companion(
    session: PipelinedSession,
    num_samples: int,
    seed: int | None,
    shuffle: bool,
    sampler: Iterable[object] | None,
    leader: BatchSampler,
) -> CompanionSampler:
    if sampler is not None or type(leader) is not BatchSampler:
        raise ValueError(
            f"beside must be a sampler of trainer.batch_sampler for another data set, without "
            f"sampler=, got beside={leader!r}, sampler={sampler!r}"
        )
    seed = session.options.seed if seed is None else seed
    if session.workers > 1:
        session.finish_barrier()
        facts = {"number of samples beside": num_samples, "seed beside": seed}
        handshake.compare(session.collectives, {**facts, "shuffle beside": int(shuffle)})
    return CompanionSampler(session, leader, SampleStream(num_samples, seed, shuffle))


def _not_leading(found: str) -> RuntimeError:
    return RuntimeError(
        f"a sampler created with beside= follows the other sampler, of which {found}: iterate over "
        "the other loader first, as in zip(loader, this_loader), with the same num_workers, "
        "prefetch and thread_pool for both"
    )
