"""integrations/valkey: a store in C on a real server, which shares its values with Python's ValkeyStore."""

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
import threading

import pytest
from support import c_stores, servers
from support.compiling import ROOT, compiler, run

import kvcache
from kvcache.stores import ValkeyStore

FOLDER = ROOT / "integrations/valkey"
NAMES = [hashlib.blake2b(bytes([i]), digest_size=32).hexdigest() for i in range(8)]
STRICT = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]


class Options(ctypes.Structure):
    _fields_ = (
        ("host", ctypes.c_char_p),
        ("port", ctypes.c_int32),
        ("database", ctypes.c_int32),
        ("user", ctypes.c_char_p),
        ("password", ctypes.c_char_p),
        ("prefix", ctypes.c_char_p),
        ("ttl_ms", ctypes.c_int64),
        ("timeout_ms", ctypes.c_int64),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The store as a shared library, compiled without a warning."""
    servers.need()
    path = tmp_path_factory.mktemp("valkey") / "libvalkey_store.so"
    probe = [*compiler(), "-x", "c", "-", "-fsyntax-only"]
    if subprocess.run(probe, input=b"#include <hiredis/hiredis.h>\n", capture_output=True).returncode:
        pytest.skip("libhiredis-dev is not installed here")
    include = f"-I{kvcache.get_include()}"
    run(*compiler(), *STRICT, include, "-fPIC", "-shared", FOLDER / "valkey_store.c", "-o", path, "-lhiredis",
        kvcache.get_library(), "-lpthread")  # fmt: skip
    return ctypes.CDLL(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with servers.Server(tmp_path_factory.mktemp("servers") / "one") as server:
        yield server


@pytest.fixture
def open_store(library):
    """Return a function that makes a store with some options, on a port of this machine."""
    made = []

    def make(port, **options):
        given = Options(port=port, **{"timeout_ms": 10_000, **options})
        made.append(
            c_stores.CStore(lambda out: library.valkey_store_new(ctypes.byref(given), out), library.valkey_store_free)
        )
        return made[-1]

    yield make
    for store in made:
        store.close()


def test_the_same_keys_and_values(open_store, server):
    ours, python = open_store(server.port), ValkeyStore(server.url)
    value = bytes(range(256)) * 1000
    assert ours.read(NAMES[0], 100) is None
    ours.write(NAMES[0], value)
    python[NAMES[1]] = value[::-1]
    assert python[NAMES[0]] == value == ours.read(NAMES[0], len(value))
    assert ours.read(NAMES[1], len(value)) == value[::-1]
    ours.write(NAMES[1], b"another")
    assert {*python} == {*NAMES[:2]}
    assert python[NAMES[1]] == b"another"
    for _ in range(2):  # the second time there is none
        ours.remove(NAMES[1])
        assert {*python} == {NAMES[0]}
    python.clear()


def test_a_value_that_is_too_long_is_not_sent(open_store, server):
    ours, python = open_store(server.port), ValkeyStore(server.url)
    before = output_of(server)
    python[NAMES[0]] = bytes(50 << 20)
    assert ours.read(NAMES[0], 1000) == 1001
    assert output_of(server) - before < 1 << 20
    python.clear()


def output_of(server):
    (line,) = [line for line in server.ask(b"INFO STATS").splitlines() if line.startswith(b"total_net_output_bytes")]
    return int(line.partition(b":")[2])


def test_a_value_that_is_read_lives_on(open_store, server):
    """Unread values stay for the asked time; values of another prefix and database are not seen."""
    store = open_store(server.port, ttl_ms=1_000_000, prefix=b"own:", database=3)
    direct = servers.need().Valkey(port=server.port, db=3)
    for name in NAMES[:2]:
        store.write(name, b"a value")
    keys = sorted(direct.keys())
    for key in keys:
        assert 500_000 < direct.pttl(key) <= 1_000_000
        direct.pexpire(key, 500_000)
    assert store.read(NAMES[0], 100) == b"a value"
    assert sorted(direct.pttl(key) > 500_000 for key in keys) == [False, True]
    open_store(server.port, ttl_ms=1, prefix=b"own:", database=3).write(NAMES[1], b"a value")
    servers.until(lambda: len(direct.keys()) == 1)
    assert store.read(NAMES[1], 100) is None
    assert open_store(server.port, prefix=b"own:").read(NAMES[0], 100) is None
    assert open_store(server.port, database=3).read(NAMES[0], 100) is None
    stays = open_store(server.port, ttl_ms=-1, prefix=b"own:", database=3)
    stays.write(NAMES[2], b"a value")
    assert stays.read(NAMES[2], 100) == b"a value"


def test_threads(open_store, server):
    store, failures = open_store(server.port), []

    def work(number):
        try:
            for i in range(200):
                store.write(NAMES[number], b"%d" % i * 1000)
                assert store.read(NAMES[number], 10_000) == b"%d" % i * 1000
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_a_server_that_is_gone_stopped_or_full(open_store, tmp_path):
    """Each call fails, and the first one after it has come back does not: no signal, no answer of an earlier call."""
    with servers.Server(tmp_path / "own") as server:
        store, hurried = open_store(server.port), open_store(server.port, timeout_ms=200)
        store.write(NAMES[0], b"a value")

        def reads_nothing():
            with contextlib.suppress(c_stores.StoreError):  # if this took long
                assert hurried.read(NAMES[1], 100) is None
                return True

        server.kill()
        for _ in range(3):
            with pytest.raises(c_stores.StoreError, match=f"the server 127.0.0.1:{server.port}: "):
                store.write(NAMES[0], b"a value" * 100_000)
        server.start()
        store.write(NAMES[0], b"a value")
        servers.until(reads_nothing)
        server.stop()
        with pytest.raises(c_stores.StoreError, match="it took longer than timeout_ms"):
            hurried.read(NAMES[0], 100)
        server.go_on()
        assert store.read(NAMES[0], 100) == b"a value"
        servers.until(reads_nothing)
        assert server.ask(b"CONFIG SET maxmemory 1") == b"+OK\r\n"
        with pytest.raises(c_stores.StoreError, match="OOM"):
            store.write(NAMES[1], b"a value")
        assert store.read(NAMES[0], 100) == b"a value"


def test_a_password(open_store, tmp_path):
    with servers.Server(tmp_path / "own", "--requirepass", "a secret") as server:
        with pytest.raises(c_stores.StoreError, match="NOAUTH"):
            open_store(server.port).read(NAMES[0], 100)
        with pytest.raises(c_stores.StoreError, match="WRONGPASS"):
            open_store(server.port, password=b"another").read(NAMES[0], 100)
        for user in (None, b"default"):
            assert open_store(server.port, password=b"a secret", user=user).read(NAMES[0], 100) is None


@pytest.mark.parametrize(
    "options",
    [{"port": 65536}, {"port": 6379, "ttl_ms": -2}, {"port": 6379, "database": -1}, {"port": 1, "prefix": b"x" * 256}],
)
def test_bad_options(open_store, options):
    with pytest.raises(c_stores.StoreError, match="out of range, or a text has more than 255 bytes"):
        open_store(**options)


def test_a_user_without_a_password_is_refused(open_store):
    with pytest.raises(c_stores.StoreError, match="there is a user, but no password"):
        open_store(6379, user=b"somebody")


def test_it_reads_what_a_prefix_cache_wrote(open_store, server):
    """Python's client is what the core is in C: it wraps payloads, and the store has them under the names of blocks."""
    from support.prefixes import make_cache, serve

    cache, url = make_cache(), server.url
    prefix = kvcache.PrefixCache(cache, fingerprint="a model", store=ValkeyStore(url, prefix="blocks:"), timeout=60)
    serve(prefix, cache, list(range(100)))
    assert prefix.close()
    python, ours = ValkeyStore(url, prefix="blocks:"), open_store(server.port, prefix=b"blocks:")
    assert len(python) == 6
    for name in python:
        assert ours.read(name, 1 << 20) == python[name]


@pytest.mark.skipif(not shutil.which("clang"), reason="there is no clang here")
def test_it_compiles_without_a_warning_of_clang(library, tmp_path):
    run("clang", *STRICT, f"-I{kvcache.get_include()}", "-c", FOLDER / "valkey_store.c", "-o", tmp_path / "store.o")
