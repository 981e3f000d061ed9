"""Do what may take long, or for ever, in a thread of its own, and leave off for a while when it fails."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Breaker", "Worker"]

MAX_FAILURES = 3  # in a row, until a store is left alone
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds for which it is
LINGER = 1.0  # seconds after which a thread without work ends


class Breaker:
    """Leaves a store alone after failures in a row. Called with the client's lock held."""

    def __init__(self) -> None:
        self.failures = 0
        self.pause = FIRST_PAUSE
        self.until = 0.0
        self.probing = False

    @property
    def is_open(self) -> bool:
        """Whether the store is left alone."""
        return self.failures >= MAX_FAILURES

    @property
    def may_probe(self) -> bool:
        """Whether the store may be asked once more, because its pause is over and nobody does."""
        return not self.probing and time.monotonic() >= self.until

    def succeeded(self) -> None:
        """Note that the store did what it was asked."""
        self.failures, self.pause, self.probing = 0, FIRST_PAUSE, False

    def failed(self) -> bool:
        """Note a failure; return whether it is the one with which the pause begins."""
        self.failures += 1
        if self.is_open:
            self.until = time.monotonic() + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.probing = False
        return self.failures == MAX_FAILURES


class Worker:
    """A queue, the thread that works it off, and the breaker of what it does; all fields under the client's lock."""

    def __init__(self, name: str, lock: threading.RLock, work: Callable[[], None]) -> None:
        self.name = name
        self.work = work
        self.changed = threading.Condition(lock)
        self.breaker = Breaker()
        self.queue: deque[Any] = deque()
        self.is_busy = False
        self.began = 0.0  # when it became busy
        self.thread: threading.Thread | None = None

    def add(self, job: Any) -> bool:
        """Queue a job; return False if there can be no thread for it, as while the interpreter exits."""
        if self.thread is None:
            thread = threading.Thread(target=self.run, name=f"kvcache-{self.name}", daemon=True)
            try:
                thread.start()  # it waits for the lock
            except RuntimeError:
                return False
            self.thread = thread
        self.queue.append(job)
        self.changed.notify_all()
        return True

    def run(self) -> None:
        """Work, until there has been nothing to do for a while. What the thread does."""
        changed = self.changed
        with changed:
            if self.thread is not threading.current_thread():  # an exception came between its start and the note of it
                return
            try:
                while self.queue or changed.wait_for(lambda: self.queue, LINGER):
                    self.is_busy, self.began = True, time.monotonic()
                    changed.release()
                    try:
                        self.work()
                    finally:
                        changed.acquire()
                        self.is_busy = False
                        changed.notify_all()
            finally:
                self.thread = None  # before the lock is let go, so that no job waits for a thread that has ended

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or at work."""
        return not self.queue and not self.is_busy
