"""Call a store, which may take long, or for ever, in threads of their own, and leave it alone while it fails."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcache.threads import Condition

MAX_FAILURES = 3  # in a row, until a store is left alone
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds for which it is left alone
LINGER = 1.0  # seconds after which a thread without work ends

logger = logging.getLogger("kvcache")


class Breaker:
    """Leaves a store alone after failures in a row. Called with the lock of what it guards held.

    After `MAX_FAILURES`, nobody asks the store until the time `until`. Then one caller does, which is `probing`.
    """

    def __init__(self) -> None:
        self.failures = 0  # in a row
        self.pause = FIRST_PAUSE  # seconds of the next pause
        self.until = 0.0  # when the pause ends, by time.monotonic()
        self.probing = False  # whether the store is being asked once more, after a pause

    @property
    def is_open(self) -> bool:
        """Whether the store is left alone."""
        return self.failures >= MAX_FAILURES

    @property
    def may_probe(self) -> bool:
        """Whether the store may be asked once more, because its pause is over and nobody does."""
        return not self.probing and time.monotonic() >= self.until

    def succeeded(self) -> None:
        """Note that a call of the store succeeded."""
        self.failures, self.pause, self.probing = 0, FIRST_PAUSE, False

    def failed(self) -> bool:
        """Note a failure; return whether it is the one with which the pause begins.

        Failures of what was asked before the pause come during it, and make it no longer.
        """
        self.failures += 1
        now = time.monotonic()
        if self.is_open and now >= self.until:
            self.until = now + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.probing = False
        return self.failures == MAX_FAILURES


class Worker:
    """A queue, the threads that work it off, and the breaker of what they do; all fields under the store's lock.

    `work` takes jobs from the queue, and does them. `busy` has the threads that do it now, and `changed` is told when a
    job comes or ends.
    """

    def __init__(self, name: str, lock: threading.RLock, work: Callable[[], None], most_threads: int = 1) -> None:
        self.name = name
        self.work = work  # takes jobs from the queue, and does them
        self.most_threads = most_threads
        self.lock = lock
        self.changed = Condition(lock)  # told when a job comes or ends
        self.breaker = Breaker()
        self.queue: deque[Any] = deque()  # jobs that wait
        self.threads: set[threading.Thread] = set()
        self.busy: dict[threading.Thread, float] = {}  # when each thread began what it does

    def add(self, job: Any) -> bool:
        """Queue a job; return False if there can be no thread for it, as while the interpreter exits."""
        num_free = len(self.threads) - len(self.busy) - len(self.queue)
        if num_free <= 0 and len(self.threads) < self.most_threads:
            started = self._start()
            if not started and not self.threads:
                return False
        self.queue.append(job)
        self.changed.notify_all()
        return True

    def _start(self) -> bool:
        """Start a thread; return False if there can be none. What a signal's handler raises meanwhile is raised."""
        thread = threading.Thread(target=self.run, name=f"kvcache-{self.name}", daemon=True)
        handled = sys.exc_info()[1]
        try:
            thread.start()  # it waits for the lock
        except (RuntimeError, KeyError) as error:
            cause = error.__context__
            if cause is not None and cause is not handled:  # a signal's handler raised it, and start() failed for that
                raise cause from None
            if isinstance(error, KeyError) or not _is_of_threading(error):  # a handler raised it
                raise
            return False
        self.threads.add(thread)
        return True

    def run(self) -> None:
        """Work until there has been nothing to do for a while. The threads run this."""
        changed, thread = self.changed, threading.current_thread()
        with self.lock:
            if thread not in self.threads:  # an exception came between its start and the note of it
                return
            try:
                while self.queue or changed.wait_for(lambda: self.queue, LINGER):
                    self.busy[thread] = time.monotonic()
                    changed.release()
                    try:
                        self.work()
                    except BaseException:  # of the work's own, such as for want of memory: jobs to come need the thread
                        _log()
                    finally:
                        changed.acquire()
                        del self.busy[thread]
                        changed.notify_all()
            finally:
                self.threads.discard(thread)  # before the lock is let go, so that no job waits for a thread that ended

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or at work."""
        return not self.queue and not self.busy

    @property
    def since(self) -> float | None:
        """When the thread that has been at work for longest began what it does; None if none is."""
        return min(self.busy.values(), default=None)


def _is_of_threading(error: BaseException) -> bool:
    """Return whether Python's module threading raised an error, or the interpreter at its call."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == threading.__name__


def without_frames(error: BaseException) -> BaseException:
    """Return an error that no longer holds what was in the frames it came through, such as values."""
    return BaseException.with_traceback(error, None)


def _log() -> None:
    try:
        logger.exception("a thread that uses a store failed, and goes on")
    except BaseException:  # a handler may raise anything
        return
