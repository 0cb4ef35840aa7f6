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
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from lbbsp_core.runtime.exchange.collectives import Collectives, gather_bytes
from lbbsp_core.runtime.exchange.protocol import DisagreementError

Setting: TypeAlias = "bool | int | float | str | None"
Settings: TypeAlias = Mapping[str, Setting]
"""Values by name; the names are those of the message to the user."""

TOLERANCE: Final = 1e-6
"""Relative difference of numbers that counts: libraries round a cosine in different ways."""

_NAMED = 3


class SharedSettings:
    """Compares the settings of the workers, in every step in which they are offered.

    Example:
        >>> from lbbsp_core import SingleWorker
        >>> shared = SharedSettings()
        >>> shared.offer({"learning rate": 0.1})
        >>> shared.compare(0, [shared.fingerprint])
        >>> shared.check(SingleWorker(), "set it on all workers")
    """

    def __init__(self) -> None:
        self._offered: Settings = {}
        self.disputed: int | None = None
        """First step in which the settings of two workers differed; None if there is none."""
        self.fingerprint = 0
        """Fingerprint of the settings, in [0, 2^24); 0 if none are offered."""

    def offer(self, settings: Settings) -> None:
        """Sets the settings of this worker in the running step."""
        self._offered = dict(settings)
        self.fingerprint = fingerprint(settings)

    def compare(self, step: int, fingerprints: Sequence[int]) -> None:
        """Notes whether the workers' fingerprints of a step differ."""
        if self.disputed is None and any(each != fingerprints[0] for each in fingerprints):
            self.disputed = step

    def check(self, collectives: Collectives, remedy: str) -> None:
        """Raises if settings differed; call it on all workers, before the next `offer`.

        It is a collective only where fingerprints differed, which all workers know.
        """
        step, self.disputed = self.disputed, None
        if step is None:
            return
        texts = gather_bytes(collectives, json.dumps(list(self._offered.items())).encode())
        found = differences([dict(json.loads(text)) for text in texts])
        if found:
            raise DisagreementError(
                f"workers disagree on the {'; on the '.join(found[:_NAMED])}; this is so since "
                f"step {step}, and makes their models different: {remedy}"
            )


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
    names = list(dict.fromkeys(name for each in settings for name in each))
    found = []
    for name in names:
        values = [each.get(name) for each in settings]
        if not all(_is_close(values[0], value) for value in values):
            shown = ", ".join(f"{value!r} on worker {rank}" for rank, value in enumerate(values))
            found.append(f"{name} ({shown})")
    return found


def _rounded(value: Setting) -> Setting:
    return f"{value:.7g}" if isinstance(value, float) else value


def _is_close(one: Setting, other: Setting) -> bool:
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return one == other
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=TOLERANCE)
