"""What the trainers of this package have in common: `OwnTrainer`."""

from __future__ import annotations

from typing import Any, NoReturn

from mxnet import gluon


class UnavailableError(ValueError, AttributeError):
    """Error for what a trainer cannot do; also an AttributeError, which `hasattr` expects."""


class Unavailable:
    """An attribute of a class that has it for its base or for its siblings, and cannot do it."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __get__(self, owner: object, cls: type) -> NoReturn:
        """Raises an error that names the alternative."""
        raise UnavailableError(self._reason)


class OwnTrainer(gluon.Trainer):
    """Gluon's trainer with a session, which measures the steps of this worker."""

    _session: Any

    def exclude_step(self) -> None:
        """Excludes the running step from learning, because it contains other work."""
        self._session.exclude_step()

    @property
    def _loss_scaler(self) -> Any:
        """Loss scaler of mixed precision, or None."""
        return getattr(self, "_amp_loss_scaler", None)

    def __deepcopy__(self, memo: dict[int, object]) -> OwnTrainer:
        """Returns itself: the parameters of a copied network refer to the trainer."""
        return self
