"""Steps of a balanced store, whose gradients are scaled when pushed, and its data iterator."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import mxnet as mx
from mxnet.io import DataBatch
from mxnet.optimizer import Optimizer

from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx.data.data_iter import PlannedIter
from lbbsp_mx.data.sampler import BatchSampler
from lbbsp_mx.fence import arrays_in, first_element, wait_for
from lbbsp_mx.module.module_data import Source
from lbbsp_mx.store.kvstore import PushedSteps
from lbbsp_mx.store.native import runtime
from lbbsp_mx.store.script_keys import Key, Keys, flat

logger = logging.getLogger("lbbsp.mx")

NO_OPTIMIZER = (
    "a balanced store needs the optimizer on the servers, so that all workers have one model: "
    "pass an lbbsp_mx.KVStore('dist_sync') to Module.fit, and leave MXNET_UPDATE_ON_KVSTORE=0 out"
)


class PushedKeys:
    """Counts how often each key is pushed in a step, and knows it from the steps before.

    A step is complete when each key was pushed as often as in earlier steps, and pulled afterwards
    if it was so then. Other calls, such as pulls by a callback, do not count. The first step is
    never complete, because nothing is known yet.
    """

    def __init__(self) -> None:
        self._usual: Counter[Key] = Counter()
        self._usually_pulled: set[Key] = set()
        self.pushes: Counter[Key] = Counter()
        self._pulled: set[Key] = set()  # after their last push

    @property
    def complete(self) -> bool:
        """True if nothing of what earlier steps had is missing."""
        return bool(self._usual) and (
            self.pushes >= self._usual and self._pulled >= self._usually_pulled
        )

    def push(self, keys: Sequence[Key]) -> None:
        """Counts a push of keys."""
        for key in keys:
            # Keys that are new in this step have no limit before it is complete.
            most = self._usual[key] or (1 if self.complete else math.inf)
            if self.pushes[key] >= most:
                raise ValueError(
                    f"a step has one batch, and the gradient of {key!r} is pushed again after the "
                    "update with it: draw a batch before each update, or call train.reset() before "
                    "updates with other batches, which are not scaled then"
                )
        self.pushes.update(keys)
        self._pulled.difference_update(keys)

    def pull(self, keys: Sequence[Key]) -> None:
        """Notes that keys were pulled."""
        self._pulled.update(key for key in keys if self.pushes[key])

    def end_step(self) -> None:
        """Learns from the step, and begins the next one."""
        self._usually_pulled |= self._pulled - self._usual.keys()
        self._usual |= self.pushes
        self.pushes, self._pulled = Counter(), set()


@dataclass(eq=False)
class ModuleSteps(PushedSteps):
    """Steps of a training loop that draws a batch, pushes gradients and pulls the new weights.

    The store tells what is pushed and pulled, and the iterator when a batch is drawn. A step ends,
    and the barrier of its session begins, when each key was pushed as often as in earlier steps,
    at the latest when the next batch is drawn.
    """

    session: PipelinedSession
    # Samples of a step by which Module divides gradients if the script does not set
    # ``rescale_grad``: the iterator's batch size times the number of workers.
    scheduled: int
    _: KW_ONLY
    mean_loss: bool  # whether gradients are means over a worker's batch
    most_devices: int  # number of devices up to which each has samples in every step
    in_servers: bool  # whether the optimizer must run in the servers

    def __post_init__(self) -> None:
        self._total = self.session.balancer.constraints.global_batch_size
        self._thread = threading.get_ident()
        self._sizes: tuple[int, int] | None = None  # of the last batch: this worker's, and all
        self._has_ended = self._has_closed = False
        self._has_warned = self.session.workers == 1
        self._keys = PushedKeys()
        # Arrays of the last call with these keys in a step
        self._computed: dict[tuple[Key, ...], list[mx.nd.NDArray]] = {}
        self._pulled: dict[tuple[Key, ...], list[mx.nd.NDArray]] = {}

    # What the iterator calls

    def begin_draw(self) -> bool:
        """Ends the step of the batch that was drawn last, and waits for the next plan.

        Returns False, and does nothing, on another thread than the one that has created this.
        """
        if threading.get_ident() != self._thread:
            return False
        if self._has_closed:
            raise RuntimeError(
                "the store is balanced over other data now: draw from the iterator that the last "
                "call of balance has returned, and call balance again to use these data again"
            )
        if self._sizes is not None and not self._keys.pushes:
            if self.session.workers > 1:
                raise ValueError(
                    f"the batch of step {self.session.step} was drawn, and no gradients for it "
                    "were pushed to the store before the next one: pass kvstore=store to "
                    "Module.fit, draw batches in the training loop only, one before each update "
                    "(several, with grad_req='add', are for lbbsp_mx.Trainer(accumulate=...)), and "
                    "evaluate on others"
                )
            self.session.skip_step()  # updates without this store
        self.end()
        self.session.finish_barrier()
        return True

    def drawn(self, local: int) -> None:
        """Begins the step of a batch of `local` samples."""
        self._sizes = local, sum(self.session.sizes)
        self._has_ended = False

    def end(self) -> None:
        """Ends the step if gradients were pushed; a batch that was not used is drawn again."""
        self._end_step()
        self._keys.end_step()
        self._sizes, self._computed, self._pulled = None, {}, {}

    def close(self) -> None:
        """Ends the last step and the session, because the script ends or balances other data."""
        if not self._has_closed:
            self._has_closed = True
            self.end()
            self.session.close()

    # What the store calls

    def scaled(self, key: Keys, value: Any, optimizer: Optimizer | None) -> Any:
        """Returns gradients times the factor that makes the update that of one process.

        Arrays, one per device and for several keys in lists, do not change.
        """
        if self._sizes is None:
            return value
        if self.in_servers and not runtime().optimizer_of:
            raise ValueError(NO_OPTIMIZER)
        if not self._has_warned:
            self._has_warned = True
            _warn_of_batch_norm(optimizer)
        self._check_devices(value if isinstance(key, list | tuple) else [value])
        keys = tuple(flat(key))
        self._keys.push(keys)
        local, total = self._sizes
        factor = (local if self.mean_loss else self._total) / total
        # Module has divided by a size that may be larger than X, to be the same on all workers.
        if optimizer is not None and optimizer.rescale_grad == 1.0 / self.scheduled:
            factor = factor * self.scheduled / self._total
        if not self._has_ended:
            # MXNet's store receives into the arrays that are pushed: waiting for these would
            # include the wait for the other workers.
            arrays = list(arrays_in(value))
            if factor == 1.0:  # pushes of sparse arrays only read them
                arrays = [first_element(a) if a.stype == "default" else a for a in arrays]
            self._computed[keys] = arrays
        return value if factor == 1.0 else _times(factor, value)

    def exchanged(self, key: Keys, pulled: Any = None) -> None:
        """Notes a call of the store, and arrays into which results are pulled, if any are."""
        if self._sizes is None:
            return
        keys = tuple(flat(key))
        if pulled is not None:
            self._keys.pull(keys)
            if not self._has_ended:
                self._pulled[keys] = list(arrays_in(pulled))
        if self._keys.complete:
            self._end_step()

    # Helpers

    def _check_devices(self, values: Iterable[Any]) -> None:
        used = max(len(value) if isinstance(value, list | tuple) else 1 for value in values)
        if used > self.most_devices:
            raise ValueError(
                f"a worker has {used} devices, and a step may have samples for {self.most_devices} "
                f"only: pass devices={used} to balance, so that each device has some in every step"
            )

    def _end_step(self) -> None:
        if self._has_ended or not self._keys.pushes:
            return
        self._has_ended = True
        # Nothing is written to these arrays later in the step.
        computed, pulled = list(self._computed.values()), list(self._pulled.values())
        self.session.end_step(partial(wait_for, computed), partial(wait_for, pulled))


class BalancedIter(PlannedIter):
    """Data iterator of a balanced store; `lbbsp_mx.KVStore.balance` creates it.

    Its own shapes are those of an even batch, from which Module computes ``rescale_grad``; those
    of each batch are in the batch.

    Args:
        steps: Steps of the training.
        batch_size: Samples of an even batch.
        sampler: Yields the indices of each batch.
        source: The data.
        **params: Further arguments of `PlannedIter`.
    """

    def __init__(
        self,
        steps: ModuleSteps,
        batch_size: int,
        sampler: BatchSampler,
        source: Source,
        **params: Any,
    ) -> None:
        super().__init__(sampler, source, **params)
        self._steps = steps
        self.batch_size = self._even = batch_size

    def next(self) -> DataBatch:
        """Ends the step before, and returns this worker's batch of the next one.

        Raises:
            StopIteration: The epoch has ended; `reset` lets the next one begin.
            ValueError: No gradients were pushed for the batch before.
        """
        if not self._steps.begin_draw():
            return _Unplanned()
        batch = super().next()
        self._steps.drawn(self.batch_size)
        self.batch_size = self._even
        return batch

    def reset(self) -> None:
        """Ends the step before, and lets the next batch be the first of the next epoch."""
        self._steps.end()
        super().reset()


class _Unplanned:
    """What another thread gets for a batch: an error in it could leave the training waiting."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            "a balanced iterator must be read by the thread that has called balance, because the "
            "plan of a batch is known when the update before it is made: leave PrefetchingIter and "
            "other threads out"
        )


def _warn_of_batch_norm(optimizer: Optimizer | None) -> None:
    """Warns of batch normalisation, if Module has created the optimizer, with its symbol."""
    info = getattr(optimizer, "sym_info", ())
    nodes = info[0] if info else {}
    for name, node in nodes.items():
        layer = nodes.get(name[:-11] + "fwd", {})  # gluon's variables have no options of the layer
        is_fixed = {**node, **layer}.get("use_global_stats") == "True"
        if name.endswith(("_moving_var", "_running_var")) and not is_fixed:
            logger.warning(
                "BatchNorm normalises each worker's batch separately, so that the result depends "
                "on how the batch is split"
            )
            return


def _times(factor: float, value: Any) -> Any:
    """Returns arrays times a factor, as they are nested."""
    if isinstance(value, mx.nd.NDArray):
        return value * factor
    return [_times(factor, part) for part in value]
