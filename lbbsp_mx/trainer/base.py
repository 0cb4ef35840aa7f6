"""Bases of the trainers: `OwnTrainer` of all of them, and `StoreTrainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import mxnet as mx
from mxnet import gluon

from lbbsp_core.runtime.asynchronous.async_session import AsyncSession
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx import cluster
from lbbsp_mx.parameters import copy_rows, exchange_whole, is_sparse
from lbbsp_mx.store.kvstore import SharedStore
from lbbsp_mx.store.trainer_store import TrainerStore
from lbbsp_mx.trainer.steps import Steps


class UnavailableError(ValueError, AttributeError):
    """Error for what a trainer cannot do; also an AttributeError, which `hasattr` expects."""


class Unavailable:
    """An attribute of a class that has it for its base or for its siblings, and cannot do it."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __get__(self, owner: object, cls: type) -> NoReturn:
        """Raises an error that names the alternative."""
        raise UnavailableError(self._reason)


class OwnTrainer(gluon.Trainer):
    """Gluon's trainer with a session, which measures the steps of this worker."""

    _session: PipelinedSession | AsyncSession

    def exclude_step(self) -> None:
        """Excludes the running step from learning, because it contains other work."""
        self._session.exclude_step()

    @property
    def _loss_scaler(self) -> Any:
        """Loss scaler of mixed precision, or None."""
        return getattr(self, "_amp_loss_scaler", None)

    def __deepcopy__(self, memo: dict[int, object]) -> OwnTrainer:
        """Returns itself: the parameters of a copied network refer to the trainer."""
        return self


class StoreTrainer(OwnTrainer):
    """Gluon's trainer, with the methods that it calls itself.

    Several workers exchange parameters and sums over `_store`; of a single one, gluon's own code
    creates the store, sums over devices and updates, with all of its options.
    """

    mean_loss: bool
    kvstore: SharedStore
    _session: PipelinedSession
    _steps: Steps
    _store: TrainerStore
    _kvstore: Any  # MXNet's, or `_store`
    _kvstore_params: dict[str, Any]
    _params_to_init: list[gluon.Parameter]

    def _init_kvstore(self) -> None:
        """Creates gluon's store; states that were loaded before are those of its optimizer."""
        if self._store.workers > 1:
            self._kvstore, self._distributed = self._store, True
            self._update_on_kvstore, self._kv_initialized = False, True
            return
        config = self._kvstore_params
        store, updates = config["kvstore"], config["update_on_kvstore"]
        if isinstance(store, SharedStore):  # trainers that share it have keys of their own
            store = store.empty_copy()
        if cluster.in_cluster() and not self._contains_sparse_weight:
            updates = False  # as with several workers
        self._kvstore_params = {"kvstore": store, "update_on_kvstore": updates}
        try:
            super()._init_kvstore()
        finally:
            self._kvstore_params = config
        if self._update_on_kvstore and self._updaters[0].states:
            updater, own_updater = self._kvstore._updater, self._updaters[0]
            updater.states, own_updater.states = own_updater.states, {}
            updater.states_synced = dict.fromkeys(updater.states, False)

    def _row_sparse_pull(self, param: gluon.Parameter, out: Any, *rows: Any, **more: Any) -> None:
        if self._store.workers == 1:
            super()._row_sparse_pull(param, out, *rows, **more)
        else:
            copy_rows(param, out)

    def _init_params(self) -> None:
        """Sends parameters whose shapes are known, and connects layers that normalise over all."""
        if self._store.workers == 1:
            super()._init_params()
            return
        waiting = list(self._params_to_init)
        sparse = [param for param in waiting if is_sparse(param) and not param._deferred_init]
        self._params_to_init = [param for param in waiting if param not in sparse]
        super()._init_params()
        for param in sparse:
            exchange_whole(param, partial(self._store.broadcast, self._param2idx[param.name]))
        self._connect(param for param in waiting if param not in self._params_to_init)

    def _send_known(self) -> None:
        """Sends parameters that have a shape by now, if there is a store; a collective."""
        if self._kv_initialized:
            self._init_params()

    @property
    def _state_updaters(self) -> list[mx.optimizer.Updater]:
        """Updaters that keep the states: that of a store that updates, or those of the devices.

        A store that will update, and does not exist yet, takes over those of the first device.
        """
        if getattr(self, "_update_on_kvstore", False):
            return [self._kvstore._updater]
        return list(self._updaters)

    def _connect(self, params: Iterable[gluon.Parameter]) -> None:
        """Connects the layers of these parameters that normalise over all workers."""
        for param in params:
            if hasattr(param, "lbbsp_synchronised"):
                options = (len(self._contexts), self.mean_loss, self._steps.draws.parts)
                param.lbbsp_synchronised.connect(self._store, self._session, *options)
                self._steps.pauses = True

    def _finish(self, param: gluon.Parameter, finish: Callable[[], None]) -> None:
        """Sends a parameter of worker 0 when its shape has become known."""
        deferred = bool(param._deferred_init)
        finish()
        if deferred:
            vars(param).pop("_finish_deferred_init", None)
            self._init_params()
