"""What comparisons and checkpoints use of a gluon trainer: `TrainerParts`."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet import gluon


class TrainerParts:
    """Parts of a gluon trainer, whose private names only this file and the trainer read."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.store, self.mean_loss = trainer, trainer._store, trainer.mean_loss
        self.params: list[gluon.Parameter] = trainer._params
        self.optimizer: mx.optimizer.Optimizer = trainer._optimizer
        self.contexts: list[mx.Context] = trainer._contexts

    @property
    def scale(self) -> float:
        """Scale of gradients beside the batch size, as that of mixed precision."""
        return self.trainer._scale

    @property
    def unsent(self) -> list[gluon.Parameter]:
        """Parameters that the store does not know yet, since they may have no shape."""
        return self.trainer._params_to_init

    def send(self) -> None:
        """Sends those that have a shape by now, if there is a store; a collective."""
        if self.trainer._kv_initialized:
            self.trainer._init_params()

    @property
    def loss_scaler(self) -> Any:
        """Loss scaler of mixed precision, or None."""
        return getattr(self.trainer, "_amp_loss_scaler", None)

    @property
    def device_updaters(self) -> list[mx.optimizer.Updater]:
        """Updaters of the devices."""
        return self.trainer._updaters

    @property
    def updaters(self) -> list[mx.optimizer.Updater]:
        """Updaters that keep the states: that of a store that updates, or those of the devices.

        A store that will update, and does not exist yet, takes over those of the first device.
        """
        if getattr(self.trainer, "_update_on_kvstore", False):
            return [self.trainer._kvstore._updater]
        return list(self.trainer._updaters)
