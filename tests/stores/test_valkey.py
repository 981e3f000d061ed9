"""ValkeyStore, and the client in front of it, on real servers: whole, killed, stopped, full, restarted."""

import contextlib
import copy
import os
import pickle
import re
import subprocess
import time
import tracemalloc

import pytest
from support import servers

from kvcache import stores
from kvcache.stores import ValkeyStore
from kvcache.stores import valkey as module

LONG = 30


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A server for tests that leave it as it was."""
    servers.need()
    with servers.Server(tmp_path_factory.mktemp("shared") / "server") as server:
        yield server


@pytest.fixture
def server(tmp_path):
    """A server for tests that treat it badly."""
    servers.need()
    with servers.Server(tmp_path / "server") as server:
        yield server


@pytest.fixture
def store(shared):
    store = stores.open(f"{shared.url}?timeout=30")
    yield store
    store.clear()
    store.close()


def put(client, key, payload=b"rows"):
    return client.put(key, lambda stored: payload)


# ---- the mapping


def test_many(store):
    items = {f"key {i}": b"%d" % i for i in range(100)}
    store.set_many(items)
    assert store.get_many([*items, "another"]) == items
    assert store.get_many([]) == {}
    store.set_many({})
    assert len(store) == 100


def test_no_more_of_a_value_than_is_wanted(store):
    store.set_many({"a": b"0123456789", "b": b"01", "c": b""})
    assert store.read_many("abcd", 4) == {"a": b"0123", "b": b"01"}
    assert store.read_many([], 4) == {}


def test_a_value_that_is_too_long_is_not_read(make, store):
    """Somebody else may have put it there: of what no block can be, a reader takes the size of a block."""
    keys = [f"{i}" for i in range(5)]
    for key in keys:
        store[key] = bytes(20 << 20)
    client = make(store, most_bytes=10_000)
    assert put(client, "good", bytes(10_000))
    assert client.flush(LONG)
    tracemalloc.start()
    try:
        assert client.get_many([*keys, "good"], LONG) == {"good": bytes(10_000)}
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()
    assert client.stats.corrupt == 5
    assert client.flush(LONG)
    assert list(store) == ["good"]


def test_only_its_prefix(shared, store):
    other = ValkeyStore(shared.url, prefix="other*[a]?\\", timeout=LONG)
    other["a"] = b"other"
    store["a"] = b"mine"
    assert list(other) == list(store) == ["a"]
    other.clear()
    assert store["a"] == b"mine"
    assert list(other) == []


def test_databases_are_apart(shared, store):
    other = ValkeyStore(shared.url.replace("/0", "/3"), timeout=LONG)
    other["a"] = b"other"
    assert "a" not in store
    other.clear()


def test_time_to_live(shared):
    direct = servers.need().Valkey(port=shared.port)
    store = ValkeyStore(shared.url, ttl=1000, timeout=LONG)
    store["a"] = b"read"
    store.set_many({"b": b"not read"})
    for read in (lambda: store["a"], lambda: store.get_many("a"), lambda: store.read_many("a", 2)):
        for key in "ab":
            assert 500 < direct.ttl(f"kvcache:{key}") <= 1000
            assert direct.expire(f"kvcache:{key}", 500)
        read()
        assert direct.ttl("kvcache:a") > 500 >= direct.ttl("kvcache:b"), "reading prolongs its life"
        assert direct.expire("kvcache:b", 1000)
    ValkeyStore(shared.url, ttl=0.05, timeout=LONG)["c"] = b"goes"
    servers.until(lambda: set(store) == {"a", "b"})
    store = ValkeyStore(shared.url, ttl=None, timeout=LONG)
    store["c"] = b"stays"
    assert store["c"] == b"stays"
    assert store.read_many("cd", 4) == {"c": b"stay"}
    assert direct.ttl("kvcache:c") == -1
    store.clear()


def test_passwords(tmp_path):
    valkey = servers.need()
    with servers.Server(tmp_path / "server", "--requirepass", "p@ss:w/rd") as server:
        url = server.url.replace("//", "//:p%40ss%3Aw%2Frd@")
        store = stores.open(f"{url}?timeout=30")
        store["a"] = b"value"
        assert store["a"] == b"value"
        assert "p%40ss" not in repr(store)
        with pytest.raises(valkey.AuthenticationError):
            ValkeyStore(server.url, timeout=LONG)["a"]


def make_certificate(folder, names):
    """Make a certificate that signs itself, and its key; return the options of a server that has them."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out certificate -subj /CN=localhost -addext"
    try:
        subprocess.run([*command.split(), f"subjectAltName={names}"], cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here makes a certificate")
    names = {"--tls-cert-file": "certificate", "--tls-ca-cert-file": "certificate", "--tls-key-file": "key"}
    return [word for option, name in names.items() for word in (option, str(folder / name))]


def test_tls(tmp_path):
    valkey = servers.need()
    options = make_certificate(tmp_path, "DNS:localhost")
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(servers.Server(tmp_path / "server", *options, tls=True))
        except pytest.fail.Exception:
            pytest.skip("the server was built without TLS")
        files = {"ca_certs": "certificate", "certfile": "certificate", "keyfile": "key"}
        query = "&".join(["timeout=30", *(f"{option}={tmp_path / name}" for option, name in files.items())])
        store = stores.open(f"{server.url}?{query}")
        store["a"] = b"value"
        assert store["a"] == b"value"
        store.close()
        with pytest.raises(valkey.ConnectionError, match="certificate verify failed"):
            ValkeyStore(server.url, timeout=LONG)["a"]
        with pytest.raises(valkey.ConnectionError, match="certificate verify failed"):  # its name is localhost
            stores.open(f"{server.url.replace('localhost', '127.0.0.1')}?{query}")["a"]


@pytest.mark.slow
@pytest.mark.parametrize("names", ["IP:127.0.0.1", "DNS:another"])
def test_a_cluster_with_tls(tmp_path, names):
    valkey = servers.need()
    port = servers.free_port()
    options = [*make_certificate(tmp_path, names), "--tls-cluster", "yes", "--tls-auth-clients", "no"]
    options += ["--tls-port", str(port)]
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(servers.cluster(tmp_path, *options, num_nodes=1))
        except pytest.fail.Exception:
            pytest.skip("the server was built without TLS")
        store = ValkeyStore(f"valkeys+cluster://127.0.0.1:{port}", ca_certs=tmp_path / "certificate")
        if names == "DNS:another":
            with pytest.raises(valkey.exceptions.ValkeyClusterException, match="certificate verify failed"):
                store["a"]
            return
        store["a"] = b"value"
        assert store.get_many("ab") == {"a": b"value"}
        store.close()
        with pytest.raises(valkey.exceptions.ValkeyClusterException, match="certificate verify failed"):
            ValkeyStore(f"valkeys+cluster://127.0.0.1:{port}")["a"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_has_connections_of_its_own(store):
    store["a"] = b"value"
    with store._client() as own:
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            for _ in range(100):
                assert store["a"] == b"value"
            with store._client() as direct:
                assert direct is not own
            os._exit(0)
        os._exit(1)
    for _ in range(100):
        assert store["a"] == b"value"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://localhost", "'http://localhost' is no"),
        ("valkey+sentinel://localhost", "is no address of a server: valkey://HOST:PORT/0"),
        ("valkey://", "'valkey://' names no host: valkey://HOST, or valkey://HOST:PORT, is needed"),
        ("valkey:localhost", "'valkey:localhost' names no host: valkey://HOST"),
        ("valkey+cluster://", "names no host: valkey+cluster://HOST, or"),
        ("valkey://:6379", "':6379' is neither HOST nor HOST:PORT"),
        ("valkey+cluster://a,,b", "'' is neither HOST nor HOST:PORT"),
        ("valkey://localhost:lots", "'localhost:lots' is neither HOST nor HOST:PORT"),
        ("valkey://localhost:99999", "'localhost:99999' is neither HOST nor HOST:PORT"),
        ("valkey://[::1", "'valkey://[::1': '[::1' is neither HOST nor HOST:PORT, nor [IPV6] nor [IPV6]:PORT"),
        ("valkey://one,two", "names several hosts, which only valkey+cluster:// does"),
        ("valkey://localhost/99999999999999999999", "the database must be a number of at most 9 digits"),
        ("valkey://localhost/first", "the database must be a number of at most 9 digits"),
        ("valkey+cluster://localhost/1", "the database must be 0 in a cluster"),
        ("valkey://user:secret@localhost/first", "'valkey://user:***@localhost/first': the database"),
        ("valkey://localhost?ttl=0", "ttl=0.0: must be None, or from 0.001"),
        ("valkey://localhost?ttl=1h", "ttl: '1h' is no number of seconds, such as 3600"),
        ("valkey://localhost?timeout=none", "timeout: 'none' is no number of seconds"),
        ("valkey://localhost?timeout=0", "timeout=0.0: must be above 0"),
        ("valkey://localhost?timeout=nan", "timeout=nan: must be above 0"),
        ("valkey://localhost?time=1", "there is no option 'time', but ca_certs, certfile"),
        ("valkey://localhost?ca_certs=file", "takes no TLS: certificates need valkeys://"),
    ],
)
def test_bad_addresses(url, message):
    pytest.importorskip("valkey", exc_type=ImportError)
    with pytest.raises(ValueError, match=re.escape(message)):
        stores.open(url)


@pytest.mark.parametrize("open_", [stores.open, ValkeyStore])
@pytest.mark.parametrize(
    "url",
    [
        "valkey://runner:topp/secret@host",
        "valkey://runner:topp?secret@host:1",
        "valkey://runner:topp#secret@host",
        "valkey://runner:topp?prefix=secret@host",
        "valkey://ru/nner:topp-secret@host",
        "valkey+cluster://:topp/secret@a:1,b:2",
        "valkey:runner:topp?secret@host",
        "valkey:runner:topp-secret@host",
        "valkey://runner:t[opp-secret@host",
        "valkey://runner:topp\u2100secret@host:6379/0",  # NFKC makes "a/c" of it
        "valkey://runner:topp\nsecret@host:lots",
        "valkey://runner:topp-secret@host:99999",
        "valkey://runner:topp-secret@",
        "vaalkey://runner:topp/secret@host",
        "vaalkey://ru/nner:topp-secret@host",
        "runner:topp-secret@host:6379",
    ],
)
def test_messages_show_no_part_of_a_password(open_, url):
    with pytest.raises(ValueError, match="alkey") as raised:
        open_(url)
    assert "topp" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_passwords_are_percent_encoded():
    for url in ("valkey://:a/b@host", "valkey://:a?b@host", "valkey://host?prefix=a@b"):
        with pytest.raises(ValueError, match=r"valkey:// .* a password are written %2F, %3F and %23, .* option %40"):
            stores.open(url)
    with pytest.raises(ValueError, match=r"valkeys\+cluster:// "):
        ValkeyStore("valkeys+cluster://:a#b@host")
    pytest.importorskip("valkey", exc_type=ImportError)
    assert stores.open("valkey://host?prefix=a%40b").prefix == "a@b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": 5}, "url=5: an address is needed, as a str"),
        ({"ttl": "x"}, "ttl='x': a number is needed, not str"),
        ({"timeout": None}, "timeout=None: a number is needed, not NoneType"),
        ({"prefix": 3}, "prefix=3: a str is needed, not int"),
        ({"ca_certs": 5}, "ca_certs=5: the name of a file is needed"),
    ],
)
def test_arguments_of_the_wrong_type(arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        ValkeyStore(**{"url": "valkeys://localhost", **arguments})


def test_relative_certificates_stay_where_they_are(tmp_path):
    pytest.importorskip("valkey", exc_type=ImportError)
    with contextlib.chdir(tmp_path):
        store = ValkeyStore("valkeys://localhost", ca_certs="certificate")
    assert store._connect().get_connection_kwargs()["ssl_ca_certs"] == str(tmp_path / "certificate")


def test_pickles(store):
    """A process that is spawned gets its stores so; each copy connects by itself."""
    store["a"] = b"value"
    for other in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store), copy.copy(store)):
        assert (other["a"], repr(other)) == (b"value", repr(store))
        other.close()
    assert store["a"] == b"value"


def test_values_and_keys_of_the_wrong_type():
    """They are refused before a server is asked."""
    pytest.importorskip("valkey", exc_type=ImportError)
    store = ValkeyStore(f"valkey://localhost:{servers.free_port()}")
    for value in ("value", 5, None):
        for call in (lambda value: store.__setitem__("a", value), lambda value: store.set_many({"a": value})):
            with pytest.raises(TypeError, match=f"value is a {type(value).__name__}: bytes are needed"):
                call(value)
    with pytest.raises(TypeError, match="key=5: a str is needed, not int"):
        store[5]


def test_a_failure_in_another_thread_between_two_looks_at_the_client(monkeypatch):
    """After a cluster's failure another thread forgets the client, at any moment."""
    pytest.importorskip("valkey", exc_type=ImportError)
    store, process = ValkeyStore("valkey+cluster://localhost"), os.getpid()

    class Client:
        def exists(self, name):
            return 1

        def close(self):
            pass

    def getpid():
        store._client_and_process = None
        return process

    monkeypatch.setattr(store, "_connect", Client)
    assert "a" in store
    monkeypatch.setattr(module.os, "getpid", getpid)
    assert "a" in store


def test_options_in_the_address_of_the_class():
    with pytest.raises(ValueError, match="has options: give them as arguments, or use"):
        ValkeyStore("valkey://localhost?ttl=3")


@pytest.mark.parametrize("url", ["valkey://localhost", "redis://localhost:6379/0", "rediss+cluster://a,b:5,[::1]:7"])
def test_addresses(url):
    pytest.importorskip("valkey", exc_type=ImportError)
    store = stores.open(f"{url}?ttl=none&timeout=2.5&prefix=tenant%20a:")
    assert (store.ttl, store.timeout, store.prefix) == (None, 2.5, "tenant a:")


def test_without_the_package(monkeypatch):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", refuse)
    with pytest.raises(ImportError, match=re.escape("pip install 'kvcache[valkey]'")):
        stores.open("valkey://localhost")


# ---- faults of one server


def test_nobody_there(make):
    servers.need()
    client = make(stores.open(f"valkey://127.0.0.1:{servers.free_port()}"))
    for _ in range(10):
        assert client.get_many("a", LONG) == {}
        put(client, "a")
    assert client.flush(LONG)
    assert not client.stats.reading
    assert client.stats.errors >= 3


def test_killed_and_started_again(server, make):
    client = make(stores.open(f"{server.url}?timeout=30"))
    put(client, "a")
    assert client.flush(LONG)
    assert client.get_many("a", LONG) == {"a": b"rows"}
    server.kill()
    for _ in range(10):
        assert client.get_many("a", LONG) == {}
    assert not client.stats.reading
    server.start()
    servers.until(lambda: client.stats.reading or client.get_many("a", LONG))
    servers.until(lambda: put(client, "a") and client.flush(LONG) and client.get_many("a", LONG))


def test_stopped_and_going_on(server, make):
    client = make(stores.open(f"{server.url}?timeout=0.2"))
    servers.until(lambda: put(client, "a") and client.flush(LONG) and client.get_many("a", LONG))
    server.stop()
    for _ in range(20):
        assert client.get_many("a", 0.05) == {}
        put(client, "b")
    assert not client.stats.reading
    server.go_on()
    servers.until(lambda: client.get_many("a", LONG))
    servers.until(lambda: put(client, "b") and client.flush(LONG) and client.get_many("b", LONG))


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_filled(tmp_path, make, policy, caplog):
    servers.need()
    options = ["--maxmemory", "12mb", "--maxmemory-policy", policy]
    with servers.Server(tmp_path / "server", *options) as server:
        store = stores.open(f"{server.url}?timeout=30")
        client = make(store)
        for i in range(40):
            put(client, str(i), b"%d" % i * 250_000)
            assert client.flush(LONG)
        stats = client.stats
        assert (stats.dropped > 0) == (stats.errors > 0) == (policy == "noeviction")
        assert stats.writing or policy == "noeviction"  # which has space for a value now and then
        assert ("OutOfMemoryError: command not allowed" in caplog.text) == (policy == "noeviction")
        assert len(caplog.text) < 500, "a message quotes what was to be stored"
        found = client.get_many(map(str, range(40)), LONG)
        assert 0 < len(found) < 40
        assert all(payload == key.encode() * 250_000 for key, payload in found.items())
        assert client.stats.reading
        store.clear()
        servers.until(lambda: put(client, "after") and client.flush(LONG) and client.get_many(["after"], LONG))


def test_what_is_not_even_a_value(shared, store, make):
    client = make(store)
    direct = servers.need().Valkey(port=shared.port)
    direct.lpush("kvcache:d", "a list")
    assert client.get_many("d", LONG) == {}
    direct.delete("kvcache:d")


# ---- a cluster


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    servers.need()
    with servers.cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


def test_a_cluster(nodes):
    store = stores.open(f"{servers.url_of(nodes[:1])}?timeout=30")
    items = {f"key {i}": b"%d" % i for i in range(100)}
    store.set_many(items)
    for key in ("{a}b", "ø\ud800", ""):
        store[key] = b"value"
        assert store[key] == b"value"
        del store[key]
    assert store.get_many([*items, "another"]) == items
    assert set(store) == items.keys()
    sizes = [servers.need().Valkey(port=node.port).dbsize() for node in nodes]
    assert sum(sizes) == 100
    assert min(sizes) > 10
    other = stores.open(f"{servers.url_of(nodes)}?timeout=30")
    assert other["key 5"] == b"5"
    with pytest.raises(KeyError):
        del other["another"]
    other.clear()
    assert len(store) == 0


def test_a_cluster_s_node_is_stopped_killed_and_comes_back(nodes, make):
    """While a node is gone its keys are, and perhaps all of them; afterwards the store works as before."""
    store = stores.open(f"{servers.url_of(nodes)}?timeout=0.2")
    client = make(store)
    keys = [f"key {i}" for i in range(30)]

    def works():
        for key in keys:
            put(client, key, key.encode())
        return client.flush(LONG) and client.get_many(keys, LONG) == {key: key.encode() for key in keys}

    servers.until(works)
    for trouble, end in ((nodes[1].stop, nodes[1].go_on), (nodes[1].kill, nodes[1].start)):
        trouble()
        for _ in range(20):
            found = client.get_many(keys, 0.05)
            assert all(payload == key.encode() for key, payload in found.items())
            put(client, "key", b"key")
        assert not client.stats.reading
        end()
        servers.until(works)
    stores.open(f"{servers.url_of(nodes)}?timeout=30").clear()


def test_a_cluster_s_slots_move(nodes):
    """A call that meets a slot in its new place fails; the next one knows."""
    valkey = servers.need()
    store = stores.open(f"{servers.url_of(nodes)}?timeout=30")
    assert store.get_many([]) == {}
    store.set_many({"a": b"", "b": b""})
    slot = int(nodes[0].ask(b"CLUSTER KEYSLOT kvcache:a").strip(b":\r\n"))
    ids = [node.ask(b"CLUSTER MYID").split()[1] for node in nodes]
    owner = slot * len(nodes) // 16384
    store.clear()
    for new in ((owner + 1) % len(nodes), owner):
        # The new owner imports it, which raises its epoch: else a heartbeat of the old one may take the slot back.
        old = owner if new != owner else (owner + 1) % len(nodes)
        assert nodes[new].ask(b"CLUSTER SETSLOT %d IMPORTING %s" % (slot, ids[old])) == b"+OK\r\n"
        for node in (nodes[new], *nodes):
            assert node.ask(b"CLUSTER SETSLOT %d NODE %s" % (slot, ids[new])) == b"+OK\r\n"
        with pytest.raises(valkey.exceptions.MovedError):
            store.set_many({"a": b"moved", "b": b"stays"})
        store.set_many({"a": b"moved", "b": b"stays"})
        assert store.get_many("ab") == {"a": b"moved", "b": b"stays"}
        assert store["a"] == b"moved"
        store.clear()


def test_a_cluster_s_node_that_does_not_answer_is_waited_for_once(nodes):
    """And not once for each key that it has."""
    store = stores.open(f"{servers.url_of(nodes)}?timeout=1")
    items = {str(i): b"value" for i in range(200)}
    servers.until(lambda: succeeds(lambda: store.set_many(items)))  # the store is connected then
    nodes[1].stop()
    try:
        begin = time.monotonic()
        with pytest.raises(servers.need().TimeoutError):
            store.get_many(items)
        assert time.monotonic() - begin < LONG
    finally:
        nodes[1].go_on()
    servers.until(lambda: all(servers.is_complete(node, len(nodes)) for node in nodes))
    stores.open(f"{servers.url_of(nodes)}?timeout=30").clear()


def succeeds(call):
    with contextlib.suppress(servers.need().ValkeyError, servers.need().exceptions.ValkeyClusterException):
        call()
        return True


def is_used(node):
    return bool(servers.need().Valkey(port=node.port).dbsize())


@pytest.mark.slow
def test_a_cluster_is_found_again_by_its_address(tmp_path):
    """When all nodes that the direct knew are gone: here a cluster of one, with another one for a later life."""
    valkey = servers.need()
    (tmp_path / "now").mkdir()
    (tmp_path / "later").mkdir()
    with (
        servers.cluster(tmp_path / "now", num_nodes=1) as (node,),
        servers.cluster(tmp_path / "later", num_nodes=1) as (other,),
    ):
        store = ValkeyStore(servers.url_of([other, node]), timeout=5)
        store["a"] = b"value"
        if not is_used(node):
            node, other = other, node
        node.kill()
        with pytest.raises((valkey.ValkeyError, valkey.exceptions.ValkeyClusterException)):
            store["a"]
        store["a"] = b"value"
        assert store.get_many("ab") == {"a": b"value"}
        other.kill()
        for call in 3 * [lambda: store["a"], lambda: store.get_many("a"), lambda: store.set_many({"a": b""})]:
            with pytest.raises((valkey.ValkeyError, valkey.exceptions.ValkeyClusterException)):
                call()
        node.start()
        servers.until(lambda: servers.is_complete(node, 1))
        store["a"] = b"value"
        assert store.get_many("ab") == {"a": b"value"}
