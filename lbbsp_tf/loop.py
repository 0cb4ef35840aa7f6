"""Custom training loops: `BalancedLoop`, for users of `strategy.run` and `train_on_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat import Nest
from lbbsp_tf.dataset import PlaceholderDataset
from lbbsp_tf.train_step import TrainStep
from lbbsp_tf.training import Training


class BalancedLoop:
    """Balanced steps of a custom training loop; `LoadBalancer.loop` creates it.

    Args:
        train_step: Function of a batch that applies gradients by Keras optimizers, written as for
            a single process; for example `keras.Model.train_step` of a compiled model.
        data: What `LoadBalancer.dataset` has returned.
        strategy: Strategy of the user.
        training: Parts of the balancer.

    Raises:
        ValueError: `data` did not come from the balancer, or its session cannot start.
    """

    def __init__(
        self,
        train_step: Callable[[Nest], Nest],
        data: tf.data.Dataset | PlaceholderDataset,
        *,
        strategy: tf.distribute.Strategy,
        training: Training,
    ) -> None:
        self._train_step = TrainStep.of_function(train_step)
        self._data = data
        self._strategy = strategy
        self._training = training
        self._leader = training.sessions.leader
        self._run: Callable[..., Nest] | None = None
        self._active = self._leader.workers > 1
        if not self._active:
            if not isinstance(data, tf.data.Dataset):  # rows of an array would be single samples
                raise _not_of_balancer()
            return
        if not isinstance(data, PlaceholderDataset):
            raise _not_of_balancer()
        data.example()  # as Keras does, to announce the data set
        training.begin({})
        iter(data)

    def __enter__(self) -> BalancedLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def epoch(self) -> Iterator[Nest]:
        """Trains an epoch, and yields what the train step of this worker returns in each step."""
        training = self._training
        if not self._active:
            yield from self._epoch_alone()
            return
        if self._run is None:
            training.begin_first_epoch(0)
            step = training.prepare(self._train_step)
            self._run = tf.function(lambda: self._strategy.run(step), autograph=False)
        else:
            training.begin_epoch()
        for _ in range(training.input.order.steps_per_epoch):
            if self._leader.stopping:
                return
            training.begin_step()
            result = compat.local(self._strategy, self._run())
            training.end_step()
            yield result
        training.input.end_epoch()

    def request_stop(self) -> None:
        """Asks all workers to stop; their `epoch` ends after the same step."""
        self._leader.request_stop()

    def close(self) -> None:
        """Ends the training; call it after the last epoch, or use the loop as a context."""
        if self._active:
            self._training.end()

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
            self._training.sessions.skip_step()


def _not_of_balancer() -> ValueError:
    return ValueError("a loop needs the data of the balancer: pass balancer.dataset(x, y)")
