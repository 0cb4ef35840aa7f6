"""LB-BSP for ``gluon.contrib.estimator``: `LoadBalancingHandler`."""

from __future__ import annotations

from typing import Any

from mxnet.gluon.contrib.estimator import (
    EpochBegin,
    GradientUpdateHandler,
    TrainBegin,
)

from lbbsp_mx.trainer import Trainer


class LoadBalancingHandler(TrainBegin, EpochBegin, GradientUpdateHandler):
    """Handler with which `Estimator.fit` trains on unequal workers that stop at the same step.

    Pass it as one of the ``event_handlers`` of `fit`, together with a loader that has the
    trainer's batch sampler. A handler that ends the training on one worker must call
    `lbbsp_mx.Trainer.request_stop`; all workers then stop at the same step.

    Args:
        priority: Order among the handlers, as for gluon's GradientUpdateHandler.

    Example::

        estimator.fit(loader, epochs=5, event_handlers=[lbbsp_mx.LoadBalancingHandler()])
    """

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Checks that the estimator has an `lbbsp_mx.Trainer`.

        Raises:
            ValueError: It has another trainer.
        """
        if not isinstance(estimator.trainer, Trainer):
            raise ValueError(
                "the estimator's trainer must be an lbbsp_mx.Trainer, got "
                f"{type(estimator.trainer).__module__}.{type(estimator.trainer).__name__}: pass "
                "Estimator(..., trainer=lbbsp_mx.Trainer(...))"
            )

    def epoch_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Excludes the first step, because it may follow a validation."""
        estimator.trainer.exclude_step()

    def batch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        """Makes a step of the trainer, and returns whether all workers stop after it.

        Raises:
            ValueError: The losses are already averaged, without ``mean_loss=True``.
        """
        losses, labels = _listed(kwargs["loss"]), _listed(kwargs["label"])
        samples = sum(label.shape[0] for label in labels)
        averaged = sum(loss.size for loss in losses) == len(losses) < samples
        if averaged and not estimator.trainer.mean_loss:
            raise ValueError(
                f"the loss must be per sample, got one number for {samples} samples: do not "
                "average it, or pass mean_loss=True to lbbsp_mx.Trainer if it is a mean"
            )
        estimator.trainer.step(samples)
        return bool(estimator.trainer.stopping)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
