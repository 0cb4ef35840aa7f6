"""Keys that a script gives to a distributed store, and their native numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

Key: TypeAlias = "int | str"
Keys: TypeAlias = "Key | Sequence[Key] | Sequence[Sequence[Key]]"
"""One key or a list of keys, as MXNet's stores take them."""

FIRST_OWN_KEY: Final = 100_000
"""First native number of this package's own keys; those of scripts are below."""

LARGEST_KEY: Final = (2**31 - 1) // 9973
"""Largest key for which ``key * 9973`` fits in 32 bits: beyond it MXNet reads invalid memory."""


class ScriptKeys:
    """Native numbers of the keys that a script has introduced in one store.

    MXNet numbers the text keys of a process by their first use, so that workers which introduce
    them in another order exchange values of different keys. And it accepts a key only once, for all
    stores of a process. Here every store has keys of its own. An integer keeps its value if no
    other store has taken it, because it is the index that an optimizer on the servers sees.
    `taken`, the numbers that the stores of this process have taken, is shared by all of them.
    """

    def __init__(self, taken: set[int]) -> None:
        self._taken = taken
        self._numbers: dict[Key, int] = {}

    @property
    def indices(self) -> dict[int, int]:
        """Index of each number for an optimizer: an integer key, or the position of a text."""
        return {
            number: key if isinstance(key, int) else position
            for position, (key, number) in enumerate(self._numbers.items())
        }

    def unknown(self, keys: Keys) -> list[Key]:
        """Returns the keys that have not been introduced."""
        return [key for key in flat(keys) if key not in self._numbers]

    def introduce(self, keys: Keys) -> None:
        """Gives numbers to new keys."""
        for key in flat(keys):
            if key not in self._numbers:
                self._numbers[key] = self._choose(key)
                self._taken.add(self._numbers[key])

    def numbers(self, keys: Keys) -> Any:
        """Returns the numbers of known keys, in the same nesting."""
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            return self._numbers[plain(keys)]
        return [self.numbers(key) for key in keys]

    def _choose(self, key: Key) -> int:
        if isinstance(key, int) and key not in self._taken:
            return key
        free = range(FIRST_OWN_KEY) if isinstance(key, str) else range(FIRST_OWN_KEY - 1, -1, -1)
        return next(number for number in free if number not in self._taken)


def flat(keys: Keys) -> Iterator[Key]:
    """Yields the single keys in one key or a list of keys."""
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        yield plain(keys)
    else:
        for key in keys:
            yield from flat(key)


def plain(key: object) -> Key:
    """Returns a key as int or str."""
    if isinstance(key, str):
        return key
    if isinstance(key, int | np.integer) and 0 <= int(key) < FIRST_OWN_KEY:
        return int(key)
    raise TypeError(
        f"keys must be texts or integers in [0, {FIRST_OWN_KEY}), got {key!r}: larger integers "
        "belong to lbbsp_mx; use the key as a text"
    )
