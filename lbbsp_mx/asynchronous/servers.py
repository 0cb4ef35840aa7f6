"""Parameter servers of MXNet, as an asynchronous session needs them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.optimizer import Optimizer

from lbbsp_core.runtime.asynchronous import coordination
from lbbsp_core.runtime.asynchronous.coordination import CoordinatorService, Table
from lbbsp_mx import cluster, env
from lbbsp_mx.fence import wait_for
from lbbsp_mx.parameters import Arrays, learning
from lbbsp_mx.store.native import runtime
from lbbsp_mx.store.server_optimizer import Keys, ServerOptimizer
from lbbsp_mx.trainer.stages import clear_stale


class ParameterServers:
    """Parameter servers of MXNet, for an `AsyncSession`."""

    def __init__(self, params: list[gluon.Parameter], wait_seconds: float) -> None:
        self._native = runtime().native("dist_async" if cluster.in_cluster() else "local", 120.0)
        self.rank, self.workers = self._native.rank, self._native.num_workers
        self.keys = Keys(len(params), int(env.cluster().get("DMLC_NUM_SERVER", 1)))
        self.learning = learning(params)
        self._answers = mx.nd.array(coordination.empty_questions(self.workers))
        self._params = params
        self._kept: dict[int, Arrays] = {}  # sums over the parts of an iteration, by parameter
        # Ends the process if the wait inside the context takes too long.
        self.waiting = partial(runtime().waiting, wait_seconds, owner="lbbsp_mx.AsyncTrainer")

    def start(
        self, optimizer: Optimizer, service: CoordinatorService | None, *, keeps_pushes: bool
    ) -> None:
        """Sends the model to the servers, worker 0 also the rest they run; a collective."""
        values = {i: param.list_data()[0].as_nd_ndarray() for i, param in enumerate(self._params)}
        if keeps_pushes:
            values |= {self.keys.sums + i: mx.nd.zeros_like(values[i]) for i in self.learning}
            values |= {key: mx.nd.zeros((1,)) for key in self.keys.barriers}
        values[self.keys.questions] = mx.nd.array(coordination.empty_questions(self.workers))
        values[self.keys.log] = mx.nd.array(coordination.empty_log())
        with self.waiting("for all workers to send the model"):
            self._native.init(list(values), list(values.values()))
        if service is not None:
            optimizer.set_lr_mult({i: param.lr_mult for i, param in enumerate(self._params)})
            optimizer.set_wd_mult({i: param.wd_mult for i, param in enumerate(self._params)})
            with self.waiting("for the servers to receive the optimizer"):
                self._native.set_optimizer(ServerOptimizer(optimizer, self.keys, service))
        if cluster.in_cluster():
            with self.waiting("for worker 0 to send the optimizer"):
                self._native._barrier()

    def ask(self, table: Table) -> None:
        """Pushes a table of questions."""
        self._native.push(self.keys.questions, mx.nd.array(table))

    def read_answers(self) -> Table:
        """Pulls the table of answers."""
        self._native.pull(self.keys.questions, out=self._answers)
        return np.asarray(self._answers.asnumpy(), np.float32)

    def exchange_log(self, table: Table) -> Table:
        """Pushes a request for the log, and pulls the answer."""
        lines = mx.nd.array(table)
        self._native.push(self.keys.log, lines)
        self._native.pull(self.keys.log, out=lines)
        return np.asarray(lines.asnumpy(), np.float32)

    def push_gradients(self, *, to_sum: bool) -> None:
        """Pushes this worker's new gradients, and waits until the servers have received them."""
        first = self.keys.sums if to_sum else 0
        if self._kept:
            self.keep_gradients()
        gradients, self._kept = self._kept or self._new_gradients(), {}
        self._push([first + i for i in gradients], list(gradients.values()))

    def apply_sums(self, scale: float) -> None:
        """Lets the servers update the parameters by their sums, times `scale`; empties the sums."""
        keys = list(self.keys.barriers)
        self._push(keys, [mx.nd.array([scale]) for _ in keys])
        gradients = [self._params[i].list_grad() for i in self.learning]
        self._push(self.learning, gradients)  # only signals: the values are not read

    def _push(self, keys: Sequence[int], values: Sequence[Arrays | mx.nd.NDArray]) -> None:
        with self.waiting("for the servers to receive its gradients"):
            if keys:
                self._native.push(list(keys), list(values))
            mx.nd.waitall()

    def keep_gradients(self) -> None:
        """Adds this worker's new gradients to those of earlier parts of its iteration."""
        for i, gradients in self._new_gradients().items():
            if i not in self._kept:
                self._kept[i] = [array.copy() for array in gradients]
                continue
            for total, gradient in zip(self._kept[i], gradients, strict=True):
                total += gradient

    def _new_gradients(self) -> dict[int, Arrays]:
        """Returns the gradients that a batch has computed, by parameter."""
        fresh = clear_stale(self._params[i] for i in self.learning)
        pairs = zip(self.learning, fresh, strict=True)
        return {i: self._params[i].list_grad() for i, is_new in pairs if is_new}

    def read(self, numbers: Sequence[int]) -> None:
        """Pulls the parameters with these indices."""
        with self.waiting("for the model"):
            arrays = [self._params[i].list_data() for i in numbers]
            self._native.pull(list(numbers), out=arrays)
            wait_for(arrays)
        self._read = self._squares()

    def is_unchanged(self) -> bool:
        """Returns whether the script has left the parameters as `read` has set them."""
        now = self._squares()  # beside the backward pass, as before beside the loader
        return np.array_equal(self._read.asnumpy(), now.asnumpy(), equal_nan=True)

    def _squares(self) -> mx.nd.NDArray:
        """Queues the sum of squares of each parameter that learns."""
        arrays = [self._params[i].list_data()[0].as_nd_ndarray() for i in self.learning]
        return mx.nd.multi_sum_sq(*arrays, num_arrays=len(arrays))


def check_are_free() -> None:
    """Raises ValueError if a script has given the servers keys, an optimizer or compression."""
    if runtime().optimizer_of or runtime().taken or runtime().compresses:
        raise ValueError(
            "a process can have only one AsyncTrainer in a cluster, which needs the servers for "
            "itself, and another one or a KVStore of this process has given them keys, an "
            "optimizer or gradient compression: use a separate job for one"
        )
