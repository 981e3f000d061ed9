"""`Living`: the objects of a kind that are alive."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """Keeps weak references to objects, which threads may add, drop and list at once.

    A ``weakref.WeakSet`` will not do: without a GIL, a set that is iterated changes when an object dies.
    """

    def __init__(self) -> None:
        self._by_id: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, one: T) -> None:
        """Note an object."""
        self._by_id[id(one)] = one

    def alive(self) -> list[T]:
        """Return the objects that are alive."""
        return [one for ref in self._by_id.valuerefs() if (one := ref()) is not None]
