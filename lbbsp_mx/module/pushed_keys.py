"""Pushes of a training step by key, which tell when its last gradient was pushed: `PushedKeys`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lbbsp_mx.store.script_keys import Key


class PushedKeys:
    """Counts how often each key is pushed in a step, and knows it from the steps before.

    A step is complete when each key was pushed as often as in earlier steps, and pulled afterwards
    if it was so then. Other calls, such as pulls by a callback, do not count. The first step is
    never complete, because nothing is known yet.
    """

    def __init__(self) -> None:
        self._usual: Counter[Key] = Counter()
        self._usually_pulled: set[Key] = set()
        self._pushes: Counter[Key] = Counter()
        self._pulled: set[Key] = set()  # after their last push

    @property
    def complete(self) -> bool:
        """True if nothing of what earlier steps had is missing."""
        return bool(self._usual) and (
            self._pushes >= self._usual and self._pulled >= self._usually_pulled
        )

    def push(self, keys: Sequence[Key]) -> None:
        """Counts a push of keys."""
        again = [key for key in keys if self._pushes[key] and self._pushes[key] >= self._most(key)]
        if again:
            raise ValueError(
                f"a step has one batch, and the gradient of {again[0]!r} is pushed again after the "
                "update with it: draw a batch before each update, or call train.reset() before "
                "updates with other batches, which are not scaled then"
            )
        self._pushes.update(keys)
        self._pulled.difference_update(keys)

    def pull(self, keys: Sequence[Key]) -> None:
        """Notes that keys were pulled."""
        self._pulled.update(key for key in keys if self._pushes[key])

    def end_step(self) -> None:
        """Learns from the step, and begins the next one."""
        self._usually_pulled |= self._pulled - self._usual.keys()
        self._usual |= self._pushes
        self._pushes, self._pulled = Counter(), set()

    def _most(self, key: Key) -> float:
        """Returns how often a key may be pushed; without limit if that is not known yet."""
        return self._usual[key] or (1 if self.complete else float("inf"))
