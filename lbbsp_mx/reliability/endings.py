"""Work before this process leaves the cluster, of trainers that may be freed earlier: `Endings`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

Ending = Callable[[], Any]


class Endings:
    """Methods that are called before this process leaves the cluster, the latest first.

    The objects of the latest call of `add` are kept alive, because a script may drop its trainer
    before its end. Those of earlier calls may be freed, so that a script can create trainers in a
    loop.

    Example:
        >>> class Trainer:
        ...     def __init__(self, name):
        ...         self.name = name
        ...     def end(self):
        ...         print(self.name, "ends")
        >>> endings = Endings()
        >>> for name in ("first", "second", "third"):
        ...     trainer = Trainer(name)
        ...     first = trainer if name == "first" else first
        ...     endings.add(trainer.end)
        >>> del trainer
        >>> endings.run()
        third ends
        first ends
    """

    def __init__(self) -> None:
        self._methods: list[WeakMethod[Ending]] = []
        self._latest: tuple[Ending, ...] = ()  # kept alive

    def add(self, *methods: Ending) -> None:
        """Adds the bound methods of a new trainer."""
        self._latest = methods
        alive = [reference for reference in self._methods if reference() is not None]
        self._methods = [*alive, *map(WeakMethod, methods)]

    def run(self) -> None:
        """Calls the methods of all objects that still exist."""
        for reference in reversed(self._methods):
            if (method := reference()) is not None:
                method()
