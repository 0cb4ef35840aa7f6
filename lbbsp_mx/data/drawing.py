"""What workers draw together: epochs of a user's sampler; a comparison of their data sets."""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

import mxnet as mx
import numpy as np
import numpy.typing as npt

from lbbsp_core.order import Indices
from lbbsp_core.runtime.exchange.digest import Digest, check_samples
from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_core.runtime.loop.pipelined import PipelinedCollectives, PipelinedSession
from lbbsp_core.runtime.options import env
from lbbsp_core.sampled_order import SampledOrder, cut

logger = logging.getLogger("lbbsp.mx")

_CHUNK: Final = 1 << 16  # numbers of a message, so that servers keep few and small keys
_WIDTH: Final = 9  # of the rows by which workers compare an epoch


class Drawn(NamedTuple):
    """Samples of an epoch."""

    indices: Indices  # in their order
    ends: Indices  # of the steps in `indices`
    by_batch: bool  # whether the sampler has given the steps
    dropped: int  # number of samples that were dropped


class EpochDrawer:
    """Draws the epochs of an order from a sampler of the whole data set, alike on all workers.

    Raises:
        TypeError: The sampler has no length, or yields no indices.
        ValueError: Its samples or batches do not fit the data set or the global batch.
        DisagreementError: Each worker has a sampler of its own part of the data.
    """

    def __init__(
        self, session: PipelinedSession, sampler: Iterable[object], num_samples: int
    ) -> None:
        self._session, self._sampler, self._num_samples = session, sampler, num_samples
        session.finish_barrier()
        self._total = total = session.balancer.constraints.global_batch_size
        self._ahead: Drawn | None = self._draw_together(None)
        indices, ends, by_batch, dropped = self._ahead
        largest = int(np.diff(ends, prepend=0).max())
        if largest < total:
            raise ValueError(
                f"batches of the sampler must be global batches, got at most {largest} samples "
                f"with global_batch_size = {total}: let it give batches for all workers together"
            )
        if dropped:
            logger.warning(
                "%d samples of the sampler are dropped in each epoch, because their steps have "
                "fewer samples than there are workers (times the parts of an accumulated gradient)",
                dropped,
            )
        self.order = SampledOrder(len(indices), total, len(ends), by_batch, bool(dropped))

    def draw(self, epoch: int) -> None:
        """Draws an epoch of the order, unless it is known from a checkpoint; a collective."""
        arrays = self.order.drawn(epoch)
        if arrays is not None:
            own_epoch: Drawn | None = Drawn(*arrays, self.order.by_batch, 0)
        else:
            own_epoch, self._ahead = self._ahead, None
        drawn = self._draw_together(own_epoch)
        self.order.draw(epoch, drawn.indices, drawn.ends)

    def _draw_together(self, epoch: Drawn | None) -> Drawn:
        """Returns the epoch of worker 0, `epoch` on this one if it is given; a collective."""
        workers, collectives = self._session.workers, self._session.collectives
        try:
            epoch = epoch or self._draw()
        except Exception:  # of the sampler; the other workers wait for its row
            if workers > 1:
                collectives.all_gather([0] * _WIDTH)
            raise
        if workers == 1:
            return epoch
        rows = collectives.all_gather(_row(epoch, workers))
        failed = [rank for rank, row in enumerate(rows) if not row[0]]
        if failed:
            raise DisagreementError(
                f"the sampler of worker {failed[0]} has raised an error, which that worker "
                "shows: give all workers the same sampler of the whole data set"
            )
        _refuse_parts(rows)
        return epoch if all(r == rows[0] for r in rows) else _broadcast(collectives, epoch, rows[0])

    def _draw(self) -> Drawn:
        session = self._session
        most_workers = max(session.workers, env.workers_at_first(session.workers))
        least = most_workers * session.balancer.bounds.parts
        drawn = Drawn(*cut(_items(self._sampler), self._total, least))
        if drawn.indices.max() >= self._num_samples:
            raise ValueError(
                f"the sampler must give indices below {self._num_samples}, the number of samples, "
                f"got {drawn.indices.max()}: pass the data set that the sampler is for"
            )
        return drawn


def _items(sampler: Iterable[object]) -> list[object]:
    """Returns what a sampler gives in an epoch, which must have an end."""
    if not isinstance(sampler, Sized):
        raise TypeError(
            f"a sampler must have a length and be iterable in every epoch, got {sampler!r}: pass a "
            "gluon.data.Sampler or a list"
        )
    items = list(islice(sampler, len(sampler) + 1))
    if samples := getattr(sampler, "_prev", None):  # gluon's BatchSampler
        raise ValueError(
            "epochs of a sampler must have the same length, and last_batch='rollover' moves "
            f"{len(samples)} samples into the next one: let it be 'keep' or 'discard'"
        )
    if len(items) != len(sampler):
        raise ValueError(
            f"a sampler must yield as many items as its length {len(sampler)}, got "
            f"{'more' if len(items) > len(sampler) else len(items)}: correct its __len__"
        )
    return items


def _row(drawn: Drawn, workers: int) -> list[int]:
    """Returns what workers compare of an epoch, and what tells parts of a data set."""
    indices, ends = drawn.indices, drawn.ends
    content = zlib.crc32(ends.tobytes(), zlib.crc32(indices.tobytes()))
    rests = np.unique(indices % workers)
    part = [int(indices.min()), int(indices.max()), int(rests[0]) if len(rests) == 1 else workers]
    return [1, len(indices), len(ends), int(drawn.by_batch), drawn.dropped, content, *part]


def _refuse_parts(rows: list[list[int]]) -> None:
    """Raises if the samplers give separate ranges of the data set, or every n-th sample."""
    *_, smallest, largest, _ = rows[0]
    extents = sorted((row[-3], row[-2]) for row in rows)
    ranges = all(left[1] < right[0] for left, right in pairwise(extents))
    if ranges or sorted(row[-1] for row in rows) == list(range(len(rows))):
        raise DisagreementError(
            "each worker's sampler gives another part of the data set (worker 0 the samples "
            f"{smallest} to {largest}): pass a sampler of the whole data set on all workers"
        )


def _broadcast(collectives: PipelinedCollectives, epoch: Drawn, first: list[int]) -> Drawn:
    """Sends the epoch of worker 0 to all workers; `first` is the row that describes it."""
    _, samples, steps, by_batch, dropped, *_ = first
    count = 2 * (samples + steps)
    # float32 holds 16 bits exactly; only the row of worker 0 counts
    words = np.concatenate([epoch.indices, epoch.ends]).astype("<u4").view("<u2").astype(np.float32)
    width = min(_CHUNK, 1 << (count - 1).bit_length())
    received: list[Any] = []
    with collectives.waiting("for the order of samples of worker 0"):
        for begin in range(0, count, width):
            part = words[begin : begin + width]
            rows = collectives.begin_gather(np.pad(part, (0, width - len(part))), slot="epoch")()
            received.append(rows[0])
    values = np.concatenate(received)[:count].astype("<u2").view("<u4").astype(np.int64)
    return Drawn(values[:samples], values[samples:], bool(by_batch), dropped)


def count_samples(data: int | Sequence[Any]) -> int:
    """Returns the number of samples of a data set, or the number that is given in its place."""
    if isinstance(data, (int, np.integer)):
        return int(data)
    if not hasattr(data, "__len__"):
        raise TypeError(
            f"data must be a data set with a length, or its number of samples, got {data!r}"
        )
    return len(data)


def check_same_data(session: PipelinedSession, data: int | Sequence[Any]) -> int:
    """Checks that the workers have the same data set; a collective, if `data` is no integer.

    Of the samples, the first, the middle and the last are compared; not if a sample that is read
    twice differs (random transforms), or cannot be converted to numbers. Returns their number.
    """
    num_samples = count_samples(data)
    if session.workers == 1 or isinstance(data, (int, np.integer)):
        return num_samples
    session.finish_barrier()
    digests = _digests(data)
    rows = session.collectives.all_gather([num_samples, len(digests)])
    lengths = [row[0] for row in rows]
    if len(set(lengths)) > 1:
        raise DisagreementError(
            f"workers have data sets of {lengths} samples: pass the whole data set to all workers "
            "(no SplitSampler, num_parts or data[rank::n]); the plan gives each worker its part"
        )
    if all(row[1] for row in rows):
        check_samples(session.collectives, digests)
    return num_samples


def _digests(data: Sequence[Any]) -> list[Digest]:
    """Returns digests of three samples; none if they cannot be compared."""
    states = random.getstate(), np.random.get_state()  # reading may draw random numbers
    try:
        numbers = sorted({0, len(data) // 2, len(data) - 1} if len(data) else ())
        once, again = ([Digest.of(list(_arrays(data[i]))) for i in numbers] for _ in range(2))
        return once if all(map(Digest.is_close, once, again)) else []
    except Exception:  # training will show what is wrong with the data set
        return []
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _arrays(sample: Any) -> Iterator[npt.NDArray[Any]]:
    """Yields the arrays of a sample; raises TypeError if a part of it is no number."""
    if isinstance(sample, (tuple, list)):
        for part in sample:
            yield from _arrays(part)
        return
    array = sample.asnumpy() if isinstance(sample, mx.nd.NDArray) else np.asarray(sample)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"a sample of type {array.dtype}")
    yield array
