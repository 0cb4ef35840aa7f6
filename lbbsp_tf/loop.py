"""Custom training loops: `BalancedLoop`, for users of `strategy.run` and `train_on_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import tensorflow as tf

from lbbsp_core.runtime.extensions.settings import Settings
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_tf import compat
from lbbsp_tf.compat import Array, Nest
from lbbsp_tf.data.dataset import PlaceholderDataset
from lbbsp_tf.step.train_step import TrainStep
from lbbsp_tf.training import Training


class BalancedLoop(AbstractContextManager["BalancedLoop"]):
    """Balanced steps of a custom training loop; `LoadBalancer.loop` creates it."""

    def __init__(
        self,
        train_step: Callable[[Nest], Nest],
        data: tf.data.Dataset | PlaceholderDataset,
        training: Training,
    ) -> None:
        self._train_step, self._data = TrainStep.of_function(train_step), data
        self._training, self._leader = training, training.sessions.leader
        self._run: Callable[..., Nest] | None = None
        self._graph: tf.Graph | None = None
        self._found: list[tf.Variable] | None = None
        self._has_stopped = False  # without other workers
        self._active = self._leader.workers > 1
        self._is_left = False  # in the middle of an epoch
        training.user = self
        kind = PlaceholderDataset if self._active else tf.data.Dataset
        if not isinstance(data, kind):  # rows of an array would be single samples
            raise ValueError("a loop needs the data of the balancer: pass balancer.dataset(x, y)")
        if self._active:
            data.example()  # as Keras does, to announce the data set
            training.begin({}, self._weights, self._learning_rates)
            iter(data)
        else:
            self._leader.extensions[Stopping].close()  # a request to the loop before

    def __exit__(self, *_: object) -> None:
        self.close()

    def epoch(self) -> Iterator[Nest]:
        """Trains an epoch, and yields what the train step returns in each step.

        Fractional scalars are those of the global batch, the same on all workers: means or sums
        over its samples. Other results are those of this worker's samples. After `request_stop` an
        epoch ends, and further ones have no steps; another loop, or a fit, begins anew.

        Raises:
            DisagreementError: Learning rates or weights of workers differ.
            ValueError: The loop is closed, the epoch before was left in its middle, or another loop
                or a fit of the balancer has begun since.
        """
        if self._is_left:
            raise ValueError(
                "the epoch before was left before its end (by break, or an error): pass "
                "steps_per_epoch= to balancer.dataset(...) for shorter ones, or call request_stop()"
            )
        self._check_user()
        self._is_left = True
        yield from self._epoch() if self._active else self._epoch_alone()
        self._is_left = False

    def _epoch(self) -> Iterator[Nest]:
        training = self._training
        if self._run is None:
            training.begin_first_epoch(0)
            step = training.prepare(self._train_step)

            def run() -> Nest:
                self._graph, self._found = compat.current_graph(), None
                return training.strategy.run(step)

            self._run = tf.function(run, autograph=False)
        else:
            training.begin_epoch()
        for _ in range(training.input.pipeline.order.steps_per_epoch):
            if self._leader.stopping:
                return
            self._check_user()
            training.begin_step()
            result = compat.local(training.strategy, self._run())
            training.end_step()
            yield result
        training.input.end_epoch()

    def request_stop(self) -> None:
        """Asks all workers to stop: their `epoch` ends after the next step, which is the same."""
        self._leader.request_stop()

    def close(self) -> None:
        """Ends the training; call it after the last epoch, or use the loop as a context."""
        if self._training.user is self:
            self._training.user = None
            if self._active:
                self._training.end()

    def _check_user(self) -> None:
        if self._training.user is not self:
            raise ValueError(
                "the loop was closed, or another loop or a fit of this balancer has begun, which "
                "ends it: call balancer.loop(...) again, or use a LoadBalancer for each of several "
                "loops that run in turns"
            )

    def _weights(self) -> Iterator[Array]:
        return (variable.numpy() for variable in self._shared() if variable.trainable)

    def _learning_rates(self) -> Settings:
        rates = (variable for variable in self._shared() if "learning_rate" in variable.name)
        values = (float(f"{float(rate.numpy()):.7g}") for rate in rates)
        return {f"learning rate of optimizer {k}": value for k, value in enumerate(values)}

    def _shared(self) -> list[tf.Variable]:
        """Returns the variables of the step that are equal on all workers, once it is traced."""
        if self._graph is None:
            return []
        if self._found is None:
            variables = {id(v.handle): v for v in self._graph.variables}  # in any order
            captured = [variables.get(id(outer)) for outer, _ in self._graph.captures]
            of_workers = tf.VariableSynchronization.ON_READ
            self._found = [v for v in captured if v is not None and v.synchronization != of_workers]
        return self._found

    def _epoch_alone(self) -> Iterator[Nest]:
        if self._run is None:
            self._leader.begin_epoch(0)  # a loop before may have been left in the middle of one
            run, function = self._training.strategy.run, self._train_step.function
            self._run = tf.function(
                lambda batch: run(function, args=(batch,)), autograph=False, reduce_retracing=True
            )
        requests = self._leader.extensions[Stopping]
        for batch in self._data if not self._has_stopped else ():
            self._check_user()
            # As among several workers, a request is heard of in the step that follows it.
            self._has_stopped = requests.requested
            result = self._run(batch)
            self._leader.skip_step()
            yield result
            if self._has_stopped:
                requests.close()
                return
