"""Custom training loops: `BalancedLoop`, for users of `strategy.run` and `train_on_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat import Nest
from lbbsp_tf.dataset import PlaceholderDataset
from lbbsp_tf.feed import TrainingInput
from lbbsp_tf.preparation import StepPreparation
from lbbsp_tf.replicas import ReplicaSessions
from lbbsp_tf.train_step import TrainStep


class BalancedLoop:
    """Balanced steps of a custom training loop; `LoadBalancer.loop` creates it.

    Args:
        train_step: Function of a batch that applies gradients by Keras optimizers, written as for
            a single process; for example `keras.Model.train_step` of a compiled model.
        data: What `LoadBalancer.dataset` has returned.
        strategy: Strategy of the user.
        sessions: Sessions of this process's replicas.
        training_input: Data of the balancer.
        preparation: Makes the balanced step.

    Raises:
        ValueError: `data` did not come from the balancer, or its session cannot start.
    """

    def __init__(
        self,
        train_step: Callable[[Nest], Nest],
        data: tf.data.Dataset | PlaceholderDataset,
        *,
        strategy: tf.distribute.Strategy,
        sessions: ReplicaSessions,
        training_input: TrainingInput,
        preparation: StepPreparation,
    ) -> None:
        self._train_step = TrainStep.of_function(train_step)
        self._data = data
        self._strategy = strategy
        self._sessions = sessions
        self._input = training_input
        self._preparation = preparation
        self._run: Callable[..., Nest] | None = None
        self._active = sessions.leader.workers > 1
        if not self._active:
            return
        if not isinstance(data, PlaceholderDataset):
            raise ValueError("a loop needs the data of the balancer: pass balancer.dataset(x, y)")
        data.example()  # as Keras does, to announce the data set
        training_input.begin_fit()
        iter(data)
        sessions.close()
        sessions.start({})

    def __enter__(self) -> BalancedLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def epoch(self) -> Iterator[Nest]:
        """Trains an epoch, and yields what the train step of this worker returns in each step."""
        leader = self._sessions.leader
        if not self._active:
            yield from self._epoch_alone()
            return
        if self._run is None:
            self._sessions.begin_epoch(0)
            self._input.begin_epochs()
            step = self._preparation.prepare(self._train_step)
            self._run = tf.function(lambda: self._strategy.run(step), autograph=False)
        else:
            self._preparation.begin_epoch()
        self._sessions.exclude_step()
        for _ in range(self._input.order.steps_per_epoch):
            if leader.stopping:
                return
            self._input.begin_step()
            self._preparation.set_samples(sum(leader.sizes))
            self._sessions.begin_step()
            result = compat.local(self._strategy, self._run())
            self._input.end_step()
            self._preparation.end_step()
            yield result
        self._input.end_epoch()

    def request_stop(self) -> None:
        """Asks all workers to stop; their `epoch` ends after the same step."""
        self._sessions.leader.request_stop()

    def close(self) -> None:
        """Ends the training; call it after the last epoch, or use the loop as a context."""
        if self._active:
            self._input.end_fit()
            self._sessions.close()

    def _epoch_alone(self) -> Iterator[Nest]:
        if self._run is None:
            function = self._train_step.function
            self._run = tf.function(
                lambda batch: self._strategy.run(function, args=(batch,)),
                autograph=False,
                reduce_retracing=True,
            )
        for batch in self._data:
            yield self._run(batch)
            self._sessions.skip_step()
