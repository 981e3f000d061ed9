"""The calls that a prefix cache makes of a store, and a server that fails or is full."""

import contextlib
import itertools
import time

import pytest
from support import servers
from support.faulty_stores import Faulty
from support.prefixes import BLOCK, make_cache, serve

import kvcache
from kvcache import stores
from kvcache.stores import worker

PROMPT = list(range(100))


@pytest.fixture
def make(monkeypatch):
    """A function that makes a cache and a prefix cache, as another process would have."""
    monkeypatch.setattr(worker, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(worker, "LONGEST_PAUSE", 0.2)
    with contextlib.ExitStack() as stack:

        def make(store, timeout=10):
            cache = make_cache("hybrid", dtype="f16", capacity=40 * BLOCK)
            prefix = kvcache.PrefixCache(cache, store=store, fingerprint="a model", secret=b"secret", timeout=timeout)
            stack.callback(prefix.close, 0)
            return cache, prefix

        yield make


def test_nothing_is_asked_for_behind_what_is_missing(make):
    store = Faulty()
    cache, prefix = make(store)
    serve(prefix, cache, PROMPT)
    assert prefix.flush(10)
    store.calls.clear()
    _, prefix = make(store)
    prefix.acquire([*PROMPT[:40], *range(1000, 2000)])
    assert [verb for verb, _ in store.calls] == ["get"] * 3  # two blocks that are there, and the next


def requests(number):
    """Prompts of which most have been served before, but not all fit in memory."""
    for i in range(number):
        yield [1000 * (i * 7 % 12) + j for j in range(BLOCK * 8)]


def test_a_server_that_is_killed_stopped_and_started_in_the_middle_of_work(tmp_path, make):
    servers.need()
    with servers.Server(tmp_path / "server") as server:
        store = stores.open(f"{server.url}?timeout=0.2")
        cache, prefix = make(store, timeout=0.1)
        begin = time.monotonic()
        for action in (server.stop, server.go_on, server.kill, server.start, server.kill, server.start):
            for prompt in requests(15):
                serve(prefix, cache, prompt)  # compares every row
            action()
        assert time.monotonic() - begin < 60
        assert prefix.stats.store.corrupt == 0
        cache.validate()

        def is_hit():
            for prompt in requests(2):
                serve(prefix, cache, prompt)
            prefix.flush(10)
            other = make(store)
            return serve(other[1], other[0], next(requests(1)))

        servers.until(is_hit)
        server.kill()
        more = itertools.cycle(requests(12))
        before = prefix.stats.store
        servers.until(
            lambda: (
                serve(prefix, cache, next(more)) is not None
                and prefix.stats.store.errors + prefix.stats.store.timeouts > before.errors + before.timeouts
            )
        )


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_server_that_is_full(tmp_path, make, policy):
    valkey = servers.need()
    with servers.Server(tmp_path / "server", "--maxmemory", "4mb", "--maxmemory-policy", policy) as server:
        direct = valkey.Valkey(port=server.port)
        with contextlib.suppress(valkey.ResponseError):
            for i in range(400):
                direct.set(f"of others {i}", bytes(10_000))
        cache, prefix = make(stores.open(f"{server.url}?timeout=30"))
        complete = []
        for prompt in requests(30):
            serve(prefix, cache, prompt)
            complete.append(prefix.flush(10))
        stats = prefix.stats.store
        if policy == "noeviction":  # as its buffers shrink, the server has space for a value now and then
            assert False in complete
            assert stats.dropped > 0
            assert stats.errors > 0
        else:
            assert complete[-1]
            assert stats.dropped == 0
            assert stats.written > 0
        assert stats.reading
        cache.validate()
        direct.flushall()
        new = itertools.count(-1000, -1)
        servers.until(lambda: serve(prefix, cache, [next(new)] * 20) == 0 and prefix.stats.store.writing)
