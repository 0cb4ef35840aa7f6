"""Comparison of the workers' weights, by digests that travel with the messages of some steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lbbsp_core.runtime.exchange.digest import Array, Digest
from lbbsp_core.runtime.exchange.handshake import Facts
from lbbsp_core.runtime.exchange.protocol import LIMB, DisagreementError, StepMessage
from lbbsp_core.runtime.extensions.base import Extra, StepExtension
from lbbsp_core.runtime.record.record import StepLine

_NOTHING = (0, 0)


class WeightComparison(StepExtension):
    """Compares weights every `SessionOptions.compare_weights` steps."""

    width = 2

    _offered = _NOTHING
    _offers = 0
    _divergence = ""

    def compare(self, weights: Callable[[], Iterable[Array]], *, now: bool = False) -> None:
        """Compares the workers' weights in some steps; call it at the start of every step.

        Args:
            weights: Returns the weights, which must be equal on all workers, when the framework
                has computed what it reads them for; called once in `compare_weights` steps.
            now: Whether to compare them in this step in any case; the same on all workers.
        """
        self.check()
        every = self.session.options.compare_weights
        if not every or self.session.workers == 1:
            return
        self._offers += 1
        # Also in the second one: optimizers that draw noise make weights differ at once.
        if now or self._offers == 2 or self._offers % every == 1 % every:
            arrays = weights()  # this may wait for gradients, which are work on samples
            with self.session.excluded_wait():  # reading may take long, and is none
                self._offered = divmod(Digest.of(arrays).to_integer(), LIMB)

    def check(self) -> None:
        """Raises if the latest comparison has found a difference.

        Raises:
            DisagreementError: Workers have different weights.
        """
        if self._divergence:
            raise DisagreementError(self._divergence)

    def facts(self) -> Facts:
        """Returns how often weights are compared."""
        return {"compare_weights": self.session.options.compare_weights or 0}

    def offer(self) -> Sequence[int]:
        """Returns the digest with which the step began, if weights are compared in it."""
        offered, self._offered = self._offered, _NOTHING
        return offered

    def received(self, line: StepLine, extra: Extra, messages: Sequence[StepMessage]) -> StepLine:
        """Notes if two workers have sent digests of different weights."""
        sent = {
            rank: Digest.from_integer(high * LIMB + low)
            for rank, (high, low) in enumerate(extra)
            if high or low
        }
        for rank, digest in sent.items():
            first, expected = next(iter(sent.items()))
            if not digest.is_close(expected):
                self._divergence = (
                    f"workers have different weights at step {line.step}, where they are compared "
                    f"every {self.session.options.compare_weights} steps: those of worker {first} "
                    f"have norm {expected.norm:.4g} and projection {expected.projection:.4g}, "
                    f"those of worker {rank} {digest.norm:.4g} and {digest.projection:.4g}; a "
                    "callback or script changes the model, the optimizer or its learning rate on "
                    "one worker only, the optimizer draws other noise there, or a layer changes a "
                    "parameter of its own by the samples of one worker: do the same on all "
                    "workers, with the same seeds, or pass compare_weights=None"
                )
        return line

    def close(self) -> None:
        """Forgets the training."""
        self._offered, self._offers, self._divergence = _NOTHING, 0, ""
