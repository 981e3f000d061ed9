"""`Condition` and `Living`: what Python's own lack where threads, signals and finalizers meet."""

from __future__ import annotations

import threading
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


class Condition(threading.Condition):
    """A condition whose lock is held behind `wait`, whatever is raised there.

    If a signal comes when Python's own has just let its lock go, it does not take the lock again. Enter the lock, not
    the condition: Python's own may be interrupted while it takes the lock, and then never lets it go.
    """

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__(lock)
        self._own = lock

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as Python's own does."""
        try:
            return super().wait(timeout)
        except BaseException:
            try:
                self.notify(0)  # which tells whether this thread holds the lock
            except RuntimeError:
                self._own.acquire()
            raise
