"""The session of a trainer: `start_session`; without a global batch size, `Unplanned`."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, cast

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Proportional
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.runtime.exchange.handshake import compare_facts
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_core.runtime.options.naming import limits_by_rank
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_mx.devices import devices_of
from lbbsp_mx.reliability.parts import TrainerParts
from lbbsp_mx.store.native import runtime

logger = logging.getLogger("lbbsp.mx")


def start_session(
    trainer: TrainerParts, total: int | None, options: SessionOptions, parts: int
) -> PipelinedSession:
    """Creates the session of a trainer with the global batch size `total`.

    `parts` are the loader batches of a step.
    """
    store, contexts = trainer.store, trainer.contexts
    if total is None:
        return cast(PipelinedSession, Unplanned(store))
    options = options.for_workers(store.workers, total)
    if options.granularity is None:
        options = with_granularity(options, store, total, len(contexts), parts)
    facts = {"parameters": len(trainer.params), "accumulate": parts}
    devices = devices_of(contexts)
    return runtime().open_session(store, total, options, facts=facts, parts=parts, devices=devices)


def with_granularity(
    options: SessionOptions, collectives: Collectives, total: int, devices: int, parts: int
) -> SessionOptions:
    """Returns the options with a granularity for which all devices get equal shares.

    Workers may have different numbers of devices: it is a multiple of each; a collective.
    """
    rows, workers = [[parts, devices]], collectives.workers
    if workers > 1:
        rows = collectives.all_gather(rows[0])
        compare_facts(["accumulate"], [row[:1] for row in rows])
    granularity = parts * math.lcm(*(count for _, count in rows))
    if granularity == 1:
        return options
    each = limits_by_rank(options.limits, workers)
    limits = [replace(bounds, minimum=max(bounds.minimum, parts)) for bounds in each]
    with suppress(ValueError):  # there is no such plan
        allocate([Proportional(1.0)] * workers, total=total, limits=limits, granularity=granularity)
        if total % granularity == 0 and total >= granularity * workers:
            return replace(options, granularity=granularity)
    logger.warning(
        "global_batch_size = %d cannot be divided among %d workers in multiples of %d, the number "
        "of devices times accumulate: split batches with even_split=False, or change it",
        *(total, workers, granularity),
    )
    return options


class _UnplannedError(ValueError, AttributeError):
    """Error for what needs a plan; also an AttributeError, which `hasattr` expects."""


def _nothing(*_: object) -> None:
    """Does nothing, because there are no other workers, and nothing is learned or recorded."""


class Unplanned:
    """Stands for the session of a trainer in one process that has no global batch size.

    Steps are counted, and a request to stop works. What needs a plan raises an error.
    """

    rank, workers, order, step = 0, 1, None, 0
    exclude_step = finish_barrier = flush = load_state = staticmethod(_nothing)
    excluded_wait = staticmethod(nullcontext)
    facts = staticmethod(dict)  # a state of the optimizer fits any data

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._stopping = Stopping(cast(Any, self))
        self.extensions = {Stopping: self._stopping}
        self.request_stop = self._stopping.request

    def __getattr__(self, name: str) -> Any:
        """Refuses all that needs a plan."""
        raise _UnplannedError(
            "batch_sampler, sizes, rows and checkpoints need the samples per step: pass "
            "global_batch_size to lbbsp_mx.Trainer"
        )

    def end_step(self, *_: object) -> None:
        """Counts a step."""
        self.step += 1
        self._stopping.received(self.step, [self._stopping.offer()], ())

    @property
    def stopping(self) -> bool:
        """Whether `request_stop` was called before the last step ended."""
        return self._stopping.stopping

    def pass_inner(
        self, _number: int, _computed: Any, _summed: Any, size: int, _weight: Any
    ) -> Any:
        """Returns the batch size, because steps have no barrier."""
        return (size,)

    def save_state(self, *, alone: bool) -> tuple[None, dict[str, Any]]:
        """Returns an empty state."""
        return None, {}
