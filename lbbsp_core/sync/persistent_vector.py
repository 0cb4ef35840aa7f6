"""Immutable sequence that is cheap to copy with one item replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_BITS = 5
_WIDTH = 1 << _BITS


@dataclass(frozen=True, slots=True)
class PersistentVector(Generic[T]):
    """Tree of tuples with 32 branches each; reading or replacing an item takes O(log n).

    States use it so that a transition is pure without copying the data of ten thousand workers.
    It compares and pickles by value.

    Args:
        tree: Tuples of tuples ... of items.
        length: Number of items.
        shift: Bits of the index below those that choose among the branches of `tree`.

    Example:
        >>> numbers = PersistentVector.of([1, 2, 3])
        >>> list(numbers.replaced(1, 5)), list(numbers)
        ([1, 5, 3], [1, 2, 3])
    """

    tree: tuple[Any, ...]
    length: int
    shift: int

    @classmethod
    def of(cls, items: Iterable[T]) -> PersistentVector[T]:
        """Returns a vector of `items`."""
        nodes: tuple[Any, ...] = tuple(items)
        length, shift = len(nodes), 0
        while len(nodes) > _WIDTH:
            nodes = tuple(nodes[i : i + _WIDTH] for i in range(0, len(nodes), _WIDTH))
            shift += _BITS
        return cls(nodes, length, shift)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> T:
        if not 0 <= index < self.length:
            raise IndexError(f"index must be from 0 to {self.length - 1}, got {index}")
        node = self.tree
        for shift in range(self.shift, 0, -_BITS):
            node = node[(index >> shift) % _WIDTH]
        item: T = node[index % _WIDTH]
        return item

    def __iter__(self) -> Iterator[T]:
        nodes: Iterable[Any] = self.tree
        for _ in range(0, self.shift, _BITS):
            nodes = [item for node in nodes for item in node]
        return iter(nodes)

    def replaced(self, index: int, item: T) -> PersistentVector[T]:
        """Returns a copy with `item` at `index`."""
        if not 0 <= index < self.length:
            raise IndexError(f"index must be from 0 to {self.length - 1}, got {index}")
        return PersistentVector(
            _replaced(self.tree, self.shift, index, item), self.length, self.shift
        )

    def appended(self, item: T) -> PersistentVector[T]:
        """Returns a copy with `item` appended, in O(n): for rare events."""
        return PersistentVector.of([*self, item])


def _replaced(node: tuple[Any, ...], shift: int, index: int, item: Any) -> tuple[Any, ...]:
    slot = (index >> shift) % _WIDTH
    if shift:
        item = _replaced(node[slot], shift - _BITS, index, item)
    return (*node[:slot], item, *node[slot + 1 :])
