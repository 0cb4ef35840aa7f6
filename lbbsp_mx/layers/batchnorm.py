"""Batch normalisation over the global batch: `SyncBatchNorm`.

Worker i sends its count, mean and sum of squared deviations ``(n_i, m_i, s_i)``; all workers
combine them in rank order, in float64 (Chan, Golub, LeVeque 1979)::

    n = sum n_i      m = sum n_i m_i / n      v = sum (s_i + n_i (m_i - m)^2) / n

Gluon's losses are sums over samples. The backward pass therefore needs the sums of ``dy`` and
``dy x^`` over *all* workers for the gradient of x, and the local sums for those of gamma and
beta, which the trainer sums over workers. Uneven batches then give the gradients of one process
with the whole batch.
"""

from __future__ import annotations

import copy
import itertools
import threading
import uuid
from collections import defaultdict, deque
from typing import Any, Final
from weakref import WeakValueDictionary

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx import cluster, env
from lbbsp_mx.store.collectives import StoreCollectives

_USES: Final = 1 << 24
"""Numbers of uses are below this, so that float32 holds them exactly."""

_PEERS: WeakValueDictionary[str, Peers] = WeakValueDictionary()
"""Peers by key, because MXNet passes only text to an operator."""


class Peers:
    """The other workers, as a layer that normalises over all of them sees them.

    Layers that share their parameters share one. By the parameter `running_mean` the trainer
    recognises such a layer, and connects it, after which `turns` are known.
    """

    def __init__(self, running_mean: gluon.Parameter) -> None:
        self._running_mean = running_mean
        self.key = uuid.uuid4().hex  # names of layers are not unique
        self._uses = itertools.count()
        self.turns: dict[str, _Turns] | None = None  # empty if there are no other workers
        _PEERS[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        """Returns unconnected peers, for a copy of the network."""
        return Peers(copy.deepcopy(self._running_mean, memo))

    def connect(
        self,
        store: StoreCollectives,
        session: PipelinedSession,
        devices: int,
        mean_loss: bool,
        accumulate: int,
    ) -> None:
        """Connects the layer to the other workers, if there are any; the trainer calls it."""
        if devices > 1:
            raise ValueError(
                f"SyncBatchNorm needs one device per worker, got {devices}: start more workers"
            )
        if mean_loss:
            raise ValueError(
                "SyncBatchNorm needs the loss per sample, got mean_loss=True: do not average the "
                "loss, since the trainer divides by the global batch size"
            )
        if accumulate > 1:
            raise ValueError(
                f"SyncBatchNorm needs accumulate = 1, got {accumulate}: leave it out, since the "
                "layer would normalise parts of the global batch, which depend on the plan"
            )
        turns = {}
        if store.workers > 1:
            env.allow_many_custom_operators()
            channels = self._running_mean.shape[0]
            floats = np.dtype(self._running_mean.dtype).itemsize // np.float32().itemsize or 1
            for kind, width in (("moments", 2 * channels + 1), ("sums", 2 * channels)):
                turns[kind] = _Turns(store, session, width * floats)
        self.turns, self._uses = turns, itertools.count()

    def next_use(self) -> int:
        """Returns the number of the next use, the same on all workers."""
        return next(self._uses) % _USES

    def gather(self, kind: str, use: int, row: Any) -> Any:
        """Gathers the rows of all workers for a use, shape ``(workers, len(row))``.

        The kind is "moments" or "sums". The row is float32, or float64 if the parameters are.
        """
        if not self.turns:
            return row[None]
        turns = self.turns[kind]
        if row.dtype != np.float64:
            return turns.gather(use, row)
        rounded = row.astype(np.float32)  # stores gather float32
        rows = turns.gather(use, np.concatenate([rounded, row - rounded])).astype(np.float64)
        return rows[:, : len(row)] + rows[:, len(row) :]


class _Turns:
    """Gathers on one key, in which the workers send rows of any uses.

    MXNet calls operators written in Python on threads of its own. It keeps the forward passes of
    one layer in the order of the script, since they all write its running moments. Backward passes
    that do not depend on each other run at the same time and in any order, which differs between
    workers.

    On a key the workers can only take turns: in each *turn* every worker sends the row of whatever
    use is ready. A row therefore starts with the number of its use, which is the same on all
    workers; who needs the rows of a use waits until every worker has sent its own. The uses that
    are ready never depend on one that is not, so that no turn is missing.
    """

    def __init__(self, store: StoreCollectives, session: PipelinedSession, width: int) -> None:
        self._store, self._session = store, session
        self._slot = object()  # no other layer has it, also none that is created later
        self._turn, self._arrived = threading.Lock(), threading.Condition()
        self._rows: dict[int, list[deque[Any]]] = defaultdict(
            lambda: [deque() for _ in range(store.workers)]
        )
        # All workers create the key here, in the same order: later gathers run on MXNet's threads.
        store.begin_gather(np.zeros(1 + width, np.float32), slot=self._slot)()

    def gather(self, use: int, row: Any) -> Any:
        """Sends the row of a use, and waits for those of all workers."""
        with self._session.excluded_wait(), self._store.waiting("for a layer of the others"):
            sent = np.concatenate([[use], row]).astype(np.float32)
            with self._turn:
                received = self._store.begin_gather(sent, slot=self._slot)()
            with self._arrived:
                for rank, message in enumerate(received):
                    self._rows[int(message[0])][rank].append(message[1:])
                self._arrived.notify_all()
                self._arrived.wait_for(lambda: all(self._rows[use]))
                rows = np.stack([queue.popleft() for queue in self._rows[use]])
                if not any(self._rows[use]):
                    del self._rows[use]
                return rows


_OPERATOR = "lbbsp_sync_batch_norm"


class SyncBatchNorm(nn.BatchNorm):
    """Batch normalisation over the global batch, for networks trained by `lbbsp_mx.Trainer`.

    It takes the options of `mxnet.gluon.nn.BatchNorm`, and `num_devices`, which has no effect. It
    works in hybridised networks, with one device per worker and losses per sample. A layer may be
    used several times before the backward pass, if all workers use it equally often and in the same
    order; its running moments are updated in that order. Each forward pass updates them; MXNet's
    own layer does so on a CPU in the backward pass, and not where there is none, as for the
    `detach`ed samples of a GAN.
    """

    def __init__(self, axis: int = 1, *, num_devices: Any = None, **options: Any) -> None:
        if axis != 1:
            raise ValueError(
                f"axis must be 1, the channels in the layout NC..., got {axis}: transpose the data"
            )
        super().__init__(axis=axis, **options)
        if not hasattr(self.running_mean, "lbbsp_synchronised"):
            self.running_mean.lbbsp_synchronised = Peers(self.running_mean)

    def hybridize(self, active: bool = True, **kwargs: Any) -> None:
        """Compiles the layer, as gluon's does.

        Raises:
            ValueError: `static_shape` is true, with which MXNet starts the forward passes of one
                layer at the same time, and batches could be normalised by moments of others.
        """
        if active and kwargs.get("static_shape"):
            raise ValueError(
                "SyncBatchNorm needs static_shape=False, got True: use hybridize(static_alloc=True)"
                ", since the batch sizes of LB-BSP change anyway"
            )
        super().hybridize(active, **kwargs)

    def hybrid_forward(
        self, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any
    ) -> Any:
        """Normalises x by the moments of the global batch, or the running ones in prediction."""
        peers = self.running_mean.lbbsp_synchronised
        trains = peers.turns is None and cluster.in_cluster() and mx.autograd.is_training()
        if trains and self.running_mean.shape and self.running_mean.shape[0]:
            raise RuntimeError(
                f"{self.name} is not connected to the other workers: create the lbbsp_mx.Trainer "
                "of its parameters before training"
            )
        inputs = (x, gamma, beta, running_mean, running_var)
        x, *vectors = (array.as_nd_ndarray() for array in inputs)
        names = ("momentum", "eps", "fix_gamma", "use_global_stats")
        options = {name: repr(self._kwargs[name]) for name in names}
        options |= {"op_type": _OPERATOR, "peers": peers.key, "name": "fwd"}
        y = _plain(F, F.Custom(_plain(F, x), *vectors, **options))
        return y.as_np_ndarray() if mx.util.is_np_array() else y


class _Operator(mx.operator.CustomOp):
    """Operator that normalises one batch, with the state that its backward pass needs."""

    def __init__(self, peers: Peers | None, options: _Properties) -> None:
        super().__init__()
        self._peers, self._options = peers, options
        self._total = 0.0
        self._use = 0

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        """Normalises x; updates the running moments while training."""
        x, gamma, beta = in_data
        x, options = _precise(x, gamma), self._options
        if is_train and not options.use_global_stats:
            self._total, *moments = self._moments(x)
            mean, variance = (mx.nd.array(m, ctx=x.context, dtype=gamma.dtype) for m in moments)
            for running, new in zip(aux, (mean, variance), strict=True):
                running[:] = options.momentum * running + (1 - options.momentum) * new
        else:
            self._total = 0.0
            mean, variance = aux
        self._mean, self._scale = mean.copy(), mx.nd.rsqrt(variance + options.eps)
        gamma = mx.nd.ones_like(gamma) if options.fix_gamma else gamma
        y = self._normalised(x) * _over(gamma, x) + _over(beta, x)
        self.assign(out_data[0], req[0], _precise(y, out_data[0]))

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        """Computes the gradients of x (which depends on all workers' samples), gamma and beta."""
        (dy,), (x, gamma, _) = out_grad, in_data
        x, dy = _precise(x, gamma), _precise(dy, gamma)
        fixed = self._options.fix_gamma
        normalised = self._normalised(x)
        dbeta = dy.sum(axis=1, exclude=True)
        dgamma = (dy * normalised).sum(axis=1, exclude=True)
        if self._total:
            row = np.concatenate([dbeta.asnumpy(), dgamma.asnumpy()])
            means = self._gather("sums", row).astype(np.float64).sum(axis=0) / self._total
            means = mx.nd.array(means.reshape(2, -1), ctx=x.context, dtype=gamma.dtype)
            dy = dy - _over(means[0], x) - normalised * _over(means[1], x)
        factor = self._scale if fixed else gamma * self._scale
        self.assign(in_grad[0], req[0], _precise(dy * _over(factor, x), in_grad[0]))
        self.assign(in_grad[1], req[1], mx.nd.zeros_like(dgamma) if fixed else dgamma)
        self.assign(in_grad[2], req[2], dbeta)

    def _normalised(self, x: Any) -> Any:
        return (x - _over(self._mean, x)) * _over(self._scale, x)

    def _moments(self, x: Any) -> tuple[float, Any, Any]:
        """Returns the number of values per channel, their mean and variance, of the global batch.

        The mean and the variance have the shape ``(channels,)``.
        """
        count = x.size / x.shape[1]
        mean = x.mean(axis=1, exclude=True)
        squares = ((x - _over(mean, x)) ** 2).sum(axis=1, exclude=True)
        row = np.concatenate([[count], mean.asnumpy(), squares.asnumpy()])
        row = row.astype(np.promote_types(x.dtype, np.float32))
        self._use = 0 if self._peers is None else self._peers.next_use()
        rows = self._gather("moments", row).astype(np.float64)
        counts, (means, squares) = rows[:, :1], np.split(rows[:, 1:], 2, axis=1)
        total = counts.sum()
        mean = (counts * means).sum(axis=0) / total
        variance = (squares + counts * (means - mean) ** 2).sum(axis=0) / total
        return float(total), mean, variance

    def _gather(self, kind: str, row: Any) -> Any:
        """Gathers rows of this use."""
        if self._peers is not None:
            return self._peers.gather(kind, self._use, row)
        if cluster.in_cluster():
            raise RuntimeError(
                "a network with lbbsp_mx.SyncBatchNorm that was loaded from an exported file "
                "cannot be trained by several workers: create it from its Python code"
            )
        return row[None]


@mx.operator.register(_OPERATOR)
class _Properties(mx.operator.CustomOpProp):
    """Properties of the operator that MXNet reads."""

    def __init__(
        self, peers: str, momentum: str, eps: str, fix_gamma: str, use_global_stats: str
    ) -> None:
        super().__init__()
        self._key = peers
        self.momentum, self.eps = float(momentum), float(eps)
        self.fix_gamma, self.use_global_stats = fix_gamma == "True", use_global_stats == "True"

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

    def infer_type(self, in_type: Any) -> Any:
        """Returns the types of inputs, outputs and moments; vectors of float16 are float32."""
        vector = np.float32 if in_type[0] == np.float16 else in_type[0]
        return [in_type[0], vector, vector], [in_type[0]], [vector, vector]

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> _Operator:
        """Creates the operator for one pass."""
        # None if the layer is of another process, or was freed
        return _Operator(_PEERS.get(self._key), self)


def _plain(F: Any, x: Any) -> Any:
    """Returns a copy of x in the plain layout.

    oneDNN's convolutions store their output, and the gradient of their input, in blocks of
    channels. Operators written in Python read these as if they were in the plain layout, which
    gave wrong moments that differed from run to run. MXNet may perform an addition or an identity
    in place, so `tile` is used.
    """
    return F.tile(x, reps=(1,))


def _precise(array: Any, like: Any) -> Any:
    """Returns an array in the precision of another one."""
    return array.astype(like.dtype, copy=False)


def _over(vector: Any, x: Any) -> Any:
    """Returns a vector with one value per channel, reshaped to broadcast over x."""
    return vector.reshape((1, -1) + (1,) * (x.ndim - 2))
