"""Put fast stores in front of slow ones, such as a folder of this machine in front of a server that many share."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, TypeVar

from kvcache.arguments import spelt
from kvcache.errors import described
from kvcache.stores import calls
from kvcache.stores.worker import Breaker
from kvcache.threads import Living

T = TypeVar("T")

logger = logging.getLogger("kvcache")


@spelt
class Tiered(MutableMapping[str, bytes]):
    """A mapping of str to bytes in several stores, the fastest first.

    A value is read from the first tier that has it, and kept in the tiers before. It is written to all, and deleted
    from all. A tier that fails costs speed: after 3 failures in a row it is left alone for a second, then twice as long
    each time, up to 30. Reading and writing raise the first tier's error if every tier fails. Deleting, and listing the
    keys, raise an error if any tier fails.

    A tier that failed to take a value may have an older value of the key. It answers with that value if the tiers
    before it lack the key. A prefix cache's keys name what they stand for, and have no older values.

    Parameters
    ----------
    *tiers : mutable mapping of str to bytes
        At least two stores. Each is asked for many keys at once if it can, and may be used by several threads at once.

    Raises
    ------
    ValueError
        If there are fewer than two.
    TypeError
        If one of them is no mutable mapping.

    Examples
    --------
    >>> fast, slow = {}, {"a key": b"a value"}
    >>> store = Tiered(fast, slow)
    >>> store["a key"], fast
    (b'a value', {'a key': b'a value'})
    """

    def __init__(self, *tiers: MutableMapping[str, bytes]) -> None:
        if len(tiers) < 2:
            raise ValueError(f"{len(tiers)} tiers: at least two are needed, the fastest first")
        for tier in tiers:
            if not isinstance(tier, MutableMapping):
                raise TypeError(f"a tier is a {type(tier).__name__}: a mutable mapping of str to bytes is needed")
        self.tiers = tiers
        self._tiers = [_Tier(tier) for tier in tiers]
        # By the id of each call under way: keys deleted meanwhile, and keys to delete.  None stands for all keys.
        self._reads: dict[int, set[str | None]] = {}
        self._deletions: dict[int, str | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.tiers

    def __repr__(self) -> str:
        return f"Tiered({', '.join(map(calls.name_of, self.tiers))})"

    # ---- one value

    def __getitem__(self, key: str) -> bytes:
        return self.read_many([key])[key]

    def __setitem__(self, key: str, value: bytes) -> None:
        self.set_many({key: value})

    def __delitem__(self, key: str) -> None:
        num_missing = 0

        def delete(store: MutableMapping[str, bytes]) -> None:
            nonlocal num_missing
            try:
                del store[key]
            except KeyError:
                num_missing += 1

        with self._deleting(key):
            self._use_all(delete)
        if num_missing == len(self.tiers):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        failures: list[Exception] = []
        for tier in self._tiers:
            try:
                if tier.use(lambda store: key in store):
                    return True
            except Exception as error:
                failures.append(error)
        if len(failures) == len(self._tiers):
            raise failures[0]
        return False

    # ---- many

    def read_many(self, keys: Iterable[str], most: int | None = None) -> dict[str, bytes]:
        """Return the values that there are of these keys, with one call of each tier that takes many keys at once.

        A tier that can returns the first `most` bytes of longer values.  Faster tiers keep shorter values only.
        """
        deleted: set[str | None] = set()
        self._reads[id(deleted)] = deleted
        try:
            deleted.update(list(self._deletions.values()))
            return self._read_many(keys, most, deleted)
        finally:
            del self._reads[id(deleted)]

    def _read_many(self, keys: Iterable[str], most: int | None, deleted: set[str | None]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        missing = list(dict.fromkeys(keys))
        failures: list[Exception] = []
        for i, tier in enumerate(self._tiers):
            if not missing:
                break
            try:
                part = tier.use(partial(calls.read_many, keys=missing, most=most))
            except Exception as error:
                failures.append(error)
                continue
            found |= part
            whole = {key: value for key, value in part.items() if type(value) is bytes}
            self._keep({key: value for key, value in whole.items() if most is None or len(value) < most}, i)
            self._drop([key for key in whole if key in deleted or None in deleted], i)
            missing = [key for key in missing if key not in part]
        if len(failures) == len(self._tiers):
            raise failures[0]
        return found

    def _keep(self, items: Mapping[str, bytes], num_tiers: int) -> None:
        """Store values in the first tiers, which did not have them."""
        for tier in self._tiers[:num_tiers] if items else ():
            with contextlib.suppress(Exception):  # it costs speed
                tier.use(partial(calls.write_many, items=items))

    def _drop(self, keys: Iterable[str], num_tiers: int) -> None:
        """Delete keys from the first tiers, in which they were kept though another thread deleted them meanwhile."""
        for key in keys:
            for tier in self.tiers[:num_tiers]:
                with contextlib.suppress(Exception):  # KeyError: that thread came later
                    del tier[key]

    @contextlib.contextmanager
    def _deleting(self, key: str | None) -> Iterator[None]:
        """Let reads under way, and reads that begin meanwhile, keep no value of a key (None: of any key)."""
        own = object()
        self._deletions[id(own)] = key
        try:
            for deleted in list(self._reads.values()):
                deleted.add(key)
            yield
        finally:
            del self._deletions[id(own)]

    def set_many(self, items: Mapping[str, bytes]) -> None:
        """Store values in all tiers. An error says that no tier took all; some may be stored."""
        failures: list[Exception] = []
        for tier in self._tiers:
            try:
                tier.use(partial(calls.write_many, items=items))
            except Exception as error:
                failures.append(error)
        if len(failures) == len(self._tiers):
            raise failures[0]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys(key for store in self.tiers for key in store)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Remove all values from all tiers."""
        with self._deleting(None):
            self._use_all(lambda store: store.clear())

    def _use_all(self, use: Callable[[MutableMapping[str, bytes]], None]) -> None:
        """Use all tiers, even those left alone; then raise the error of the first tier that failed."""
        failures: list[Exception] = []
        for store in self.tiers:
            try:
                use(store)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]


class _Tier:
    """A store, and the breaker that leaves it alone while it fails."""

    def __init__(self, store: MutableMapping[str, bytes]) -> None:
        self.store = store
        self.has_warned = False
        self.begin()
        _tiers.add(self)

    def begin(self) -> None:
        """Begin with no failure; again in a forked child, where the thread is missing that may have had the lock."""
        self.lock = threading.Lock()
        self.breaker = Breaker()

    def use(self, use: Callable[[MutableMapping[str, bytes]], T]) -> T:
        """Use the store; raise what it raises, or ConnectionError while it is left alone."""
        breaker = self.breaker
        with self.lock:
            if breaker.is_open and not breaker.may_probe:
                raise ConnectionError(f"the tier {calls.name_of(self.store)} is left alone, because it fails")
            breaker.probing = breaker.is_open
        try:
            result = use(self.store)
        except (TypeError, ValueError):  # of what it was given, such as a value that is too large for this tier
            breaker.probing = False
            raise
        except BaseException as error:
            with self.lock:
                breaker.failed()
            self._warn(error)
            raise
        with self.lock:
            breaker.succeeded()
        return result

    def _warn(self, error: BaseException) -> None:
        if self.has_warned:
            return
        self.has_warned = True
        with contextlib.suppress(Exception):  # of a handler
            logger.warning("the tier %s fails: %s; others are used", calls.name_of(self.store), described(error))


_tiers: Living[_Tier] = Living()


def _begin_in_child() -> None:
    for tier in _tiers.alive():
        tier.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
