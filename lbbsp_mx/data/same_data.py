"""Check that all workers have the whole data set, and none only a part of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from lbbsp_core.runtime.exchange.digest import Digest, check_samples
from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_core.runtime.loop.pipelined import PipelinedSession


def check_same_data(session: PipelinedSession, data: int | Sequence[Any]) -> int:
    """Checks that the workers have the same data set; a collective, if `data` is no integer.

    Of the samples, the first, the middle and the last are compared; not if a sample that is read
    twice differs (random transforms), or cannot be converted to numbers.

    Args:
        session: Session of the training.
        data: The data set, or its number of samples, which is not compared here.

    Returns:
        Number of samples.

    Raises:
        DisagreementError: The data sets differ; names the remedy.
        TypeError: `data` has no length.
    """
    if isinstance(data, (int, np.integer)):
        return int(data)
    if not hasattr(data, "__len__"):
        raise TypeError(
            f"data must be a data set with a length, or its number of samples, got {data!r}"
        )
    if session.workers > 1:
        session.finish_barrier()
        _compare(session, data)
    return len(data)


def _compare(session: PipelinedSession, data: Sequence[Any]) -> None:
    digests = _digests(data)
    rows = session.collectives.all_gather([len(data), int(digests is not None)])
    lengths = [row[0] for row in rows]
    if len(set(lengths)) > 1:
        raise DisagreementError(
            f"workers have data sets of {lengths} samples: pass the whole data set to all workers "
            "(no SplitSampler, num_parts or data[rank::n]); the plan gives each worker its part"
        )
    if all(row[1] for row in rows):
        check_samples(session.collectives, digests or [])


def _digests(data: Sequence[Any]) -> list[Digest] | None:
    """Returns digests of three samples; None if they cannot be compared."""
    count = len(data)
    states = random.getstate(), np.random.get_state()  # reading may draw random numbers
    try:
        found = []
        for number in sorted({0, count // 2, count - 1} if count else ()):
            once, again = (Digest.of(list(_arrays(data[number]))) for _ in range(2))
            if not once.is_close(again):
                return None
            found.append(once)
        return found
    except Exception:  # training will show what is wrong with the data set
        return None
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _arrays(sample: Any) -> Iterator[np.ndarray]:
    """Yields the arrays of a sample.

    Raises:
        TypeError: A part of it is no number.
    """
    if isinstance(sample, (tuple, list)):
        for each in sample:
            yield from _arrays(each)
        return
    array = sample.asnumpy() if isinstance(sample, mx.nd.NDArray) else np.asarray(sample)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"a sample of type {array.dtype}")
    yield array
