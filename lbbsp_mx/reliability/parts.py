"""What comparisons and checkpoints use of a gluon trainer: `TrainerParts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx
from mxnet import gluon


@dataclass(frozen=True)
class TrainerParts:
    """Parts of a gluon trainer, whose private names are read here alone.

    `order` are the positions of the parameters in gluon's order.
    """

    trainer: gluon.Trainer
    store: Any
    mean_loss: bool
    order: Sequence[int]

    @property
    def params(self) -> list[gluon.Parameter]:
        """All parameters, in the order of their numbers."""
        return self.trainer._params

    @property
    def unsent(self) -> list[gluon.Parameter]:
        """Parameters that the store does not know yet, since they may have no shape."""
        return self.trainer._params_to_init

    def send(self) -> None:
        """Sends those that have a shape by now, if there is a store; a collective."""
        if self.trainer._kv_initialized:
            self.trainer._init_params()

    @property
    def contexts(self) -> list[mx.Context]:
        """Devices."""
        return self.trainer._contexts

    @property
    def optimizer(self) -> mx.optimizer.Optimizer:
        """The optimizer, which all devices share."""
        return self.trainer.optimizer

    @property
    def scale(self) -> float:
        """Factor of gradients beside the batch size, as that of mixed precision."""
        return self.trainer._scale

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
