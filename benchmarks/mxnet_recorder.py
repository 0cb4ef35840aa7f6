"""Uneven, changing plans for whatever a script trains, and the weights before and after."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np

from lbbsp_core.policy import FixedShares
from lbbsp_core.testing import ChangingPlans


class Recorder:
    """Weights of every trainer or module before its first step and at the end, and batch sizes."""

    def __init__(self) -> None:
        self._trained: list[object] = []
        self._starts: dict[int, list[np.ndarray]] = {}
        self._sizes: set[int] = set()  # of this worker's batches
        self._workers = int(os.environ.get("DMLC_NUM_WORKER", "1"))

    def watch(self) -> None:
        """Gives every trainer and balanced store uneven, changing plans; records weights."""
        create, balance = lbbsp_mx.Trainer.__init__, lbbsp_mx.KVStore.balance
        prepare = mx.mod.Module.init_optimizer

        @functools.wraps(create)
        def created(trainer, *arguments, **options):
            create(trainer, *arguments, **self._with_policy(options))
            self._trained.append(trainer)

        @functools.wraps(balance)
        def balanced(store, *arguments, **options):
            return balance(store, *arguments, **self._with_policy(options))

        @functools.wraps(prepare)
        def prepared(module, *arguments, **options):
            if not module.optimizer_initialized:
                self._trained.append(module)
                self._begin(module)
            prepare(module, *arguments, **options)

        lbbsp_mx.Trainer.__init__, lbbsp_mx.KVStore.balance = created, balanced
        mx.mod.Module.init_optimizer = prepared
        for kind, name in (
            (lbbsp_mx.Trainer, "step"),
            (lbbsp_mx.Trainer, "allreduce_grads"),
            (mx.mod.Module, "forward_backward"),
        ):
            setattr(kind, name, self._recorded(getattr(kind, name)))

    def _with_policy(self, options):
        if self._workers == 1 or "beside" in options:
            return options
        shares = FixedShares([float(self._workers - rank) for rank in range(self._workers)])
        return options | {"policy": shares if "policy" in options else ChangingPlans()}

    def _recorded(self, method):
        @functools.wraps(method)
        def recorded(trained, *arguments, **options):
            self._begin(trained)
            self._sizes.add(_size(trained, arguments))
            return method(trained, *arguments, **options)

        return recorded

    def _begin(self, trained) -> None:
        self._starts.setdefault(self._trained.index(trained), _weights(trained))

    def save(self, folder: Path) -> None:
        """Writes the weights.

        Raises:
            AssertionError: All plans gave this worker an even part of the global batch.
        """
        saved = {}
        for number, start in self._starts.items():
            for when, weights in (("start", start), ("end", _weights(self._trained[number]))):
                saved.update({f"{number}_{when}_{n}": w for n, w in enumerate(weights)})
        assert self._workers == 1 or any(size != 1 for size in self._sizes), self._sizes
        place = folder / f"rank{_rank(self._trained)}"
        place.mkdir()
        np.savez(place / "fits.npz", **saved)


def _size(trained, arguments) -> float:
    """Returns the samples of this worker's batch, relative to an even part of the global batch."""
    if isinstance(trained, mx.mod.Module):
        return arguments[0].data[0].shape[0] / trained.data_shapes[0].shape[0]
    return trained.sizes[trained.kvstore.rank] * len(trained.sizes) / sum(trained.sizes)


def _rank(trained: list[object]) -> int:
    stores = (
        each._kvstore if isinstance(each, mx.mod.Module) else each.kvstore for each in trained
    )
    return next((store.rank for store in stores if store is not None), 0)


def _weights(trained) -> list[np.ndarray]:
    if isinstance(trained, mx.mod.Module):
        arguments, states = trained.get_params()
        arrays = [each[name] for each in (arguments, states) for name in sorted(each)]
    else:
        arrays = [param.list_data()[0] for param in trained._params]
    return [array.asnumpy().astype(np.float64) for array in arrays]
