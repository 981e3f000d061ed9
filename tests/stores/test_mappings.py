"""Every kind of store is a mapping like a dictionary: this package's stores, and mappings of zict and fsspec.

Directly, by the methods of a MutableMapping; and through the client, with which a prefix cache uses it.
"""

import contextlib

import hypothesis
import pytest
from hypothesis import strategies as st
from support import servers

from kvcache import stores
from kvcache.stores.client import StoreClient

LONG = 30


@contextlib.contextmanager
def make_dict(folder):
    yield {}


@contextlib.contextmanager
def make_directory(folder):
    yield stores.open(f"dir:{folder}")


@contextlib.contextmanager
def make_server(folder):
    servers.need()
    with servers.Server(folder / "server") as server:
        store = stores.open(f"{server.url}?timeout=30")
        yield store
        store.close()


@contextlib.contextmanager
def make_cluster(folder):
    servers.need()
    with servers.cluster(folder) as nodes:
        store = stores.open(f"{servers.url_of(nodes)}?timeout=30")
        yield store
        store.close()


@contextlib.contextmanager
def make_zict_func(folder):
    """Values that are compressed on the way."""
    import zlib

    zict = pytest.importorskip("zict")
    yield zict.Func(zlib.compress, zlib.decompress, stores.open(f"dir:{folder}"))


@contextlib.contextmanager
def make_fsspec_memory(folder):
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.get_mapper(f"memory://{folder.name}")
    yield store
    store.clear()


MAKERS = [
    make_dict,
    make_directory,
    make_server,
    pytest.param(make_cluster, marks=pytest.mark.slow),
    make_zict_func,
    make_fsspec_memory,
]


@pytest.fixture(params=MAKERS, scope="module")
def store(request, tmp_path_factory):
    with request.param(tmp_path_factory.mktemp("store")) as store:
        yield store


KEYS = st.sampled_from([f"{i:02x}" * 32 for i in range(4)])  # as those of a prefix cache look
VALUES = st.binary(min_size=1, max_size=100)
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("pop"), KEYS),
    st.tuples(st.just("setdefault"), KEYS, VALUES),
    st.tuples(st.just("update"), st.dictionaries(KEYS, VALUES)),
)


def do(mapping, verb, *arguments):
    """Do a step, and return its result, or that there was no such key."""
    try:
        match verb:
            case "set":
                mapping[arguments[0]] = arguments[1]
            case "get":
                return bytes(mapping[arguments[0]])
            case "delete":
                del mapping[arguments[0]]
            case "pop":
                return bytes(mapping.pop(*arguments))
            case "setdefault":
                return bytes(mapping.setdefault(*arguments))
            case "update":
                mapping.update(*arguments)
    except KeyError:
        return KeyError
    return None


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.lists(STEPS, max_size=15))
def test_like_a_dictionary(store, steps):
    for key in list(store):
        del store[key]
    model = {}
    for step in steps:
        assert do(store, *step) == do(model, *step)
    assert {key: bytes(store[key]) for key in store} == model
    assert len(store) == len(model)
    assert [key in store for key in model] == [True] * len(model)
    assert "ff" * 16 not in store


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=20)
@hypothesis.given(st.lists(st.tuples(KEYS, st.one_of(VALUES, st.none())), max_size=15))
def test_through_the_guard(store, steps):
    """A value, or None for a deletion."""
    for key in list(store):
        del store[key]
    client = StoreClient(store)
    model = {}
    for key, value in steps:
        if value is None:
            client.delete(key)
            model.pop(key, None)
        else:
            assert client.put(key, lambda stored, value=value: value)
            model[key] = value
    assert client.close(LONG)
    client = StoreClient(store)
    assert client.get_many([key for key, _ in steps] + ["ff" * 16], LONG) == model
    stats = client.stats
    assert (stats.errors, stats.corrupt, stats.timeouts) == (0, 0, 0)
