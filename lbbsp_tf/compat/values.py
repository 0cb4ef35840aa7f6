"""Values of a strategy, and temporary replacement of methods: what all patches share."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any, TypeAlias

import keras
import numpy.typing as npt
import tensorflow as tf

Array: TypeAlias = npt.NDArray[Any]

Nest: TypeAlias = Any
"""A value, or a nest (tuple, list, dict) of values."""

Method: TypeAlias = "Callable[..., Any]"
"""Function or method that is replaced, or what replaces it."""

Place: TypeAlias = "tuple[type | ModuleType, str, Method]"
"""Class or module, the name of a function in it, and what replaces it."""

IN_PLACE, IN_CONTEXT, NOT_NEEDED, GONE = "in place", "in a context", "not needed", "gone"

_DONE = "_lbbsp_patched"


def local(strategy: tf.distribute.Strategy, value: Nest) -> Nest:
    """Returns this worker's part of a distributed value, or of each value in a nest."""
    return keras.tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], value)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute inside the context: of a class, a module, or one instance."""
    note(owner, name, IN_CONTEXT)
    # `object` hides the attribute of an instance from Keras's tracking.
    kind = type(owner) if isinstance(owner, type | ModuleType) else object
    before = vars(owner).get(name)
    kind.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            kind.__delattr__(owner, name)
        else:
            kind.__setattr__(owner, name, before)


@contextmanager
def wrapped(*places: Place) -> Iterator[None]:
    """Replaces functions of modules inside the context, by what is made of each of them."""
    with ExitStack() as stack:
        for owner, name, wrap in places:
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        yield


class PerThread(threading.local):
    """Value of each thread, and functions that are replaced in the threads that have set one.

    What replaces a function is given the value, and then the original, before the arguments.
    """

    def __init__(self, *places: Place) -> None:
        self.value: Any = None
        self._places = places

    @contextmanager
    def __call__(self, value: object) -> Iterator[None]:
        """Sets this thread's value inside the context."""
        for owner, name, replacement in self._places:
            patch(owner, name, partial(self._where_set, replacement))
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before

    def _where_set(self, replacement: Method, original: Method, *args: Any, **kw: Any) -> Any:
        if self.value is None:
            return original(*args, **kw)
        return replacement(self.value, original, *args, **kw)


noted = PerThread()
"""List to which the places of patches are added that are applied, each with its state."""


def note(owner: object, name: str, state: str) -> None:
    """Adds the state of a place to the list `noted`, if this thread has one."""
    if noted.value is not None:
        noted.value.append((f"{getattr(owner, '__name__', owner)}.{name}", state))


def patch(owner: type | ModuleType, name: str, replacement: Method) -> None:
    """Replaces a function or property, once, by one that is given the original function first."""
    note(owner, name, IN_PLACE)
    original = getattr(owner, name)
    if is_patched(original):
        return
    is_property = isinstance(original, property)
    function = original.fget if is_property else original

    @wraps(function)
    def with_original(*args: object, **options: object) -> Any:
        return replacement(function, *args, **options)

    patched(with_original)
    setattr(owner, name, property(with_original) if is_property else with_original)


def is_patched(function: Method | property | None) -> bool:
    """Returns whether a function or property is one of our replacements."""
    return hasattr(getattr(function, "fget", function), _DONE)


def patch_broken(owner: type | ModuleType, name: str, sign: str, replacement: Method) -> None:
    """Patches a function, where there is one, if its source contains `sign`."""
    function = getattr(owner, name, None)
    if function is None:
        note(owner, name, GONE)
    elif sign in inspect.getsource(function):
        patch(owner, name, replacement)
    else:
        note(owner, name, NOT_NEEDED)


def patched(function: Method) -> Method:
    """Marks `function` as a replacement, so that it is not wrapped a second time."""
    setattr(function, _DONE, True)
    return function
