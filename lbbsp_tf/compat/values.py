"""Values of a strategy, and temporary replacement of methods: what all patches share."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, TypeAlias

import keras
import tensorflow as tf

Nest: TypeAlias = object
"""A value, or a nest (tuple, list, dict) of values."""

_DONE = "_lbbsp_patched"


def local(strategy: tf.distribute.Strategy, value: Nest) -> Nest:
    """Returns this worker's part of a distributed value, or of each value in a nest."""
    return keras.tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], value)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute inside the context: of a class, a module, or one instance."""
    is_instance = not isinstance(owner, type | ModuleType)
    kind = object if is_instance else type(owner)  # `object`: hidden from Keras's tracking
    before = vars(owner).get(name)
    kind.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            kind.__delattr__(owner, name)
        else:
            kind.__setattr__(owner, name, before)


class PerThread(threading.local):
    """Value of each thread, for patches that must not affect the threads of other replicas."""

    def __init__(self) -> None:
        self.value: Any = None

    @contextmanager
    def set(self, value: object) -> Iterator[None]:
        """Sets this thread's value inside the context."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


def patch(owner: type | ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a function of a class or a module, once, by one that is given the original first."""
    original = getattr(owner, name)
    if is_patched(original):
        return

    @wraps(original)
    def with_original(*args: object, **options: object) -> Any:
        return replacement(original, *args, **options)

    setattr(owner, name, patched(with_original))


def is_patched(function: Callable[..., Nest]) -> bool:
    """Returns whether `function` is one of our replacements."""
    return hasattr(function, _DONE)


def patch_broken(
    owner: type | ModuleType, name: str, sign: str, replacement: Callable[..., Any]
) -> None:
    """Patches a function, where there is one, if its source contains `sign`."""
    function = getattr(owner, name, None)
    if function and not is_patched(function) and sign in inspect.getsource(function):
        patch(owner, name, replacement)


def patched(function: Callable[..., Nest]) -> Callable[..., Nest]:
    """Marks `function` as a replacement, so that it is not wrapped a second time."""
    setattr(function, _DONE, True)
    return function
