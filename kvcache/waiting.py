"""`Condition`: waits, and holds its lock afterwards, also if the handler of a signal raises."""

from __future__ import annotations

import threading


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
