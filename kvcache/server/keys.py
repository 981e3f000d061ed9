"""API keys: who has one, what is kept for it, and what it has pinned."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from kvcache import CacheFullError, PrefixCache
from kvcache.errors import shown
from kvcache.server.errors import ApiError
from kvcache.server.model import Served

LIMITS = {"quota": 0, "max_requests": 1, "pinned": 0}  # whole numbers that a key may have, each with its least


def read_keys(path: Path, adapters: Container[str] = ()) -> dict[str, dict[str, Any]]:
    """Read the API keys of a file, which no message quotes; raise ValueError for settings that there are not.

    `adapters` are those that there are.
    """
    try:
        keys: Any = json.loads(path.read_bytes(), object_pairs_hook=distinct)
        json.dumps(keys, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a character
        raise ValueError(f"{path} has text that UTF-8 cannot encode") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON of keys: {error}") from None
    settings: list[Any] = [*keys.values()] if isinstance(keys, dict) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in settings):
        raise ValueError(f"{path} must have an object of keys, each of which has an object with a name")
    if not keys or not all(key and key == key.strip() and key.isprintable() for key in keys):
        raise ValueError(
            f"{path} must have one key or more; none may be empty, or have blanks around it or control characters"
        )
    for one in settings:
        if unknown := one.keys() - LIMITS.keys() - {"name", "adapters"}:
            raise ValueError(f"{path}: {one['name']} has a field {min(unknown)!r}, which there is not")
        for field, least in LIMITS.items():
            value = one.get(field, least)
            if type(value) is not int or not least <= value < 1 << 31:
                raise ValueError(
                    f"{path}: {field} of {one['name']} must be a whole number from {least} to {(1 << 31) - 1}"
                )
        check_allowed(f"{path}: adapters of {one['name']}", one.get("adapters", []), adapters)
    if len({one["name"] for one in settings}) < len(settings):  # counters tell tenants apart by their names
        raise ValueError(f"{path}: two keys have the same name")
    return dict(keys)


def check_allowed(what: str, names: Any, adapters: Container[str]) -> None:
    """Raise ValueError unless a key's adapters are a list of names that there are."""
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ValueError(f"{what} must be a list of names")
    for name in names:
        if name not in adapters:
            raise ValueError(f"{what} has {shown(name)}, which no --adapter names")


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise ValueError if a field is there twice."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key or a field is there twice")
    return found


class Tenant:
    """Who has a key: a part of the cache that is kept for it, so many requests at once, and prompts that it pinned.

    `adapters` are those that it may ask for; None: all. `prefixes` has a prefix cache for each model name that
    it may ask for: the base model's, and those of adapters.
    """

    def __init__(
        self,
        served: Served,
        key: str,
        name: str,
        quota: int = 0,
        max_requests: float = 16,
        pinned: int = 0,
        adapters: list[str] | None = None,
    ) -> None:
        self.key, self.name, self.max_requests, self.max_pinned = key.encode(), name, max_requests, pinned
        allowed = [one for one in served.names if one == served.name or adapters is None or one in adapters]
        # Rows that an adapter computed are of no use to others, so each model has its own prompts.
        self.prefixes: dict[str, PrefixCache] = {
            model: served.tenant(b"tenant " + self.key, quota, model) for model in allowed
        }
        served.reserve(pinned)
        self._tokens_of_state = served.tokens_of_state  # for which each pin counts, too
        self.num_requests = 0
        self.preparing = asyncio.Lock()  # one prompt of a key is made at a time, so that others' have threads
        # By model and pinned tokens: how many tokens are pinned, whole blocks, and the timer that ends it.
        self._pins: dict[tuple[str, tuple[int, ...]], tuple[int, asyncio.TimerHandle]] = {}

    @property
    def num_pinned(self) -> int:
        """How many tokens are pinned."""
        return sum(num for num, _ in self._pins.values())

    def check_requests(self) -> None:
        """Raise if the key has as many requests as it may."""
        if self.num_requests >= self.max_requests:
            message = f"the key has {self.num_requests} requests already, its most: wait until one has ended"
            raise ApiError(message, status=429, code="rate_limit_exceeded")

    def end_request(self, _: object = None) -> None:
        """Count a request no more."""
        self.num_requests -= 1

    def check_model(self, name: str | None) -> None:
        """Raise for a model that there is not, or not for this key; None is the base model."""
        if name is not None and name not in self.prefixes:
            names = " or ".join(map(repr, self.prefixes))
            raise ApiError(f"model: there is {names} alone", "model", status=404, code="model_not_found")

    def pin(self, model: str, tokens: list[int], seconds: float) -> None:
        """Keep the first tokens of a prompt for so long, or for longer, if that is within the key's limit."""
        name, loop, prefix = (model, tuple(tokens)), asyncio.get_running_loop(), self.prefixes[model]
        num, timer = self._pins.get(name, (0, None))
        until = max(loop.time() + seconds, timer.when() if timer else 0.0)
        most = -(-len(tokens) // prefix.cache.block_size) * prefix.cache.block_size  # a block is pinned as a whole
        most += self._tokens_of_state
        if num < most:  # it may be known to its end now
            if self.num_pinned - num + most > self.max_pinned:
                return
            try:
                pinned = prefix.pin(tokens)
            except CacheFullError:
                return
            if timer is not None:
                prefix.unpin(tokens)
            num = most if pinned == len(tokens) else pinned and pinned + self._tokens_of_state
        if timer is not None:
            timer.cancel()
        if num:
            self._pins[name] = num, loop.call_at(until, self._unpin, name)
        else:
            prefix.unpin(tokens)

    def _unpin(self, name: tuple[str, tuple[int, ...]]) -> None:
        del self._pins[name]
        model, tokens = name
        self.prefixes[model].unpin(tokens)


class Tenants:
    """All who may ask. Without keys there is one, for everybody, which pins nothing."""

    def __init__(self, served: Served, keys: dict[str, dict[str, Any]] | None) -> None:
        self.is_open = keys is None  # whether everybody may ask, without a key
        named = {"": {"name": "all", "max_requests": math.inf}} if keys is None else keys
        self._all = [Tenant(served, key, **settings) for key, settings in named.items()]

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._all)

    def of(self, authorization: str) -> Tenant:
        """Return whose key a header has."""
        if self.is_open:
            return self._all[0]
        kind, _, key = authorization.strip(" \t").partition(" ")
        given = key.strip(" \t").encode("latin-1")  # bytes of UTF-8, which may be blanks of Latin-1
        found = [one for one in self._all if hmac.compare_digest(one.key, given)]
        if kind.lower() != "bearer" or not found:
            raise ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
        return found[0]
