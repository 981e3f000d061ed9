"""Many requests and many tenants on one store: one read of each key at a time, few threads, one breaker."""

import gc
import math
import os
import random
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.faulty_stores import Blocking, Bulk, Faulty, for_caller, raising
from support.prefixes import make_cache
from support.servers import until

import kvcache
from kvcache.stores import calls, reader, worker
from kvcache.stores import client as module
from kvcache.stores.client import StoreClient

LONG = 30


def reads_of(client):
    """The reads that wait."""
    with client._shared.lock:
        return {read for reads in client._shared.reader._waiting.values() for read in reads}


class SingleGate(Faulty):
    """A store whose reads wait until they are let through, as many as are told."""

    def __init__(self, items=()):
        super().__init__(self.wait, items)
        self.allowed = threading.Semaphore(0)

    def wait(self, verb, key):
        if verb in ("get", "get_many"):
            assert self.allowed.acquire(timeout=LONG)


class Gate(SingleGate, Bulk):
    """The same with calls for many keys."""


# ---- requests


@pytest.mark.parametrize("kind", [Gate, SingleGate])
@pytest.mark.parametrize("stop_at_miss", [False, True])
def test_a_key_that_many_want_at_once_is_read_once(kind, stop_at_miss):
    store = kind(dict.fromkeys("abc", b"rows"))
    client = StoreClient(store)
    with ThreadPoolExecutor(16) as pool:
        found = [pool.submit(client.get_many, "abcx", LONG, stop_at_miss=stop_at_miss) for _ in range(16)]
        until(lambda: len(reads_of(client)) == 16)
        store.allowed.release(100)
        assert [each.result() for each in found] == [dict.fromkeys("abc", b"rows")] * 16
    asked = [key for _, keys in store.calls for key in keys]
    assert sorted(asked) == ["a", "b", "c", "x"]
    assert (client.stats.hits, client.stats.misses, client.stats.bytes_read) == (48, 16, 12)


def test_reads_that_have_some_keys_in_common():
    """Each key is read once, and each read gets its own."""
    store = SingleGate({str(i): b"rows" for i in range(20)})
    client = StoreClient(store)
    with ThreadPoolExecutor(8) as pool:
        wanted = [[str(i) for i in range(first, first + 8)] for first in (0, 3, 6, 12, 0, 13)]
        found = [pool.submit(client.get_many, keys, LONG, stop_at_miss=True) for keys in wanted]
        until(lambda: len(reads_of(client)) == len(wanted))
        store.allowed.release(100)
        for keys, each in zip(wanted, found, strict=True):
            assert set(each.result()) == {key for key in keys if key in store.items_}
    asked = [key for _, key in store.calls]
    assert len(asked) == len(set(asked))


def test_one_request_does_not_wait_for_another():
    store = Blocking(items=dict.fromkeys("ab", b"rows"))
    block = store.block
    store.fault = lambda verb, key: block(verb, key) if key == "a" else None
    client = StoreClient(store)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.get_many, "a", LONG)
        assert store.entered.wait(LONG)
        assert client.get_many("b", LONG) == {"b": b"rows"}
        store.released.set()
        assert slow.result() == {"a": b"rows"}


def test_long_requests_take_turns(monkeypatch):
    """A short one does not wait until long ones have all their keys."""
    monkeypatch.setattr(reader, "NUM_THREADS", 1)
    store = SingleGate({f"{i}": b"rows" for i in range(100)})
    client = StoreClient(store)
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(client.get_many, [f"{i}" for i in range(99)], LONG)
        until(lambda: store.calls)
        short = pool.submit(client.get_many, ["99"], LONG)
        until(lambda: len(reads_of(client)) == 2)
        store.allowed.release(2)
        assert short.result() == {"99": b"rows"}
        assert not long.done()
        store.allowed.release(100)
        assert len(long.result()) == 99


def test_a_caller_that_gives_up_leaves_its_keys_to_others(monkeypatch):
    store = SingleGate(dict.fromkeys("abc", b"rows"))
    client = StoreClient(store)
    others = []

    def another_waits():
        if store.calls and not others:
            others.append(pool.submit(client.get_many, "bc", LONG))
        return len(reads_of(client)) == 2

    changed = client._shared.reader.worker.changed
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(changed, "wait_for", for_caller(client, another_waits))
            assert client.get_many("abc", 0.01, patience=LONG) == {}
        store.allowed.release(100)
        assert others[0].result() == {"b": b"rows", "c": b"rows"}
    assert not client._shared.reader._waiting
    until(lambda: not client._shared.reader._flying)  # the call for "a" may end after the others


def test_a_call_that_fails_is_one_failure():
    """All threads that wait for a value are told at once, however many they are."""
    store = Gate()
    client = StoreClient(store)
    store.fault = lambda verb, key: (store.wait(verb, key), raising(OSError("gone"))(verb, key))
    with ThreadPoolExecutor(16) as pool:
        found = [pool.submit(client.get_many, "abc", LONG) for _ in range(16)]
        until(lambda: len(reads_of(client)) == 16)
        store.allowed.release(100)
        assert [each.result() for each in found] == [{}] * 16
    assert (client.stats.errors, client.stats.misses, client.stats.reading) == (1, 48, True)


def test_time_outs_of_many_at_once_pause_no_longer_than_one(monkeypatch):
    monkeypatch.setattr(worker, "FIRST_PAUSE", 100.0)
    monkeypatch.setattr(worker, "LONGEST_PAUSE", 1e6)
    store = Blocking()
    client = StoreClient(store)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: client.get_many("a", 0.1), range(16)))
    assert not client.stats.reading
    assert client._shared.reader.worker.breaker.until - time.monotonic() <= 100
    store.released.set()


def test_a_store_that_answers_others_has_not_failed(monkeypatch):
    """A call of the store hangs, and callers are in a hurry: the time of its last answer to anybody counts."""
    now, patience = 1.0, 8.0
    for part in (reader, worker):
        monkeypatch.setattr(part, "time", types.SimpleNamespace(monotonic=lambda: now))
    store = Blocking(items={"b": b"rows"})
    block = store.block
    store.fault = lambda verb, key: block(verb, key) if key == "a" else None
    client = StoreClient(store)
    until(lambda: client.get_many("a", 0.01, patience=patience) or store.calls)  # hangs on
    now += 2 * patience
    assert client.get_many("b", LONG, patience=patience)
    for _ in range(worker.MAX_FAILURES):
        assert client.get_many("a", 0.001, patience=patience) == {}
    assert client.stats.reading
    store.released.set()


def test_those_in_a_hurry_do_not_take_the_store_from_the_patient():
    store = Blocking(items={"a": b"rows"})
    patient, hurried = (StoreClient(store) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(patient.get_many, "a", LONG)
        assert store.entered.wait(LONG)
        for _ in range(2 * worker.MAX_FAILURES):
            assert hurried.get_many("a", 0.001) == {}
        assert hurried.stats.timeouts == 2 * worker.MAX_FAILURES
        assert patient.stats.reading
        store.released.set()
        assert read.result() == {"a": b"rows"}


@pytest.mark.parametrize("kind", [Faulty, Bulk])
def test_many_with_all_kinds_of_trouble_leave_nothing_behind(kind, monkeypatch):
    """Threads that ask for overlapping keys, in a hurry or not, of a store that is slow, raises and lies at times."""
    monkeypatch.setattr(worker, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(worker, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(calls, "MAX_CALL_KEYS", 5)
    chance = random.Random(0)

    def trouble(verb, key):
        number = chance.random()
        if number < 0.02:
            time.sleep(0.02)
        elif number < 0.04:
            raise OSError("gone")

    store = kind(trouble, {f"{i}": b"rows" for i in range(40)})
    clients = [StoreClient(store) for _ in range(3)]
    patient = StoreClient(store)

    def work(number):
        choose = random.Random(number)
        for _ in range(100):
            first = choose.randrange(50)
            keys = [f"{i}" for i in range(first, first + choose.randrange(1, 20))]
            timeout = choose.choice([0.002, 0.02, LONG])
            client = patient if timeout == LONG else choose.choice(clients)
            found = client.get_many(keys, timeout, patience=LONG, stop_at_miss=choose.random() < 0.5)
            assert found.keys() <= {*keys}
            assert all(payload == b"rows" for payload in found.values())

    with ThreadPoolExecutor(16) as pool:
        for each in [pool.submit(work, number) for number in range(16)]:
            each.result()
    assert patient.stats.timeouts == 0, "a read was never answered"
    shared = clients[0]._shared.reader
    until(lambda: shared.worker.is_idle)
    assert not shared._waiting
    assert not shared._flying
    store.fault = lambda verb, key: None
    until(lambda: clients[0].get_many(["1", "2"], LONG) == {"1": b"rows", "2": b"rows"})


# ---- tenants


def threads_of_stores():
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvcache-")}


def test_a_thousand_prefix_caches_have_few_threads():
    before = threads_of_stores()
    store = SingleGate()
    cache = make_cache()
    made = [kvcache.PrefixCache(cache, fingerprint="m", salt=b"%d" % i, store=store, timeout=LONG) for i in range(1000)]
    with ThreadPoolExecutor(100) as pool:
        found = [pool.submit(prefix.acquire, range(100)) for prefix in made]
        until(lambda: len(store.calls) == reader.NUM_THREADS)
        for prefix in made:
            assert prefix._client.delete("a key")
        assert len(threads_of_stores() - before) <= reader.NUM_THREADS + 1
        store.allowed.release(10000)
        assert {each.result()[1] for each in found} == {0}
    assert all(prefix.stats.store.misses == 6 for prefix in made)
    assert all(prefix.close() for prefix in made)


def test_one_breaker_for_all_tenants(caplog, monkeypatch):
    monkeypatch.setattr(worker, "FIRST_PAUSE", math.inf)
    store = Faulty(raising(OSError("gone")))
    one, other = (StoreClient(store) for _ in range(2))
    for _ in range(worker.MAX_FAILURES):
        assert one.get_many("a", LONG) == {}
    assert one.stats.errors == worker.MAX_FAILURES
    assert not other.stats.reading
    assert other.get_many("b", LONG) == {}
    assert (other.stats.errors, other.stats.misses) == (0, 1)
    assert len(caplog.records) == 1, "it is one store"
    assert StoreClient({}).stats.reading, "another store is another one"


def test_equal_stores_are_not_one():
    """Two dictionaries are equal until one is written to; and neither can be hashed."""
    one, other = {}, {}
    client = StoreClient(one)
    assert client._shared is StoreClient(one)._shared
    assert client._shared is not StoreClient(other)._shared


def test_a_read_is_shared_by_all_tenants():
    store = SingleGate({"a": b"rows"})
    clients = [StoreClient(store) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(client.get_many, "a", LONG) for client in clients]
        until(lambda: len(reads_of(clients[0])) == 3)
        store.allowed.release(10)
        assert [each.result() for each in found] == [{"a": b"rows"}] * 3
    assert [verb for verb, _ in store.calls if verb == "get"] == ["get"]
    assert [client.stats.hits for client in clients] == [1, 1, 1]
    assert sum(client.stats.bytes_read for client in clients) == 4, "the bytes of a read are counted once"


def test_writes_of_many_tenants_are_few_calls_and_counted_apart():
    store = Blocking(("set_many",))
    store.__class__ = type("Bulk", (Bulk,), {"block": Blocking.block})
    one, other = (StoreClient(store) for _ in range(2))
    assert one.put("first", lambda stored: b"rows")
    assert store.entered.wait(LONG)
    for i in range(3):
        assert one.put(f"one {i}", lambda stored: b"12345")
        assert other.put(f"other {i}", lambda stored, i=i: b"123" if i else None)
    store.released.set()
    assert one.flush(LONG)
    assert other.flush(LONG)
    assert len(store.calls) == 2
    assert (one.stats.written, one.stats.bytes_written, one.stats.dropped) == (4, 4 + 3 * 5, 0)
    assert (other.stats.written, other.stats.bytes_written, other.stats.dropped) == (2, 6, 1)
    assert store.items_["other 1"] == b"123"


def test_closing_one_tenant_leaves_others_alone():
    store = Blocking(("set",))
    one, other = (StoreClient(store) for _ in range(2))
    assert one.put("first", lambda stored: b"rows")
    assert store.entered.wait(LONG)
    for client, key in ((one, "a"), (other, "b"), (one, "c")):
        assert client.put(key, lambda stored: b"rows")
    assert not one.close(0.01)
    assert (one.stats.dropped, other.stats.dropped) == (2, 0)
    assert not other.flush(0.01)
    store.released.set()
    assert one.flush(LONG)
    assert other.flush(LONG)
    assert set(store) == {"first", "b"}
    assert other.get_many("b", LONG) == {"b": b"rows"}
    assert one.get_many("b", LONG) == {}


def test_flushing_waits_for_nobody_else():
    store = Blocking(("set",))
    one, other = (StoreClient(store) for _ in range(2))
    assert one.put("first", lambda stored: b"rows")
    assert store.entered.wait(LONG)
    assert other.flush(0.01)
    assert not one.flush(0.01)
    store.released.set()
    assert one.flush(LONG)


def test_what_clients_have_in_common_ends_with_them(monkeypatch):
    monkeypatch.setattr(worker, "LINGER", 0.01)
    store = {}
    client = StoreClient(store)
    assert client.get_many("a", LONG) == {}
    assert id(store) in module._all
    del client
    until(lambda: gc.collect() >= 0 and id(store) not in module._all)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_shares_a_store_among_its_own_clients():
    """The child reads keys that the parent was reading, and does not wait for values that the parent was writing."""
    store = Blocking(("get", "set"), {"a": b"rows"})
    one, other = (StoreClient(store) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(one.get_many, "a", LONG)
        assert store.entered.wait(LONG)
        assert other.put("b", lambda stored: b"rows")
        with module._lock:  # as another thread might hold it at the time
            child = os.fork()
            if child == 0:
                store.fault = lambda verb, key: None
                ok = other.flush(0) and other.get_many("a", LONG) and one.get_many("a", LONG)
                ok = ok and StoreClient(store)._shared is one._shared
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store.released.set()
        assert read.result() == {"a": b"rows"}
