"""Keep what was forgotten from coming back out of a store.

A forgetting is the time in which a cache forgets a prompt and finds the keys of its blocks. Its number is what
`num_forgets` was when it began. The keys are doomed: they are not read until the store has deleted their values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from kvcache.threads import Condition

if TYPE_CHECKING:
    from kvcache.stores.tenant import Tenant

MOST_WAIT = 1.0  # seconds for another thread, which an interrupt may have kept from saying that it has ended


class Doomed:
    """The keys of a store that wait to be deleted: until that is done, nothing is read of them.

    Values read before these were found are not added to a cache either: see `adding`.
    """

    def __init__(self) -> None:
        self._keys: dict[str, tuple[int, Tenant]] = {}  # which forgetting found them, and whose it was
        self.num_forgets = 0  # rises as a forgetting begins and as it ends: who read before either notices
        self.begin()

    def begin(self) -> None:
        """Begin with nobody at work; again in a forked child, which does not have its parent's threads."""
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._num_adding = self._num_forgetting = 0  # how many `adding` and `forgetting` go on

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def readable(self, keys: Iterable[str], stop_at_miss: bool) -> list[str]:
        """Return the keys that may be read; with `stop_at_miss` those before the first that may not."""
        if stop_at_miss:
            return list(takewhile(lambda key: key not in self._keys, keys))
        return [key for key in keys if key not in self._keys]

    def has_any(self, tenant: Tenant) -> bool:
        """Return whether keys that a tenant has forgotten wait to be deleted."""
        return any(owner is tenant for _, owner in list(self._keys.values()))

    def items(self) -> list[tuple[str, int]]:
        """Return all keys, and which forgetting found them."""
        return [(key, number) for key, (number, _) in list(self._keys.items())]

    def number(self, key: str) -> int:
        """Return the number of the forgetting that found a key; 0 if it is not doomed, or somebody is forgetting."""
        with self._lock:
            return 0 if self._num_forgetting else self._keys.get(key, (0,))[0]

    def is_due(self, key: str, number: int) -> bool:
        """Return whether a key still waits to be deleted, and the forgetting of this number found it last."""
        return self._keys.get(key, (0,))[0] == number

    def discard(self, key: str, number: int) -> None:
        """Note that a key was deleted or written anew, unless it was found again since this forgetting."""
        with self._lock:
            if self.is_due(key, number):
                del self._keys[key]

    @contextmanager
    def adding(self, num_forgets: int) -> Iterator[bool]:
        """Yield whether to add to a cache what was read when `num_forgets` was this. `forgetting` waits for the end."""
        with self._lock:
            may_add = self.num_forgets == num_forgets and not self._num_forgetting
            self._num_adding += may_add
        try:
            yield may_add
        finally:
            with self._lock:
                self._num_adding -= may_add
                self._changed.notify_all()

    @contextmanager
    def forgetting(self, tenant: Tenant) -> Iterator[Callable[[Iterable[str]], None]]:
        """Wait until nobody adds, and let nobody add until the end; yield a function that takes the keys found."""
        with self._lock:
            self.num_forgets += 1
            number = self.num_forgets
            self._num_forgetting += 1
            self._changed.wait_for(lambda: not self._num_adding, MOST_WAIT)
        try:
            yield partial(self.take, tenant=tenant, number=number)
        finally:
            with self._lock:
                self._num_forgetting -= 1
                self.num_forgets += 1
                self._changed.notify_all()

    def take(self, keys: Iterable[str], tenant: Tenant, number: int | None = None) -> None:
        """Doom keys that the forgetting of this number has found, by default the last one. Takes no lock."""
        self._keys.update(dict.fromkeys(keys, (self.num_forgets if number is None else number, tenant)))

    def wait(self) -> None:
        """Wait until nobody is forgetting: then all keys of blocks that were dropped before are doomed."""
        with self._lock:
            self._changed.wait_for(lambda: not self._num_forgetting, MOST_WAIT)
