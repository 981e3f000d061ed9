"""Whatever a store raises, and wherever, stays in its client, is counted, and ends no thread."""

import logging
import threading

import pytest
from support.faulty_stores import Bulk, Faulty, raising

from kvcache.stores import DirectoryStore, reader
from kvcache.stores.client import StoreClient

LONG = 30


@pytest.fixture
def ended(monkeypatch):
    """The threads that ended with an exception."""
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    return seen


class Attributes(Faulty):
    """A lazy proxy: looking for some methods raises."""

    error = None

    def __getattribute__(self, name):
        if name in ("get_many", "set_many", "read_many", "__class__") and Attributes.error is not None:
            raise Attributes.error
        return super().__getattribute__(name)


@pytest.mark.parametrize("error", [OSError("not connected"), KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_looking_for_a_method_raises(ended, monkeypatch, error):
    store = Attributes(items={"a": b"rows"})
    client = StoreClient(store)
    monkeypatch.setattr(Attributes, "error", error)
    assert client.get_many("a", LONG) == {}
    assert client.stats.timeouts == 0, "nobody was told"
    assert client.put("b", lambda stored: b"rows")
    assert client.flush(LONG)
    assert (client.stats.errors, client.stats.dropped, client.stats.misses) == (2, 1, 1)
    monkeypatch.setattr(Attributes, "error", None)
    assert client.get_many("a", LONG) == {"a": b"rows"}
    assert not ended


class Unprintable(OSError):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class Shy(DirectoryStore):
    """A store of a user's own class, which cannot be printed."""

    def __repr__(self):
        raise RuntimeError("no text")


def test_what_cannot_be_printed(ended, caplog, tmp_path):
    client = StoreClient(Faulty(raising(Unprintable())))
    for _ in range(2):
        assert client.get_many("a", LONG) == {}
        assert client.put("a", lambda stored: b"rows")
        assert client.flush(LONG)
    assert client.stats.errors == 4
    assert "the store Faulty fails: Unprintable" in caplog.text
    store = Shy(tmp_path / "folder")
    client = StoreClient(store)
    store.path.rename(tmp_path / "other")
    assert client.get_many([64 * "a"], LONG) == {}
    assert "the store Shy fails: OSError" in caplog.text
    assert not ended


def test_a_handler_of_warnings_that_raises(ended):
    seen = []

    class Handler(logging.Handler):
        def emit(self, record):
            seen.append(client.stats)  # no lock is held
            raise RuntimeError("no disk for logs")

    logger, handler = logging.getLogger("kvcache"), Handler()
    logger.addHandler(handler)
    try:
        client = StoreClient(Faulty(raising(OSError("gone"))))
        assert client.get_many("a", LONG) == {}
        client = StoreClient({"a": b"", "b": b""})
        assert client.get_many("ab", LONG) == {}
        assert client.put("c", lambda stored: 1 / 0)
        assert client.flush(LONG)
    finally:
        logger.removeHandler(handler)
    assert len(seen) == 3
    assert (client.stats.corrupt, client.stats.errors) == (2, 0)
    assert not ended


class Liar(bytes):
    """Bytes that lie about all that can be asked."""

    def __len__(self):
        return 1 << 40

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None

    def __bytes__(self):
        raise RuntimeError("no bytes")

    @property
    def __class__(self):
        raise RuntimeError("no class")


class Array(bytearray):
    __len__, __eq__, __bytes__, __class__, __hash__ = (
        Liar.__len__,
        Liar.__eq__,
        Liar.__bytes__,
        Liar.__class__,
        Liar.__hash__,
    )


class Nothing:
    __eq__, __bytes__, __class__, __hash__ = Liar.__eq__, Liar.__bytes__, Liar.__class__, None

    def __len__(self):
        raise RuntimeError("no length")


@pytest.mark.parametrize("kind", [Liar, Array, Nothing])
def test_odd_values_are_refused(ended, kind):
    """And the others of the same call are taken."""
    store = Bulk(items={"a": kind(), "b": b"rows"})
    client = StoreClient(store)
    assert client.get_many("ab", LONG) == {"b": b"rows"}
    assert client.flush(LONG)
    assert (client.stats.corrupt, client.stats.errors) == (1, 0)
    assert set(store) == {"b"}
    assert not ended


@pytest.mark.parametrize("kind", [Liar, Array])
def test_odd_values_of_the_right_bytes_are_taken(kind):
    client = StoreClient({"a": kind(b"rows")})
    assert client.get_many("a", LONG) == {"a": b"rows"}


def test_a_store_that_changes_what_it_is_given(ended):
    class Greedy(Bulk):
        def get_many(self, keys):
            found = super().get_many(keys)
            keys.clear()
            return found

        def set_many(self, items):
            while items:
                self.items_.update([items.popitem()])

    client = StoreClient(Greedy())
    for key in "abc":
        assert client.put(key, lambda stored: b"rows")
    assert client.flush(LONG)
    assert client.stats.written == 3
    assert len(client.get_many("abcd", LONG)) == 3
    assert (client.stats.hits, client.stats.misses) == (3, 1)
    assert not ended


def test_a_mistake_of_our_own_ends_no_thread(ended, monkeypatch, caplog):
    """Memory that is short in the middle of the client's own bookkeeping does no harm either."""
    client = StoreClient({"a": b"rows"})
    with monkeypatch.context() as patch:
        patch.setattr(reader.Reader, "_take", lambda self: 1 // 0)
        assert client.get_many("a", 0.2, patience=LONG) == {}
    assert client.get_many("a", LONG) == {"a": b"rows"}
    assert "ZeroDivisionError" in caplog.text
    assert not ended
