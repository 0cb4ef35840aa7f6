"""Agreement: parameters and settings of the optimizer that are equal on all workers.

Optimizers run in the workers, so that models stay equal only if they start equal and every worker
makes the same updates. Parameters are compared before the first batch is drawn, and in the first
step; settings of the optimizer, such as the learning rate, in every step.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

from lbbsp_core.runtime.exchange.collectives import gather_bytes, weighted_mean
from lbbsp_core.runtime.exchange.digest import Digest
from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_core.runtime.extensions.settings import Setting, Settings, SettingsComparison
from lbbsp_core.runtime.extensions.weights import WeightComparison
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx.fence import wait_for
from lbbsp_mx.parameters import (
    exchange_whole,
    is_sparse,
    is_statistic,
    learning,
    network_of,
    settings_of,
)

logger = logging.getLogger("lbbsp.mx")

REMEDY: Final = (
    "change the optimizer on all workers alike; where a rate follows a metric, let it follow "
    "trainer.mean_over_workers(metric), which is the same on all workers"
)

_DRAW, _STEP, _BROADCAST = range(3)
_CALLS = ("draws its first batch", "makes its first step", "calls broadcast_parameters")

_VARYING = {"kwargs", "learning_rate", "rescale_grad", "param_idx2name", "begin_num_update"}


class _Row(NamedTuple):
    """What each worker tells the others about its parameters.

    Args:
        call: What it does now: an index of `_CALLS`, and so many times more the trainer's number.
        bits: Hash of the bits of all parameters that have values.
        digest: Digest of the parameters that are learned, as an integer.
        others: Digest of parameters of the network that the trainer does not have; 0 before a step.
    """

    call: int
    bits: int
    digest: int
    others: int


class Agreement:
    """Keeps the models of the workers equal, for one trainer.

    `leader` is that of the trainer beside which this one steps, with the same session: what must be
    equal in every step is compared in its steps.
    """

    def __init__(self, trainer: gluon.Trainer, leader: Agreement | None = None) -> None:
        session: PipelinedSession = trainer._session
        self._trainer, self._session = trainer, session
        self._compared = [self] if leader is None else []
        self.number = 0 if leader is None else len(leader._compared)
        self._leader = leader
        self._has_drawn = self._has_stepped = session.workers == 1
        self._thread = threading.get_ident()
        self._hyperparameters = _hyperparameters(trainer.optimizer)
        self._learned = learning(trainer._params)

    def join(self) -> None:
        """Lets what must be equal be compared in the steps of the leader, if there is one."""
        if self._leader is not None:
            self._leader._compared.append(self)

    # Parameters

    def before_draw(self) -> None:
        """Sends the parameters of worker 0 before the first batch is drawn, if any differ.

        Parameters that were initialised or loaded after the trainer was created then reach all
        workers. Other threads than that of the trainer draw without a comparison, because their
        collectives could be out of order.
        """
        for other in self._compared[1:]:
            other.before_draw()
        if self._has_drawn or self._has_stepped or threading.get_ident() != self._thread:
            return
        self._has_drawn = True
        rows = self._gather(_DRAW)
        are_sent = all(param._deferred_init for param in self._trainer._params_to_init)
        if are_sent and all(row == rows[0] for row in rows):
            return
        ranks = _differing([row.digest for row in rows])
        if ranks and self._session.rank == 0:
            logger.warning(
                "parameters of %s have been changed since the trainer was created: they are "
                "replaced by those of worker 0 before the first batch",
                _workers(ranks),
            )
        self._broadcast()

    def broadcast(self) -> None:
        """Sends the parameters of worker 0 to all workers; a collective between two steps."""
        if self._session.workers == 1:
            return
        self._session.finish_barrier()
        with self._session.excluded_wait():
            self._gather(_BROADCAST)
            self._broadcast()

    def begin_step(self) -> None:
        """Compares parameters and settings; call it in each step, before the sums."""
        if self._session.workers == 1:
            return
        if not self._has_stepped:
            self._has_stepped = True
            with self._session.excluded_wait():
                self._check_first()
        if self._compared:
            self._session.extensions[SettingsComparison].compare(self._settings, REMEDY)
            now = ends_epoch(self._session, self._session.step)
            self._session.extensions[WeightComparison].compare(self._weights, now=now)

    def end_step(self, step: int) -> None:
        """Compares what the last step of an epoch has exchanged, since no step may follow."""
        if self._compared and self._session.workers > 1 and ends_epoch(self._session, step):
            self._session.finish_barrier()
            self._session.extensions[SettingsComparison].check(REMEDY)
            self._session.extensions[WeightComparison].check()

    def close(self) -> None:
        """Reports a difference in the last step, because the script has ended."""
        step = self._session.extensions[SettingsComparison].disputed
        if step is not None:
            logger.error(
                "workers have different learning rates or other settings of the optimizer in the "
                "last step, step %d, so that their models are different: %s",
                step,
                REMEDY,
            )

    def _check_first(self) -> None:
        """Compares parameters in the first step, for which gradients have been computed already.

        Differences up to rounding do not matter for the gradients, and are removed.
        """
        rows = self._gather(_STEP)
        if ranks := _differing([row.digest for row in rows]):
            raise DisagreementError(
                f"parameters of {_workers(ranks)} differ from those of worker 0 in the first "
                "step, when gradients have been computed by them: load or initialise parameters "
                "on all workers alike, or before the trainer is created, or call "
                "trainer.broadcast_parameters() before the first step"
            )
        if ranks := _differing([row.others for row in rows]):
            names = ", ".join(param.name for param in self._others())
            raise DisagreementError(
                f"parameters of the network that the trainer does not have ({names:.200}) differ "
                f"on {_workers(ranks)} from those of worker 0: pass them to the trainer as well, "
                "with grad_req='null' if they are not to be trained"
            )
        if any(row.bits != rows[0].bits for row in rows):
            self._broadcast()

    def _others(self) -> list[gluon.Parameter]:
        """Returns further parameters of the network, without statistics of its layers."""
        ids = set(map(id, self._trainer._params))
        params = [param for param in network_of(self._trainer._params) if id(param) not in ids]
        return [param for param in params if param._data is not None and param._differentiable]

    def _gather(self, call: int) -> list[_Row]:
        """Tells the others what this worker does now, and returns what each of them tells."""
        hasher = blake2b(digest_size=6)

        def learned() -> Iterator[npt.NDArray[Any]]:
            for number, param in enumerate(self._trainer._params):
                if not param._deferred_init:
                    array = np.ascontiguousarray(param.list_data()[0].asnumpy())
                    hasher.update(array.data)
                    if number in self._learned:
                        yield array

        other_params = self._others() if call == _STEP else []
        _wait_for_readers([*self._trainer._params, *other_params])
        digest = Digest.of(learned()).to_integer()
        bits = int.from_bytes(hasher.digest(), "big")
        of_others = Digest.of(param._data[0].asnumpy() for param in other_params).to_integer()
        row = _Row(call + self.number * len(_CALLS), bits, digest, of_others)
        rows = [_Row(*numbers) for numbers in self._session.collectives.all_gather(row)]
        for rank, other in enumerate(rows):
            if other.call != rows[0].call:
                raise DisagreementError(
                    f"worker 0 {_named(rows[0].call)} while worker {rank} {_named(other.call)}: "
                    "all workers must draw batches and call their trainers in the same order"
                )
        return rows

    def _broadcast(self) -> None:
        self._share_shapes()
        waiting = {id(param) for param in self._trainer._params_to_init}
        self._trainer._send_known()  # sends those that the servers do not know yet
        store = self._trainer._store
        for number, param in enumerate(self._trainer._params):
            if id(param) in waiting or param._deferred_init:
                continue
            if is_sparse(param):
                exchange_whole(param, partial(store.broadcast, number))
            else:
                store.broadcast(number, param.list_data()[0], param.list_data())

    def _share_shapes(self) -> None:
        """Creates parameters that another worker has created, because it knows their shapes."""
        params = self._trainer._params
        own_shapes = [None if param._deferred_init else list(param.shape) for param in params]
        texts = gather_bytes(self._session.collectives, json.dumps(own_shapes).encode())
        for param, *shapes in zip(params, *map(json.loads, texts), strict=True):
            known_shapes = [shape for shape in shapes if shape is not None]
            if known_shapes and param._deferred_init:
                vars(param).pop("_finish_deferred_init", None)  # which would send it at once
                param.shape = tuple(known_shapes[0])
                param._finish_deferred_init()

    # Settings and metrics

    def mean(self, value: Any, weight: float) -> float | npt.NDArray[np.float64]:
        """Returns the weighted mean of numbers over workers; a collective between two steps."""
        if isinstance(value, mx.metric.EvalMetric):
            value, weight = value.get()[1], value.num_inst
        numbers = np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value, np.float64)
        self._session.finish_barrier()
        with self._session.excluded_wait():
            means = weighted_mean(self._session.collectives, numbers.ravel().tolist(), weight)
        return np.reshape(means, numbers.shape) if numbers.ndim else means[0]

    def _weights(self) -> Iterator[npt.NDArray[Any]]:
        """Returns the weights that must be equal on all workers, once the batch is computed."""
        params = [param for agreement in self._compared for param in agreement._trainer._params]
        equal = [p for p in params if p._data is not None and not is_statistic(p)]
        _wait_for_readers(equal)
        return map(_bounded, equal)

    def _settings(self) -> Settings:
        """Returns what updates depend on, besides the gradients, of all trainers of the session."""
        several = len(self._compared) > 1
        return {
            f"{name} of trainer {number}" if several else name: value
            for number, agreement in enumerate(self._compared)
            for name, value in agreement._own_settings().items()
        }

    def _own_settings(self) -> dict[str, Setting]:
        trainer, optimizer = self._trainer, self._trainer.optimizer
        updates, schedule = optimizer.num_update, optimizer.lr_scheduler
        settings: dict[str, Setting] = {
            # The rate of the coming update: a schedule may not be defined for update 0.
            "learning rate": float(optimizer.lr if schedule is None else schedule(updates + 1)),
            "number of updates": updates,
            "rescale_grad": float(trainer._scale),
            **settings_of(trainer._params, self._learned),
        }
        hyperparameters = ((name, getattr(optimizer, name, None)) for name in self._hyperparameters)
        return settings | {k: v for k, v in hyperparameters if isinstance(v, bool | int | float)}


def ends_epoch(session: PipelinedSession, step: int) -> bool:
    """Returns whether a global step is the last one of its epoch."""
    order = session.order
    return order is not None and session.step_of_order(step + 1) % order.steps_per_epoch == 0


def _named(call: int) -> str:
    number, kind = divmod(call, len(_CALLS))
    return _CALLS[kind] + (f" of trainer {number}" if number else "")


def _differing(values: Sequence[int]) -> list[int]:
    """Returns the ranks whose parameters differ from those of worker 0 by more than rounding."""
    digests = list(map(Digest.from_integer, values))
    return [rank for rank, digest in enumerate(digests) if not digest.is_close(digests[0])]


def _wait_for_readers(params: Iterable[gluon.Parameter]) -> None:
    """Waits for the gradients of parameters, whose operations read the parameters.

    A convolution of oneDNN keeps the weights that it reads in blocks of channels meanwhile: whoever
    reads them then gets other values.
    """
    wait_for([param.list_grad() for param in params if param._grad is not None])


def _bounded(param: gluon.Parameter) -> npt.NDArray[Any]:
    """Returns the values of a parameter; a mask of -1e9 would hide differences of the others."""
    values: npt.NDArray[Any] = param.list_data()[0].asnumpy()
    return np.arctan(values) if param.grad_req == "null" else values


def _hyperparameters(optimizer: mx.optimizer.Optimizer) -> list[str]:
    """Returns the names of the optimizer's arguments, which it keeps under the same names."""
    kinds = type(optimizer).__mro__
    names = {name for kind in kinds for name in inspect.signature(kind).parameters} - _VARYING
    return sorted(name for name in names if hasattr(optimizer, name))


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
