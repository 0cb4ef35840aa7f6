r"""Batch normalisation over the global batch: `SyncBatchNorm`.

Worker i sends its count, mean and sum of squared deviations ``(n_i, m_i, s_i)``; all workers
combine them in rank order, in float64 (Chan, Golub, LeVeque 1979)::

    n = sum n_i      m = sum n_i m_i / n      v = sum (s_i + n_i (m_i - m)^2) / n

Gluon's losses are sums over samples. The backward pass therefore needs the sums of ``dy`` and
``dy x^`` over *all* workers for the gradient of x, and the local sums for those of gamma and
beta, which the trainer sums over workers. Uneven batches then give the gradients of one process
with the whole batch.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from lbbsp_core.runtime.pipelined import PipelinedSession
from lbbsp_mx import cluster
from lbbsp_mx.kvstore import KVStore

_OPERATOR = "lbbsp_sync_batch_norm"
_LAYERS: WeakValueDictionary[str, SyncBatchNorm] = WeakValueDictionary()
"""Layers by name, because MXNet passes only text to an operator."""


class SyncBatchNorm(nn.BatchNorm):
    """Batch normalisation over the global batch, for networks trained by `lbbsp_mx.Trainer`.

    It takes the options of `mxnet.gluon.nn.BatchNorm` and works in hybridised networks. Use each
    layer once per forward pass, with one device per worker and losses per sample.
    """

    def __init__(self, axis: int = 1, **options: Any) -> None:
        if axis != 1:
            raise ValueError(
                f"axis must be 1, the channels in the layout NC..., got {axis}: transpose the data"
            )
        super().__init__(axis=axis, **options)
        self.running_mean.lbbsp_synchronised = self
        self._peers: _Peers | None = None
        _LAYERS[self.name] = self

    def connect(
        self, store: KVStore, session: PipelinedSession, devices: int, mean_loss: bool
    ) -> None:
        """Connects the layer to the other workers; the trainer calls it.

        Args:
            store: Store that gathers the moments of all workers.
            session: Session of the training, for which the gathers are not busy time.
            devices: Number of devices of this worker.
            mean_loss: Whether the loss is already averaged over the worker's batch.

        Raises:
            ValueError: The result would not be exact.
        """
        if devices > 1:
            raise ValueError(
                f"SyncBatchNorm needs one device per worker, got {devices}: start one worker for "
                "each device"
            )
        if mean_loss:
            raise ValueError(
                "SyncBatchNorm needs the loss per sample, got mean_loss=True: do not average the "
                "loss, since the trainer divides by the global batch size"
            )
        self._peers = _Peers(store, session, self.name, self.running_mean.shape[0])

    def cast(self, dtype: Any) -> None:
        """Keeps single precision, as gluon's own layer does."""
        if np.dtype(dtype).name == "float16":
            dtype = "float32"
        super().cast(dtype)

    def hybrid_forward(
        self, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any
    ) -> Any:
        """Normalises x by the moments of the global batch, or the running ones in prediction."""
        if self._peers is None and cluster.in_cluster() and mx.autograd.is_training():
            known = self.running_mean.shape and self.running_mean.shape[0]
            if known:
                raise RuntimeError(
                    f"{self.name} is not connected to the other workers: create the "
                    "lbbsp_mx.Trainer of its parameters before training"
                )
        vectors = (gamma, beta, running_mean, running_var)
        y = F.Custom(_plain(F, x), *vectors, op_type=_OPERATOR, layer=self.name, name="fwd")
        return _plain(F, y)

    def moments(self, x: Any) -> tuple[float, Any, Any]:
        """Returns the moments of the global batch.

        Args:
            x: Local batch, channels on axis 1.

        Returns:
            Number of values per channel, and their mean and variance, shape ``(channels,)``.
        """
        count = x.size / x.shape[1]
        mean = x.mean(axis=1, exclude=True)
        squares = (mx.nd.broadcast_sub(x, _over(mean, x)) ** 2).sum(axis=1, exclude=True)
        row = [[count], mean.asnumpy(), squares.asnumpy()]
        rows = self._gather("moments", np.concatenate(row).astype(np.float32)).astype(np.float64)
        counts, (means, squares) = rows[:, :1], np.split(rows[:, 1:], 2, axis=1)
        total = counts.sum()
        mean = (counts * means).sum(axis=0) / total
        variance = (squares + counts * (means - mean) ** 2).sum(axis=0) / total
        return float(total), mean, variance

    def sums(self, *values: Any) -> list[Any]:
        """Sums vectors of shape ``(channels,)`` over all workers."""
        row = np.concatenate([value.asnumpy() for value in values])
        total = self._gather("sums", row).astype(np.float64).sum(axis=0)
        return np.split(total, len(values))

    def _gather(self, slot: str, row: Any) -> Any:
        return row[None] if self._peers is None else self._peers.gather(slot, row)


class _Peers:
    """All-gathers of one layer, which do not count as busy time."""

    def __init__(self, store: KVStore, session: PipelinedSession, name: str, channels: int) -> None:
        self._store, self._session, self._name = store, session, name
        # All workers create the keys here, in the same order: later gathers run on MXNet's threads.
        for slot, width in (("moments", 2 * channels + 1), ("sums", 2 * channels)):
            store.begin_gather(np.zeros(width, np.float32), slot=(name, slot))()

    def gather(self, slot: str, row: Any) -> Any:
        """Gathers the rows of all workers, shape ``(workers, len(row))``."""
        with self._session.excluded_wait():
            return self._store.begin_gather(row, slot=(self._name, slot))()


class _Operator(mx.operator.CustomOp):
    """Operator that normalises one batch, with the state that its backward pass needs."""

    def __init__(self, layer: SyncBatchNorm) -> None:
        super().__init__()
        self._layer = layer
        self._total = 0.0

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        """Normalises x; updates the running moments while training."""
        x, gamma, beta = in_data
        options = self._layer._kwargs
        if is_train and not options["use_global_stats"]:
            self._total, *moments = self._layer.moments(x)
            mean, variance = (mx.nd.array(m, ctx=x.context, dtype="float32") for m in moments)
            for running, new in zip(aux, (mean, variance), strict=True):
                kept = options["momentum"]
                running[:] = kept * running + (1 - kept) * new
        else:
            self._total = 0.0
            mean, variance = aux
        self._mean, self._scale = mean.copy(), mx.nd.rsqrt(variance + options["eps"])
        gamma = mx.nd.ones_like(gamma) if options["fix_gamma"] else gamma
        y = mx.nd.broadcast_mul(self._normalised(x), _over(gamma, x))
        self.assign(out_data[0], req[0], mx.nd.broadcast_add(y, _over(beta, x)))

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        """Computes the gradients of x (which depends on all workers' samples), gamma and beta."""
        (dy,), (x, gamma, _) = out_grad, in_data
        fixed = self._layer._kwargs["fix_gamma"]
        normalised = self._normalised(x)
        dbeta = dy.sum(axis=1, exclude=True)
        dgamma = (dy * normalised).sum(axis=1, exclude=True)
        if self._total:
            sums = self._layer.sums(dbeta, dgamma)
            ones, along = (
                _over(mx.nd.array(s / self._total, ctx=x.context, dtype="float32"), x) for s in sums
            )
            dy = mx.nd.broadcast_sub(dy, ones) - mx.nd.broadcast_mul(normalised, along)
        factor = self._scale if fixed else gamma * self._scale
        self.assign(in_grad[0], req[0], mx.nd.broadcast_mul(dy, _over(factor, x)))
        self.assign(in_grad[1], req[1], mx.nd.zeros_like(dgamma) if fixed else dgamma)
        self.assign(in_grad[2], req[2], dbeta)

    def _normalised(self, x: Any) -> Any:
        return mx.nd.broadcast_mul(
            mx.nd.broadcast_sub(x, _over(self._mean, x)), _over(self._scale, x)
        )


@mx.operator.register(_OPERATOR)
class _Properties(mx.operator.CustomOpProp):
    """Properties of the operator that MXNet reads."""

    def __init__(self, layer: str) -> None:
        super().__init__(need_top_grad=True)
        self._name = layer

    def list_arguments(self) -> list[str]:
        """Returns the names of the inputs."""
        return ["data", "gamma", "beta"]

    def list_auxiliary_states(self) -> list[str]:
        """Returns the names of the arrays that the operator itself changes."""
        return ["running_mean", "running_var"]

    def infer_shape(self, in_shape: Any) -> Any:
        """Returns the shapes of inputs, outputs and moments; vectors have one value per channel."""
        vector = [in_shape[0][1]]
        return [in_shape[0], vector, vector], [in_shape[0]], [vector, vector]

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> _Operator:
        """Creates the operator for one pass."""
        return _Operator(_LAYERS[self._name])


def _plain(F: Any, x: Any) -> Any:
    """Returns a copy of x in the plain layout.

    oneDNN's convolutions store their output, and the gradient of their input, in blocks of
    channels. Operators written in Python read these as if they were in the plain layout, which
    gave wrong moments that differed from run to run. MXNet may perform an addition or an identity
    in place, so `tile` is used.
    """
    return F.tile(x, reps=(1,))


def _over(vector: Any, x: Any) -> Any:
    """Returns a vector with one value per channel, reshaped to broadcast over x."""
    return vector.reshape((1, -1) + (1,) * (x.ndim - 2))
