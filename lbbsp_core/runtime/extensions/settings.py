"""Settings that may change during the training and must stay equal on all workers.

A learning rate that one worker sets otherwise than its peers makes the models of the workers
differ, without an error. Every worker therefore sends a fingerprint of its settings in each step.
Where fingerprints differ, all workers see it in the same step and then gather the values, to name
them.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from lbbsp_core.runtime.exchange.collectives import gather_bytes
from lbbsp_core.runtime.exchange.protocol import DisagreementError, StepMessage
from lbbsp_core.runtime.extensions.base import Extra, StepExtension
from lbbsp_core.runtime.record.record import StepLine

Setting: TypeAlias = "bool | int | float | str | None"
Settings: TypeAlias = Mapping[str, Setting]
"""Values by name; the names are those of the message to the user."""

TOLERANCE: Final = 1e-6
"""Relative difference of numbers that counts: libraries round a cosine in different ways."""

_NAMED = 3


class SettingsComparison(StepExtension):
    """Compares the settings of the workers, in every step in which they are given."""

    width = 1

    _given: Settings | None = None
    _fingerprint = 0

    disputed: int | None = None
    """First step in which the settings of two workers differed, until `check` has named them."""

    def compare(self, settings: Callable[[], Settings], remedy: str) -> None:
        """Compares settings of the workers; call it at the start of every step.

        Args:
            settings: Returns the settings, which must be equal on all workers.
            remedy: What a user is to do if they are not.

        Raises:
            DisagreementError: They differed in the last step; names the values.
        """
        self.check(remedy)
        if self.session.options.compare_weights and self.session.workers > 1:
            self._given = dict(settings())
            self._fingerprint = fingerprint(self._given)

    def check(self, remedy: str) -> None:
        """Raises if the settings of an earlier step differed; a collective if they did.

        Raises:
            DisagreementError: They differ; names the values.
        """
        step, self.disputed = self.disputed, None
        if step is None:
            return
        own_text = json.dumps(list((self._given or {}).items())).encode()
        texts = gather_bytes(self.session.collectives, own_text)
        if problems := differences([dict(json.loads(text)) for text in texts]):
            raise DisagreementError(
                f"workers disagree on the {'; on the '.join(problems[:_NAMED])}; this is so since "
                f"step {step}, and makes their models different: {remedy}"
            )

    def offer(self) -> Sequence[int]:
        """Returns the fingerprint of this worker's settings, 0 if none are given."""
        return (self._fingerprint,)

    def received(self, line: StepLine, extra: Extra, messages: Sequence[StepMessage]) -> StepLine:
        """Notes whether the workers' fingerprints of a step differ."""
        if self.disputed is None and any(row != extra[0] for row in extra):
            self.disputed = line.step
        return line

    def close(self) -> None:
        """Forgets the training."""
        self._given, self._fingerprint, self.disputed = None, 0, None


def fingerprint(settings: Settings) -> int:
    """Returns a 24-bit fingerprint of settings, not 0; numbers count with seven digits."""
    text = repr([(name, _rounded(value)) for name, value in settings.items()])
    return zlib.crc32(text.encode()) % ((1 << 24) - 1) + 1


def differences(settings: Sequence[Settings]) -> list[str]:
    """Describes the settings that differ, by name: each value with the ranks that have it.

    Example:
        >>> differences([{"wd": 0.0}, {"wd": 0.5}, {"wd": 0.0}])
        ['wd (0.0 on worker 0, 0.5 on worker 1, 0.0 on worker 2)']
    """
    names = list(dict.fromkeys(name for worker_settings in settings for name in worker_settings))
    descriptions = []
    for name in names:
        values = [worker_settings.get(name) for worker_settings in settings]
        if not all(_is_close(values[0], value) for value in values):
            shown = ", ".join(f"{value!r} on worker {rank}" for rank, value in enumerate(values))
            descriptions.append(f"{name} ({shown})")
    return descriptions


def _rounded(value: Setting) -> Setting:
    return f"{value:.7g}" if isinstance(value, float) else value


def _is_close(setting: Setting, other: Setting) -> bool:
    if not (isinstance(setting, int | float) and isinstance(other, int | float)):
        return setting == other
    if math.isnan(setting) or math.isnan(other):
        return math.isnan(setting) and math.isnan(other)
    return math.isclose(setting, other, rel_tol=TOLERANCE)
