"""Stores in front of stores: fast ones are filled and lost at will, and every failure of one costs speed alone."""

import copy
import os
import pickle
import types

import pytest
from support import servers
from support.faulty_stores import Bulk, Faulty, raising
from support.prefixes import make_cache, serve

import kvcache
from kvcache import stores
from kvcache.stores import DirectoryStore, Tiered, worker
from kvcache.stores.client import StoreClient

LONG = 30

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_what_a_slow_tier_has_is_kept_in_the_faster_ones():
    first, second, third = {}, {"a": b"A"}, {"b": b"B"}
    store = Tiered(first, second, third)
    assert store.read_many("abc") == {"a": b"A", "b": b"B"}
    assert (first, second, third) == ({"a": b"A", "b": b"B"}, {"a": b"A", "b": b"B"}, {"b": b"B"})
    first["b"] = b"newer"
    assert store["b"] == b"newer"
    with pytest.raises(KeyError, match="c"):
        store["c"]
    assert "a" in store
    assert "c" not in store
    assert 5 not in store
    assert sorted(store) == ["a", "b"]
    assert len(store) == 2


@pytest.mark.parametrize("when", ["before", "while reading", "while keeping", "while deleting"])
@pytest.mark.parametrize("deletes_all", [False, True])
def test_what_is_deleted_while_it_is_read_is_not_kept(when, deletes_all):
    class Hooked(dict):
        def __init__(self, **values):
            super().__init__(values)
            self.hooks = {}

        def __getitem__(self, key):
            value = super().__getitem__(key)
            self.hooks.pop("read", lambda: None)()
            return value

        def __setitem__(self, key, value):
            self.hooks.pop("keep", lambda: None)()
            super().__setitem__(key, value)

        def __delitem__(self, key):
            super().__delitem__(key)
            self.hooks.pop("delete", lambda: None)()

        def clear(self):
            super().clear()
            self.hooks.pop("delete", lambda: None)()

    def delete():
        if deletes_all:
            store.clear()
        else:
            del store["a"]

    first, second = Hooked(b=b"B"), Hooked(a=b"A")
    store = Tiered(first, second)
    if when == "while deleting":  # the first tier has done it, and the second one has not
        first["a"] = b"A"
        first.hooks["delete"] = lambda: store["a"]
        delete()
    elif when == "while reading":
        second.hooks["read"] = delete
        assert store["a"] == b"A"
    elif when == "while keeping":
        first.hooks["keep"] = delete
        assert store["a"] == b"A"
    else:
        delete()
    assert store.read_many("ab") == ({} if deletes_all else {"b": b"B"})
    second["a"] = b"newer"
    assert store["a"] == first["a"] == b"newer"


@pytest.mark.parametrize("kind", [Faulty, Bulk])
def test_writes_and_deletions_reach_all(kind):
    tiers = kind(), kind()
    store = Tiered(*tiers)
    store.set_many({"a": b"A", "b": b"B"})
    store["c"] = b"C"
    assert dict(tiers[0]) == dict(tiers[1]) == {"a": b"A", "b": b"B", "c": b"C"}
    del store["a"]
    del tiers[1]["b"]
    del store["b"]
    assert dict(tiers[0]) == dict(tiers[1]) == {"c": b"C"}
    with pytest.raises(KeyError, match="a"):
        del store["a"]
    store.clear()
    assert not tiers[0]
    assert not tiers[1]


def test_asking_whether_a_key_is_there_reads_nothing():
    fast = {}
    store = Tiered(fast, {"a": b"A"})
    assert "a" in store
    assert "b" not in store
    assert fast == {}


def test_one_call_of_each_tier():
    tiers = Bulk(items={"a": b"A"}), Bulk(items={"b": b"B"}), Bulk()
    store = Tiered(*tiers)
    assert store.read_many("abab") == {"a": b"A", "b": b"B"}
    assert [tier.calls for tier in tiers] == [
        [("get_many", ["a", "b"]), ("set_many", ["b"])],
        [("get_many", ["b"])],
        [],
    ]
    assert store.read_many("ab") == {"a": b"A", "b": b"B"}
    assert len(tiers[1].calls) == 1


def test_values_are_refused_by_their_size(tmp_path):
    """If a tier knows sizes, only values of the wanted size are read; a value that was cut is kept nowhere."""
    fast, slow = {}, DirectoryStore(tmp_path)
    long, short, exact, none = (64 * letter for letter in "abcd")
    slow[long], slow[short], slow[exact] = bytes(1000), bytes(9), bytes(10)
    store = Tiered(fast, slow)
    found = store.read_many([long, short, exact, none], 10)
    assert {key: len(value) for key, value in found.items()} == {long: 10, short: 9, exact: 10}
    assert set(fast) == {short}
    client = StoreClient(store, most_bytes=100)
    assert client.get_many([long], LONG) == {}
    assert client.flush(LONG)
    assert client.stats.corrupt == 1
    assert set(slow) == {short, exact}


def test_a_value_that_does_not_fit_in_the_fast_tier(tmp_path):
    fast, slow = DirectoryStore(tmp_path, max_bytes=200), {}
    store = Tiered(fast, slow)
    for _ in range(2 * worker.MAX_FAILURES):
        store[64 * "a"] = bytes(1000)
        assert store[64 * "a"] == bytes(1000)
    store[64 * "b"] = b"small"
    assert set(fast) == {64 * "b"}, "it was left alone for what it was given"


def test_a_value_that_does_not_fit_keeps_no_others_out(tmp_path):
    fast, slow, (a, large, b) = DirectoryStore(tmp_path, max_bytes=200), {}, (64 * letter for letter in "abc")
    Tiered(fast, slow).set_many({a: b"A", large: bytes(1000), b: b"B"})
    assert dict(fast) == {a: b"A", b: b"B"}
    assert set(slow) == {a, large, b}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_tier_that_fails_costs_speed(failing, caplog, monkeypatch):
    now = 0.0
    monkeypatch.setattr(worker, "time", types.SimpleNamespace(monotonic=lambda: now))
    tiers = Bulk(), Bulk()
    store = Tiered(*tiers)
    store["a"] = b"A"
    tiers[failing].fault = raising(OSError("gone"))
    for key in "bcdefgh":
        store[key] = b"value"
        assert store.read_many(["a", key, "x"]) == {"a": b"A", key: b"value"}
        assert store["a"] == b"A"
    assert len(tiers[failing].calls) <= 1 + worker.MAX_FAILURES, "it was not left alone"
    assert [record.getMessage() for record in caplog.records] == ["the tier Bulk fails: OSError: gone; others are used"]
    with pytest.raises(OSError, match="gone"):
        del store["a"]
    assert "a" not in tiers[1 - failing].items_
    tiers[failing].fault = lambda verb, key: None
    now = 1.0  # longer than any pause
    store["i"] = b"value"
    assert "i" in tiers[failing].items_


def test_the_client_goes_on_with_what_is_left():
    """And leaves the store alone once all tiers fail, of which it is told by the first."""
    tiers = Bulk(), Bulk(raising(OSError("gone")))
    client = StoreClient(Tiered(*tiers))
    for i in range(3 * worker.MAX_FAILURES):
        assert client.put(f"{i}", lambda stored: b"rows")
        assert client.flush(LONG)
        assert set(client.get_many([f"{i}", "x"], LONG)) == {f"{i}"}
    assert (client.stats.errors, client.stats.dropped) == (0, 0)
    tiers[0].fault = raising(RuntimeError("gone as well"))
    with pytest.raises(RuntimeError, match="gone as well"):
        Tiered(*tiers)["a"]
    for _ in range(worker.MAX_FAILURES):
        client.get_many("a", LONG)
    assert not client.stats.reading


def test_a_failure_is_no_miss_of_the_last_tier():
    store = Tiered(Bulk(raising(OSError("gone")), {"a": b"A"}), Bulk(raising(OSError("gone, too"))))
    for call in (lambda: store["a"], lambda: "a" in store, lambda: store.set_many({"a": b""}), store.clear):
        with pytest.raises(OSError, match="gone"):
            call()


def test_odd_values_are_kept_nowhere():
    class Odd(bytes):
        def __len__(self):
            raise RuntimeError("no length")

    fast = {}
    assert Tiered(fast, {"a": Odd(b"odd"), "b": 5}).read_many("ab", 10) == {"a": b"odd", "b": 5}
    assert fast == {}


def test_pickles(tmp_path):
    """A process that is spawned gets its stores so."""
    store = Tiered({"a": b"A"}, DirectoryStore(tmp_path))
    for other in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store), copy.copy(store)):
        other[64 * "b"] = b"B"
        assert (other["a"], repr(other)) == (b"A", repr(store))
        assert store.pop(64 * "b") == b"B"


@pytest.mark.parametrize("tiers", [(), ({},)])
def test_too_few_tiers(tiers):
    with pytest.raises(ValueError, match=f"{len(tiers)} tiers: at least two are needed, the fastest first"):
        Tiered(*tiers)


@pytest.mark.parametrize("wrong", ["dir:path", None, 5, [], dict])
def test_what_is_no_tier(wrong):
    with pytest.raises(TypeError, match=f"a tier is a {type(wrong).__name__}: a mutable mapping of str to bytes"):
        Tiered({}, wrong)


def test_opening_tiers(tmp_path):
    store = stores.open([f"dir:{tmp_path}/fast?max_bytes=1MB", f"dir:{tmp_path}/slow"])
    store[64 * "a"] = b"value"
    assert repr(store) == (
        f"Tiered(DirectoryStore('{tmp_path}/fast', max_bytes=1000000), "
        f"DirectoryStore('{tmp_path}/slow', max_bytes=None))"
    )
    assert [dict(tier) for tier in store.tiers] == [{64 * "a": b"value"}] * 2
    with pytest.raises(ValueError, match="1 tiers: at least two"):
        stores.open([f"dir:{tmp_path}/slow"])
    with pytest.raises(TypeError, match="url=5: an address is needed"):
        stores.open([f"dir:{tmp_path}/slow", 5])


def test_a_representation_shows_no_values():
    assert repr(Tiered({"a": b"secret"}, {})) == "Tiered(dict, dict)"


def test_a_folder_in_front_of_a_server(tmp_path):
    """A second machine finds in the server what the first one computed, then in its own folder without the server."""
    servers.need()
    with servers.Server(tmp_path / "server") as server:

        def make(machine):
            store = stores.open([f"dir:{tmp_path}/{machine}", f"{server.url}?timeout=30"])
            cache = make_cache()
            return cache, kvcache.PrefixCache(cache, fingerprint="a model", store=store, secret=b"secret", timeout=LONG)

        for machine, matched in (("first", 0), ("second", 96)):
            cache, prefix = make(machine)
            assert serve(prefix, cache, range(100)) == matched
            assert prefix.close(LONG)
        server.kill()
        cache, prefix = make("second")
        assert serve(prefix, cache, range(100)) == 96


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_asks_a_tier_that_its_parent_was_asking():
    store = Tiered({}, {"a": b"value"})
    tier = store._tiers[1]
    tier.breaker.failures, tier.breaker.probing = worker.MAX_FAILURES, True
    with tier.lock:  # as another thread might hold it at the time
        child = os.fork()
        if child == 0:
            os._exit(0 if store.read_many("a") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
