"""Sharing of a checkpoint: the chief reads it, and all workers continue from it."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint, plain_arrays, typed_arrays
from lbbsp_tf.exchange.collectives import MirroredCollectives

_CHUNK = 1 << 24  # bytes; a collective needs several times as much memory


def share_checkpoint(
    read: Callable[[], Checkpoint | None], collectives: MirroredCollectives | None
) -> Checkpoint | None:
    """Returns the checkpoint of the chief on all workers; a collective.

    The workers need no common file system. If the chief cannot read or use it, all raise the same
    `ValueError`.
    """
    found: Checkpoint | None = None
    problem = None
    if collectives is None or collectives.rank == 0:
        try:
            found = read()
        except (OSError, ValueError) as error:
            problem = str(error)
    if collectives is not None:
        found, problem = _shared(found, problem, collectives)
    if problem is not None:
        raise ValueError(problem)
    return found


def _shared(
    found: Checkpoint | None, problem: str | None, collectives: MirroredCollectives
) -> tuple[Checkpoint | None, str | None]:
    arrays, types = plain_arrays(dict(found.arrays) if found else {})
    header = {
        "problem": problem,
        "found": found and [found.step, dict(found.facts), found.state],
        "types": types,
        "arrays": [[name, each.dtype.str, each.shape] for name, each in arrays.items()],
    }
    text = json.dumps(header).encode() if collectives.rank == 0 else b""
    header = json.loads(_broadcast(text, collectives))
    if header["found"] is None:
        return None, header["problem"]
    for name, dtype, shape in header["arrays"]:
        data = arrays[name].tobytes() if name in arrays else b""
        arrays[name] = np.frombuffer(_broadcast(data, collectives), dtype).reshape(shape)
    step, facts, state = header["found"]
    return Checkpoint(step, facts, state, typed_arrays(arrays, header["types"])), None


def _broadcast(data: bytes, collectives: MirroredCollectives) -> bytes:
    """Returns the bytes of the first process; the others pass none."""
    size = collectives.all_gather([len(data)])[0][0]
    padded = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    parts = [
        collectives.broadcast(padded[start : start + _CHUNK]) for start in range(0, size, _CHUNK)
    ]
    return b"".join(part.tobytes() for part in parts)
