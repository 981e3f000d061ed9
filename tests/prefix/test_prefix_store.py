"""Blocks in a store: the next process finds them; whatever the store does, answers are right."""

import gc
import itertools
import json
import math
import os
import threading
import time
import weakref
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import servers, values
from support.faulty_stores import Blocking, Faulty
from support.prefixes import BLOCK, check_rows, feed, make_cache, serve

import kvcache
from kvcache import stores
from kvcache.prefix.watch import value_of
from kvcache.stores import client, worker

PROMPT = list(range(100))
LONG = 30  # seconds within which anything that should happen has happened


def make(store, kind="full", **arguments):
    """A cache of its own on a store, as another process would have."""
    names = ("salt", "fingerprint", "secret", "timeout")
    own = {name: arguments.pop(name) for name in names if name in arguments}
    cache = make_cache(kind, **arguments)
    return cache, kvcache.PrefixCache(cache, store=store, **{"fingerprint": "a model", "timeout": LONG, **own})


def fill(store, kind="full", prompt=PROMPT, **arguments):
    cache, prefix = make(store, kind, **arguments)
    serve(prefix, cache, prompt)
    assert prefix.close(LONG)


VALUES = Path(__file__).with_name("values-1.json")  # by case, keys and values in base64; never written anew
CASES = {
    "plain": {},
    "tenant": {"kind": "hybrid", "dtype": "f16", "salt": b"a tenant", "secret": b"of this tenant"},
    "words": {"kind": "windows", "prompt": [f"word {i}".encode() for i in range(40)]},
    "large": {"prompt": [i * 2**60 for i in range(40)]},
}


@pytest.mark.parametrize("case", CASES)
def test_values_of_version_1_are_found_for_ever(case):
    """And written, to the byte: machines that share a store may run different releases."""
    arguments = {"prompt": PROMPT[:40]} | CASES[case]
    prompt = arguments.pop("prompt")
    written, store = {}, {key: b64decode(value) for key, value in json.loads(VALUES.read_text())[case].items()}
    fill(written, prompt=prompt, **arguments)
    assert written == store
    cache, prefix = make(store, **arguments)
    seq_id, matched = prefix.acquire(prompt)
    assert matched == 32
    check_rows(cache, seq_id, prompt, matched)


def test_no_more_is_fetched_than_may_be_matched():
    store = {}
    fill(store)
    _, prefix = make(store)
    assert prefix.acquire(PROMPT, max_matched=40)[1] == 32
    assert prefix.stats.fetched == 32


def test_nothing_is_asked_for_behind_what_is_missing():
    store = Faulty()
    fill(store)
    store.calls.clear()
    make(store)[1].acquire([*PROMPT[:40], *range(1000, 2000)])
    assert [verb for verb, _ in store.calls] == ["get"] * 3  # two blocks that are there, and the next


@pytest.mark.parametrize("secret", [None, b"of this tenant"])
def test_values_that_lie(secret):
    """A value that was altered, replayed or made by somebody else is a miss, and deleted. fuzz_values.py has more."""
    store = {}
    fill(store, secret=secret)
    keys, digest = list(store), values.digest_of(make(store)[1])
    good, second = store[keys[0]], store[keys[1]]
    forged = values.pack(keys[0], bytes(32), good[values.HEADER_SIZE :], secret)
    assert values.pack(keys[0], digest, good[values.HEADER_SIZE :], secret) == good
    bad = [b"", good[:-1], good[:-1] + bytes([good[-1] ^ 1]), second, forged]
    bad += [values.pack(keys[0], digest, good[values.HEADER_SIZE :], other) for other in {None, b"other"} - {secret}]
    for value in bad:
        store[keys[0]] = value
        cache, prefix = make(store, secret=secret)
        assert prefix.acquire(PROMPT)[1] == 0
        assert prefix.flush(LONG)
        assert prefix.stats.store.corrupt == 1
        assert keys[0] not in store
        serve(prefix, cache, PROMPT)
        assert prefix.flush(LONG)
        assert store[keys[0]] == good


@pytest.mark.parametrize("second", [kvcache.SlidingWindow(24), kvcache.SlidingWindow(24, resume_window=24)])
def test_a_value_without_some_layers_of_a_group(second):
    """It is a miss: its other layers would get slots that nothing fills, with the rows that another tenant freed."""
    policy = [kvcache.SlidingWindow(24), second, kvcache.FullAttention()]

    def make():
        cache = kvcache.KVCache(3, 1, 2, None, policy=policy, max_sequences=None, block_size=BLOCK, dtype="f32")
        return cache, kvcache.PrefixCache(cache, store=store, fingerprint="a model", timeout=LONG)

    store = {}
    cache, prefix = make()
    serve(prefix, cache, PROMPT)
    assert prefix.close(LONG)
    cache, prefix = make()
    key, size = next(iter(store)), 2 * BLOCK * 8
    del store[list(store)[1]]
    for flags, is_taken in {"101": False, "011": False, "100": False, "001": True, "110": True, "111": True}.items():
        payload = bytes(map(int, flags)) + bytes(flags.count("1") * size)
        store[key] = values.pack(key, values.digest_of(prefix), payload)
        cache.clear(prefix.acquire(PROMPT)[0])
        assert cache.stats()["retained"] == is_taken, flags
        assert prefix.flush(LONG)
        prefix.clear()
    cache.validate()


class Broken(dict):
    def __getitem__(self, key):
        raise OSError("the network is down")

    __setitem__ = __delitem__ = __contains__ = __getitem__


@pytest.mark.parametrize("kind", [Blocking, Broken])
@pytest.mark.filterwarnings("ignore")
def test_a_store_that_fails(kind):
    """Requests do not wait for it, and are right."""
    store = kind()
    cache, prefix = make(store, timeout=0.2)
    for i in range(20):
        prompt = [1000 * (i % 3) + j for j in range(100)]
        assert serve(prefix, cache, prompt) == (0 if i < 3 else 99)
    assert kind is Broken or not store.num_ended, "a request waited for the store"
    cache.validate()
    assert not prefix.flush(timeout=0.1)
    assert not prefix.close(timeout=0.1)


@pytest.mark.filterwarnings("ignore")
def test_flush_and_close_say_whether_the_store_took_everything():
    store = Broken()
    cache, prefix = make(store)
    assert prefix.flush(LONG), "nothing was to be written"
    serve(prefix, cache, PROMPT)
    assert not prefix.flush(LONG)
    assert not prefix.flush(LONG), "what was dropped is still not there"
    assert not prefix.close()
    assert prefix.stats.store.dropped == 6
    cache, prefix = make({})
    serve(prefix, cache, PROMPT)
    assert prefix.flush(math.inf)
    assert prefix.close(LONG)
    assert prefix.stats.store.written == 6
    assert kvcache.PrefixCache(cache, fingerprint="a model").close(), "there is no store"


@pytest.mark.parametrize("length", [20 * BLOCK, 20 * BLOCK + 1, 20 * BLOCK + 8, 21 * BLOCK - 1])
def test_blocks_of_which_windows_have_lost_rows_are_not_missed(length):
    """The store took all that there was to take, so flush says so."""
    store = {}
    cache, prefix = make(store, "windows")
    seq_id, prompt = prefix.new_sequence(), range(length)
    feed(cache, seq_id, prompt, 0, length)
    prefix.release(seq_id, prompt)
    assert prefix.flush(LONG)
    assert prefix.stats.store.dropped == 0
    assert 0 < len(store) < length // BLOCK
    assert prefix.lookup(prompt) == length


def test_a_server_that_is_not_there():
    """The address of a server that nobody started, as a user types it."""
    pytest.importorskip("valkey")
    cache, prefix = make(stores.open(f"valkey://localhost:{servers.free_port()}/0"))
    serve(prefix, cache, PROMPT)
    assert not prefix.flush(LONG)
    assert not prefix.close(LONG)
    assert (prefix.stats.store.dropped, prefix.stats.store.written) == (6, 0)


def test_what_was_forgotten_outlives_prefix_caches(monkeypatch):
    """The store failed to delete it: nobody reads it, though all who know of that are gone."""
    monkeypatch.setattr(worker, "LINGER", 0.01)
    monkeypatch.setattr(worker, "FIRST_PAUSE", 0.05)

    class Kept(dict):
        is_failing = True

        def __delitem__(self, key):
            if self.is_failing:
                raise OSError("read-only just now")
            super().__delitem__(key)

    store = Kept()
    cache, prefix = make(store)
    serve(prefix, cache, PROMPT)
    assert prefix.flush(LONG)
    prefix.forget(PROMPT)
    assert not prefix.flush(LONG)
    gone = weakref.ref(prefix)
    del cache, prefix
    servers.until(lambda: gc.collect() >= 0 and gone() is None)
    time.sleep(0.1)  # until the threads have ended
    gc.collect()
    _, prefix = make(store)
    assert prefix.acquire(PROMPT)[1] == 0
    store.is_failing = False
    servers.until(lambda: prefix.forget(PROMPT) == 0 and prefix.flush(1))
    assert not client._staying
    assert store == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork()")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_beside_a_forget_reads_the_store():
    """A thread that only the parent has was forgetting: the child fetches other prompts, and none of that text."""
    store = {}
    cache, prefix = make(store, block_size=1)
    private, public = list(range(400)), list(range(1000, 1010))
    serve(prefix, cache, public)
    assert prefix.flush(LONG)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(40):
            serve(prefix, cache, private)
            forgetting = pool.submit(prefix.forget, private)
            while prefix.lookup(private[:9] + public):
                pass
            child = os.fork()
            if child == 0:
                prefix.clear()
                is_right = prefix.acquire(public)[1] == 9 and prefix.acquire(private)[1] == 0
                os._exit(0 if is_right else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert forgetting.result() == 400


class Held(dict):
    """A store that takes nothing before it is told to."""

    def __init__(self):
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __setitem__(self, key, value):
        self.entered.set()
        self.go_on.wait(60)
        super().__setitem__(key, value)


@pytest.mark.parametrize("own", [None, b"of this tenant"])
def test_a_tenant_of_a_cache_with_a_secret(own):
    """A MAC is on the tenant's values as well: by its own secret, or by the cache's."""
    secret, tenant = b"of the server", {"salt": b"a tenant"}
    forged, store = {}, {}
    fill(forged, **tenant)
    cache, prefix = make(forged, secret=secret)
    assert prefix.tenant(**tenant, secret=own).acquire(PROMPT)[1] == 0
    cache, prefix = make(store, secret=secret)
    one = prefix.tenant(**tenant, secret=own)
    serve(one, cache, PROMPT)
    assert one.close()
    for key in (None, secret, b"of this tenant"):
        assert make(dict(store), secret=key, **tenant)[1].acquire(PROMPT)[1] == (96 if key == (own or secret) else 0)


def test_rows_that_go_before_they_are_written():
    """They are not in the store, and counted as dropped."""
    store = Held()
    cache, prefix = make(store)
    serve(prefix, cache, PROMPT)
    assert not prefix.flush(0.01)
    prefix.clear()
    store.go_on.set()
    assert not prefix.flush(LONG)
    stats = prefix.stats.store
    assert stats.dropped + stats.written == 6
    assert stats.dropped >= 5
    assert len(store) == stats.written


def test_a_cache_that_is_closed_while_writes_wait(caplog):
    """The blocks are gone like any that are evicted, which is no mistake to log."""
    store = Held()
    cache, prefix = make(store)
    serve(prefix, cache, PROMPT)
    assert store.entered.wait(LONG), "the first block was never copied"
    cache.close()
    store.go_on.set()
    assert not prefix.flush(LONG)
    assert (prefix.stats.store.written, prefix.stats.store.dropped) == (1, 5)
    assert not prefix.close()
    assert caplog.records == []


def test_a_cache_that_is_closed_before_a_block_is_read():
    cache, prefix = make({})
    serve(prefix, cache, PROMPT[:BLOCK])
    assert prefix.flush(LONG)  # its own reading would keep the cache from being closed
    (name,) = prefix.names(PROMPT[:BLOCK])
    assert value_of(cache._core, 0, name, prefix, None)
    assert value_of(cache._core, 7, name, prefix, None) is None  # there is no such block
    cache.close()
    assert value_of(cache._core, 0, name, prefix, None) is None


def test_after_close():
    """The store is left alone; memory goes on."""
    store = {}
    cache, prefix = make(store)
    assert prefix.close(LONG)
    assert serve(prefix, cache, PROMPT) == 0
    assert serve(prefix, cache, PROMPT) == 99
    assert store == {}
    assert not prefix.flush(LONG)
    assert not prefix.close()


def before_each_fetch(prefix, call):
    """Call a function, with the number of the call, before blocks that were read are added."""
    core, numbers = prefix._prefix, itertools.count()

    class Calling:
        lookup, names = core.lookup, core.names

        def fetch(self, *arguments):
            call(next(numbers))
            return core.fetch(*arguments)

    prefix._fetching._prefix = Calling()


@pytest.fixture
def fetching(monkeypatch):
    """A cache and its prefix cache, which in another thread has read the second block from a store, and waits there."""
    store = {}
    fill(store)
    cache, prefix = make(store)
    begun, goes_on, found = threading.Event(), threading.Event(), []

    def wait(number):
        if number == 1:
            begun.set()
            assert goes_on.wait(4 * LONG)

    monkeypatch.setattr("kvcache.prefix.fetching.FETCH_BYTES", 1)
    before_each_fetch(prefix, wait)
    thread = threading.Thread(target=lambda: found.append(prefix.acquire(PROMPT)))
    thread.start()
    assert begun.wait(LONG)

    def finish():
        goes_on.set()
        thread.join(LONG)
        return found[0]

    yield cache, prefix, finish
    finish()


def test_commits_do_not_wait_for_rows_from_a_store(fetching):
    cache, prefix, finish = fetching
    done = threading.Thread(target=serve, args=(prefix, cache, [-1] * 50), daemon=True)
    done.start()
    done.join(LONG)
    assert not done.is_alive()
    seq_id, matched = finish()
    assert matched == 96
    check_rows(cache, seq_id, PROMPT, 96)


@pytest.mark.parametrize("call", ["clear", "close"])
def test_blocks_that_are_dropped_while_they_are_fetched(fetching, call):
    """Rows that arrive later are dropped, too: nothing stays that nobody can reach."""
    cache, prefix, finish = fetching
    getattr(prefix, call)()
    seq_id, matched = finish()
    assert matched == 0
    cache.clear(seq_id)
    prefix.clear()
    assert cache.stats()["live_slots"] == 0
    assert cache.stats()["retained"] == 0


def test_an_error_while_blocks_are_fetched_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr("kvcache.prefix.fetching.FETCH_BYTES", 1)
    store = {}
    fill(store)
    cache, prefix = make(store)

    def interrupt(number):
        if number == 2:
            raise KeyboardInterrupt

    before_each_fetch(prefix, interrupt)
    with pytest.raises(KeyboardInterrupt):
        prefix.acquire(PROMPT)
    assert cache.stats()["live_slots"] == 2 * BLOCK
    assert prefix.evict(1000) == 2 * BLOCK  # none is pinned
    assert cache.stats()["live_slots"] == 0


def test_long_prompts_are_fetched_in_parts(monkeypatch):
    """So that what is read and not yet copied takes little memory."""
    monkeypatch.setattr("kvcache.prefix.fetching.FETCH_BYTES", 1)
    store = {}
    fill(store)
    calls = []

    class Noting(dict):
        def get_many(self, keys):
            calls.append(len(keys))
            return {key: self[key] for key in keys if key in self}

    cache, prefix = make(Noting(store))
    assert prefix.acquire([*PROMPT, *range(200)])[1] == 96
    assert calls == [1] * 7  # the last one finds nothing, and ends it
    cache, prefix = make(Noting(store), timeout=0)
    assert prefix.acquire(PROMPT)[1] == 0
    assert len(calls) == 7
    cache.validate()


def test_parts_without_a_state_are_gone_through(monkeypatch):
    """A prompt of several parts, whose last one has the state from which it resumes."""
    monkeypatch.setattr("kvcache.prefix.fetching.FETCH_BYTES", 1)
    store = {}

    def make():
        cache = make_cache()
        return cache, kvcache.PrefixCache(cache, fingerprint="a model", store=store, timeout=LONG, state_bytes=4)

    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 90)
    prefix.checkpoint(seq_id, PROMPT[:90], b"1234")
    feed(cache, seq_id, PROMPT, 90, 100)
    prefix.release(seq_id, PROMPT)
    assert prefix.close(LONG)
    cache, prefix = make()
    seq_id, matched = prefix.acquire(PROMPT)
    assert (matched, prefix.state(seq_id)) == (90, b"1234")
    check_rows(cache, seq_id, PROMPT, 90)
    assert prefix.stats.store.misses == 0


class Counting(dict):
    """A store that counts what is read, and hands out nothing before it is told to."""

    def __init__(self, items):
        super().__init__(items)
        self.reads = []
        self.goes_on = threading.Event()

    def __getitem__(self, key):
        self.reads.append(key)
        assert self.goes_on.wait(60)
        return super().__getitem__(key)


def acquire_at_once(prefixes, prompts, store):
    """Acquire a prompt from each prefix cache in a thread of its own; return what was matched, in order."""
    waiting, num_caches = prefixes[0]._client._shared.reader._waiting, len(set(prefixes))
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = [pool.submit(prefix.acquire, prompt) for prefix, prompt in zip(prefixes, prompts, strict=True)]
        servers.until(lambda: {len(reads) for reads in list(waiting.values())} == {num_caches})
        time.sleep(0.05)  # until other requests of a prefix cache wait for the one that reads
        store.goes_on.set()
        return [each.result()[1] for each in found]


def test_many_requests_for_one_prompt_read_and_copy_it_once(monkeypatch):
    """However many come at once: each block is read once, and its rows take memory once."""
    monkeypatch.setattr("kvcache.prefix.fetching.MOST_WAIT", LONG)
    filled = {}
    fill(filled)
    store = Counting(filled)
    cache, prefix = make(store)
    fetches = []
    before_each_fetch(prefix, lambda number: fetches.append(number) or time.sleep(0.05))
    prompts = [[*PROMPT, -i] for i in range(16)]
    assert acquire_at_once([prefix] * 16, prompts, store) == [96] * 16
    assert sorted(store.reads) == sorted(filled)
    assert fetches == [0]
    assert cache.stats()["live_slots"] == 96
    cache.validate()


def test_an_interrupted_request_holds_up_others_for_a_moment(monkeypatch):
    """A reader ended before it could say that a block is not being added any more."""
    monkeypatch.setattr("kvcache.prefix.fetching.MOST_WAIT", 0.1)
    store = {}
    fill(store)
    prefix = make(store)[1]
    interrupted = prefix._fetching._alone(next(iter(store)), 1.0)
    interrupted.__enter__()
    assert prefix.acquire(PROMPT)[1] == 96
    assert not prefix._fetching._getting
    interrupted.__exit__(None, None, None)


def test_tenants_share_a_store_and_nothing_else():
    store = {}
    prefixes = [make(store, salt=b"%d" % i, secret=b"secret %d" % i) for i in range(4)]
    for cache, prefix in prefixes:
        serve(prefix, cache, PROMPT)
        assert prefix.flush(LONG)
    assert len(store) == 24
    for i, (_, prefix) in enumerate(prefixes):
        assert prefix.stats.store.written == 6
        assert prefix.close(LONG)
        cache, again = make(store, salt=b"%d" % i, secret=b"secret %d" % i)
        assert serve(again, cache, PROMPT) == 96
        assert again.stats.store.corrupt == 0
        assert again.stats.store.written == 0


@pytest.mark.parametrize("end", ["flush", "close"])
def test_blocks_that_an_interrupt_left_are_stored_in_the_end(end, monkeypatch):
    store = {}
    cache, prefix = make(store)

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prefix._watch, "store_new", interrupt)
        with pytest.raises(KeyboardInterrupt):
            serve(prefix, cache, PROMPT)
    assert getattr(prefix, end)(60)
    assert len(store) == 6
