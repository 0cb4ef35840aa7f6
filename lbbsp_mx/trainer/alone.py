"""Training in one process, which is left to gluon's own trainer: `LocalTrainer`, `Unplanned`.

Where the store is not distributed there is nothing to balance. Gluon's code then creates the store,
sums over devices and updates, so that all of its options and attributes are as in
`mxnet.gluon.Trainer`. Only if a global batch size is given, a session plans and counts the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mxnet as mx
from mxnet import gluon

from lbbsp_core.runtime.checkpoint.serialization import Json
from lbbsp_mx import cluster
from lbbsp_mx.fence import Fence
from lbbsp_mx.store.collectives import TrainerStore
from lbbsp_mx.store.kvstore import SharedStore
from lbbsp_mx.trainer.means import StepSizes, clear_idle_devices, mark_gradients, total_weight
from lbbsp_mx.trainer.steps import Steps, Wait


class LocalTrainer(gluon.Trainer):
    """Gluon's trainer, whose store can be one of ours; if `alone`, gluon's own code trains."""

    mean_loss: bool
    _steps: Steps
    _now: StepSizes
    _weight: float | None
    _computed: Fence
    _summed: Fence

    def __init__(self, alone: bool, *args: Any) -> None:
        self._alone = alone
        super().__init__(*args)

    def _init_kvstore(self) -> None:
        """Creates the store; states that were loaded before are those of its optimizer."""
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
            updater, own = self._kvstore._updater, self._updaters[0]
            updater.states, own.states = own.states, {}
            updater.states_synced = dict.fromkeys(updater.states, False)

    # One step; `Trainer` has set the sizes and the weight of its batch

    def _step_alone(self, ignore_stale_grad: bool) -> None:
        """Makes a step by gluon's own."""
        computed = self._begin_alone()
        super().step(self._reduced_total, ignore_stale_grad)
        self._reduced_total = 0.0
        if self._sees_idle_devices:
            mark_gradients(self._learning(), is_fresh=False)
        self._end_alone(computed)

    def _sum_alone(self) -> None:
        """Sums gradients over devices by gluon's own method."""
        if self._contains_sparse_weight:
            raise ValueError(
                "allreduce_grads needs dense parameters, because gluon updates sparse ones in its "
                "store: call step, or leave stype='row_sparse' out"
            )
        computed = self._begin_alone()
        super().allreduce_grads()
        self._end_alone(computed)

    def _begin_alone(self) -> Wait:
        """Chooses the divisor of the gradients; returns a function that waits for these."""
        total = self._now.total if self._weight is None else total_weight([self._weight])
        self._reduced_total = 1.0 if self.mean_loss else total
        if self._now.is_planned:
            clear_idle_devices(self._learning(), self._now)
        if self._sees_idle_devices:
            mark_gradients(self._learning(), is_fresh=True)  # as gluon leaves them
        return self._computed.record(self._measured())

    @property
    def _sees_idle_devices(self) -> bool:
        """True if the marks of gradients are set here, because gluon leaves them to its store."""
        return bool(self._update_on_kvstore and self._now.is_planned and len(self._contexts) > 1)

    def _end_alone(self, computed: Wait) -> None:
        """Ends the step of the session, which waits for what is queued by now."""
        summed = self._summed.record(self._measured())
        self._steps.end(computed, summed, self._weight, at_once=True)

    def _measured(self) -> list[mx.nd.NDArray]:
        """Returns the gradients for which a session waits, to measure the time of a step."""
        if isinstance(self._steps.session, Unplanned):
            return []
        return [each for each in self._gradients() if each.stype == "default"]

    def _gradients(self) -> list[mx.nd.NDArray]:
        return [each for param in self._learning() for each in param.list_grad()]

    def _learning(self) -> list[gluon.Parameter]:
        return [param for param in self._params if param.grad_req != "null"]


class _UnplannedError(ValueError, AttributeError):
    """Error for what needs a plan; also an AttributeError, which `hasattr` expects."""


class Unplanned:
    """Stands for the session of a trainer in one process that has no global batch size.

    Steps are counted, and a request to stop works. What needs a plan raises an error.
    """

    rank, workers = 0, 1
    order = None

    def __init__(self, collectives: TrainerStore) -> None:
        self.collectives = collectives
        self.step = 0
        self.stopping = self._stop_requested = False

    def __getattr__(self, name: str) -> Any:
        """Refuses all that needs a plan."""
        raise _UnplannedError(
            "batch_sampler, sizes, rows and checkpoints need the samples per step: pass "
            "global_batch_size to lbbsp_mx.Trainer"
        )

    def end_step(self, *waits: object) -> None:
        """Counts a step."""
        self.step += 1
        self.stopping, self._stop_requested = self._stop_requested, False

    def pass_inner(
        self, number: int, computed: Wait, summed: Wait, batch_size: int, weight: float | None
    ) -> tuple[int, ...]:
        """Returns the batch size, because steps have no barrier."""
        return (batch_size,)

    def request_stop(self) -> None:
        """Lets `stopping` be true after the running step."""
        self._stop_requested = True

    def exclude_step(self) -> None:
        """Does nothing, because nothing is learned from steps."""

    def finish_barrier(self) -> None:
        """Does nothing, because steps have no barrier."""

    def flush(self) -> None:
        """Does nothing, because steps are not recorded."""

    def excluded_wait(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing."""
        return nullcontext()

    def check_same(self, name: str, value: int) -> None:
        """Does nothing, because there are no other workers."""

    def facts(self) -> dict[str, Json]:
        """Returns no facts, since a state of the optimizer fits any data."""
        return {}

    def own_state(self) -> tuple[Json, dict[str, Any]]:
        """Returns an empty state."""
        return None, {}

    def load_state(self, state: Json, arrays: Mapping[str, Any]) -> None:
        """Leaves out the state of a session, which has no use without a plan."""


def release_layers(params: Sequence[gluon.Parameter], *options: Any) -> None:
    """Lets layers that normalise over all workers do so without others."""
    for param in params:
        if hasattr(param, "lbbsp_synchronised"):
            param.lbbsp_synchronised.use_alone(*options)
