"""Saved states: what they hold, how they replace a file, and what is refused."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from support.failing_calls import every_failure
from support.saved_states import CACHES, FINGERPRINT, SECRET, STATES, TOKENS, everything, feed, varied_cache

import kvcache
from kvcache import _core, state


@pytest.fixture
def saved(tmp_path):
    """A cache, and the file that it was saved to."""
    cache, path = varied_cache(), tmp_path / "state"
    cache.save(path, tokens=TOKENS, fingerprint=FINGERPRINT)
    return cache, path


# ---- what comes back


def test_a_saved_cache_comes_back(saved):
    cache, path = saved
    other = kvcache.KVCache.load(path)
    assert everything(other) == everything(cache)
    for name in ("layers", "max_seq_len", "max_sequences", "capacity", "max_bytes", "block_size"):
        assert getattr(other, name) == getattr(cache, name), name
    assert other.stats()["live_slots"] == cache.stats()["live_slots"]  # shared rows are shared again
    other.validate()
    for both in (cache, other):
        feed(both, 7, 3)
    assert everything(other) == everything(cache)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")
def test_a_large_cache_comes_back(tmp_path, monkeypatch):
    """Pages of the file that were written are not kept in memory meanwhile."""
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: dropped.append(size))
    cache = kvcache.KVCache(2, 8, 128, None, dtype="f32", block_size=512)
    rows = np.random.default_rng(0).standard_normal((2, 1057, 8, 128)).astype("f4")
    with cache.batch(1057) as batch:
        for layer in range(2):
            batch.put(layer, *rows)
    cache.save(tmp_path / "state")
    assert 0 < sum(dropped) <= (tmp_path / "state").stat().st_size
    np.testing.assert_array_equal(kvcache.KVCache.load(tmp_path / "state").gather(1), cache.gather(1))


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("name", CACHES)
def test_a_file_that_was_saved_once(name, secret):
    """Loads for ever."""
    path, cache = STATES / name, CACHES[name]()
    loaded = kvcache.KVCache.load(path, secret=secret, fingerprint=FINGERPRINT)
    assert everything(loaded) == everything(cache)
    for seq_id in loaded.sequences:
        assert loaded._core.exact_to(seq_id) == cache._core.exact_to(seq_id)
    found = state.inspect(path, verify=True)
    assert (found.version, found.fingerprint, found.has_mac) == (int(name[8]), FINGERPRINT, True)
    assert {s.seq_id: s.tokens.tolist() for s in found.sequences} == TOKENS | {-3: []}
    assert [s.next_position for s in found.sequences] == [cache.next_position(seq_id=i) for i in (-3, 0, 7)]
    assert [layer.policy for layer in found.layers] == [layer.policy for layer in cache.layers]


def test_chosen_sequences(saved, tmp_path):
    cache, _ = saved
    for chosen, held in (([7, -3, 7], [-3, 7]), ([], [])):
        cache.save(tmp_path / "chosen", chosen)
        assert kvcache.KVCache.load(tmp_path / "chosen").sequences == held


FINGERPRINTS = "model\0 of another", "\ud800", "modèle"  # also where a string of C would end


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"seq_ids": [7], "tokens": {0: [1]}}, ValueError, "tokens: of sequence 0, which is not in seq_ids"),
        ({"seq_ids": [1.5]}, TypeError, r"seq_ids\[0\]=1.5: an integer"),
        ({"seq_ids": 0}, TypeError, "seq_ids=0: a sequence of integers is needed"),
        ({"seq_ids": [7, 5]}, ValueError, r"seq_ids: sequence 5 holds nothing; the cache's are \[-3, 0, 7\]"),
        ({"tokens": [1, 2]}, TypeError, r"tokens=\[1, 2\]: a mapping of sequences to tokens is needed"),
        ({"tokens": {"a": [1]}}, TypeError, "key of tokens='a': an integer is needed"),
        ({"tokens": {0: 5}}, TypeError, r"tokens\[0\]=5: a sequence of integers is needed"),
        ({"tokens": {0: [1], 7: [1, 2.5]}}, TypeError, r"tokens\[7\]\[1\]=2.5: an integer is needed"),
        ({"tokens": {9: [1]}}, ValueError, "tokens: of sequence 9, which holds nothing"),
        *(({"fingerprint": x}, ValueError, "fingerprint=.*: printable ASCII characters") for x in FINGERPRINTS),
        ({"secret": "text"}, TypeError, "secret: bytes are needed, not str"),
        *(({"secret": x}, ValueError, "secret of .* bytes: it must have from 1 to 64") for x in (b"", bytes(65))),
    ],
)
def test_wrong_arguments(saved, tmp_path, wrong, error, words):
    cache, path = saved
    before = path.read_bytes()
    for call in (
        [cache.save] if wrong.keys() & {"seq_ids", "tokens"} else [cache.save, cache.restore, kvcache.KVCache.load]
    ):
        with pytest.raises(error, match=words):
            call(path, **wrong)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["state"])


def test_what_holds_an_encoders_rows_alone_is_saved(tmp_path):
    policy = [kvcache.FullAttention(), kvcache.CrossAttention(8)]
    cache, x = kvcache.KVCache(2, 1, 4, 64, policy=policy, max_sequences=2), np.ones((1, 1, 4), np.float32)
    with cache.batch(1, seq_ids=[5]) as batch:
        batch.put(0, x, x)
        batch.put(1, x, x, seq_id=5)
    cache.copy_prefix(5, 3, 0)
    cache.save(tmp_path / "state", [3], tokens={3: [1]})
    assert kvcache.KVCache.load(tmp_path / "state").seq_len(3, layer=1) == 1
    cache.save(tmp_path / "state", tokens={5: [1]})
    assert kvcache.KVCache.load(tmp_path / "state").seq_len(3, layer=1) == 1


def test_restore(saved):
    cache, path = saved
    before = everything(cache)
    other = varied_cache()
    other.clear(0)
    other.restore(path, seq_id=40, saved_id=7)
    other.restore(path, seq_id=0)
    assert [x for x in everything(other) if x[0] != 40][:7] == before[:7]
    for layer in (0, 1, 3):
        for a, b in zip(other.gather(layer, seq_id=40), cache.gather(layer, seq_id=7), strict=True):
            np.testing.assert_array_equal(a, b)
    other.validate()
    other.restore(path)
    assert other.sequences == [-3, 0, 7, 40]
    with pytest.raises(ValueError, match="seq_id=5: the file has 3 sequences, and none of this id; give saved_id"):
        other.restore(path, seq_id=5)
    with pytest.raises(ValueError, match="saved_id=6: the file has no such sequence"):
        other.restore(path, saved_id=6)
    with other.batch(1, seq_ids=[0]) as batch:
        with pytest.raises(kvcache.CacheBusyError, match="sequence 0 belongs to the open batch"):
            other.restore(path)
        other.restore(path, seq_id=7)
        batch.abort()


def test_overrides(saved, tmp_path):
    _, path = saved
    other = kvcache.KVCache.load(path, block_size=3, max_sequences=9, num_threads=2, capacity=100, max_bytes=1 << 20)
    assert (other.block_size, other.max_sequences, other.capacity, other.max_bytes) == (3, 9, 100, 1 << 20)
    with pytest.raises(kvcache.CacheFullError, match="capacity is 5"):
        kvcache.KVCache.load(path, capacity=5)
    with pytest.raises(TypeError, match=r"^dtype is no argument of KVCache\.load: the file holds it, leave dtype out$"):
        kvcache.KVCache.load(path, dtype="f32")
    with pytest.raises(ValueError, match="num_threads=-1"):
        kvcache.KVCache.load(path, num_threads=-1)
    cache = kvcache.KVCache(1, 1, 4, 4096, rope=lambda layer, keys, delta: keys + delta)
    feed(cache, 0, 5)
    cache.save(path)
    with pytest.raises(ValueError, match="rope=None: a function moves the keys of layer 0"):
        kvcache.KVCache.load(path)
    rope = {"rope": lambda layer, keys, delta: keys - delta}
    for max_bytes, block_size in ((10**6, 4096), (10**4, 64), (4000, 16)):  # the largest that max_bytes holds
        other = kvcache.KVCache.load(path, max_bytes=max_bytes, **rope)
        assert (other.block_size, other.max_bytes) == (block_size, max_bytes)
    other = kvcache.KVCache.load(path, **rope)
    other.shift(0, None, 2)
    np.testing.assert_array_equal(other.keys(0), cache.keys(0) - 2)
    for options in ({"max_bytes": 1}, {"max_bytes": 10**4, "block_size": 4096}):
        with pytest.raises(ValueError, match=rf"^max_bytes is {options['max_bytes']}: it must be at least \d+, which"):
            kvcache.KVCache.load(path, **rope, **options)


def test_the_safetensors_library_opens_it(saved):
    cache, path = saved
    safe_open = pytest.importorskip("safetensors").safe_open
    with safe_open(path, "np") as file:
        assert file.metadata()["format"] == "kvcache"
        rows = file.get_tensor("layer.0.k")
        k, _ = cache.gather(0, seq_id=-3)
        np.testing.assert_array_equal(rows[:, :1], k)  # -3 is the first sequence
        assert file.get_tensor("layer.1.k").dtype == np.uint8
        assert file.get_tensor("runs").shape[1] == 4


# ---- secrets


def test_a_secret_finds_what_checksums_do_not(saved, tmp_path):
    cache, plain = saved
    path, long, longest = tmp_path / "secret", tmp_path / "long", bytes(63) + b"1"
    cache.save(path, secret=SECRET)
    cache.save(long, secret=longest)
    for each, secret in ((path, SECRET), (path, None), (long, longest)):
        assert everything(kvcache.KVCache.load(each, secret=secret)) == everything(cache)
    wrong = [(path, b"another", "MAC is another one"), (long, bytes(63) + b"2", "MAC is another one")]
    for each, secret, words in (*wrong, (plain, SECRET, "it was saved without a secret")):
        with pytest.raises(kvcache.StateFormatError, match=f"{each.name}: .*{words}"):
            kvcache.KVCache.load(each, secret=secret)
    other, before = varied_cache(), everything(cache)
    other.remove(0, 1, seq_id=0)
    other.save(plain)  # a whole file, with other content
    path.write_bytes(plain.read_bytes()[:-32] + path.read_bytes()[-32:])
    assert kvcache.KVCache.load(path)
    with pytest.raises(kvcache.StateFormatError, match="altered, or saved with another secret"):
        cache.restore(path, secret=SECRET)
    assert everything(cache) == before


# ---- damage


def refused(path, data):
    """Return why a file is refused; None if it is not."""
    path.write_bytes(data)
    try:
        found = state.inspect(path, verify=True)
        cache = kvcache.KVCache.load(path)
    except kvcache.StateFormatError as error:
        return str(error).removeprefix(f"{path}: ")
    assert [s.seq_id for s in found.sequences] == cache.sequences
    return None


def test_damage(saved, tmp_path):
    """tests/c/lifetime/test_saved.c flips every bit, and cuts at every byte."""
    data, path = saved[1].read_bytes(), tmp_path / "damaged"
    for at in range(0, len(data), 499):
        assert "truncated" in refused(path, data[:at])
        assert refused(path, data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]) or at >= len(data) - 32
    begin = next(tensor.begin for tensor in state.inspect(saved[1]).tensors if tensor.name == "layer.3.v")
    altered = data[:begin] + bytes([data[begin] ^ 1]) + data[begin + 1 :]
    assert refused(path, altered) == "altered: tensor layer.3.v does not match its checksum"
    assert "of a newer format: version 3" in refused(path, data.replace(b'"version":"1"', b'"version":"3"'))
    assert "more than its header says" in refused(path, data + b"\0")
    with pytest.raises(kvcache.StateFormatError, match="altered: it has 1 bytes more than its header says"):
        state.inspect(path)
    header = b'{"__metadata__":{"format":"kvcache","version":"1"},"state":3}'.ljust(120)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(kvcache.StateFormatError, match="altered: its header or its tables cannot be read"):
        kvcache.KVCache.load(path)


def test_what_is_no_saved_state(tmp_path):
    """It is not called truncated. A header of brackets is not read, either."""
    path, bomb = tmp_path / "text", 100_024
    texts = b"hello\nworld\n" * 90, b"{}" * 500, b"\x50" + bytes(999), bytes(range(1, 251)) * 4
    data = [text[:size] for text in texts for size in (1, 2, 3, 6, 8, 40, 1000)]
    for each in (*data, bomb.to_bytes(8, "little") + bomb * b"["):
        path.write_bytes(each)
        for read in (state.inspect, lambda path: state.inspect(path, verify=True), kvcache.KVCache.load):
            with pytest.raises(kvcache.StateFormatError, match="text: no saved state: the file does not begin like"):
                read(path)


def test_states_of_other_models(saved, tmp_path):
    cache, path = saved
    with pytest.raises(kvcache.StateFormatError, match='model: its fingerprint is "golden 1", not "golden 2"'):
        cache.restore(path, fingerprint="golden 2")
    shape, small, near = (1, 1, 8, 64), tmp_path / "small", {"rope": kvcache.Rope([1, 0.5, 0.1])}
    with pytest.raises(kvcache.StateFormatError, match="of another shape: the file has 7 layers, the cache 1"):
        kvcache.KVCache(*shape).restore(path)
    for own, other, words in (
        ({}, {"dtype": "f32"}, "k_dtype of layer 0 is 'f16' in the file, and 'f32' in"),
        ({}, {"policy": kvcache.SlidingWindow(4)}, r"policy of layer 0 is FullAttention\(\) in the file, and SlidingW"),
        ({}, {"rope": lambda layer, keys, delta: keys}, "rope of layer 0 is None in the file, and a function in the"),
        ({}, {"rope": False}, "rope of layer 0 is None in the file, and False in the cache"),
        ({}, {"v_head_dim": 4}, "v_head_dim of layer 0 is 8 in the file, and 4 in the cache"),
        (near, {"rope": kvcache.Rope([1, 0.6, 0.1])}, r"layers\[0\].rope differs"),
    ):
        kvcache.KVCache(*shape, **own).save(small)
        with pytest.raises(kvcache.StateFormatError, match=f"small: of another shape: {words}"):
            kvcache.KVCache(*shape, **other).restore(small)


# ---- files


def test_every_call_to_the_system_may_fail(saved, tmp_path):
    """A file is the old one or the new one, with its mode, and nothing else stays, unless it could not be removed."""
    cache, path = saved
    link, old, descriptors = tmp_path / "link", path.read_bytes(), len(os.listdir("/dev/fd"))
    other, before = varied_cache(), everything(cache)
    other.clear(0)
    other.save(path)
    new = path.read_bytes()
    link.symlink_to(path)
    for calls in every_failure():
        path.write_bytes(old)
        path.chmod(0o640)
        error = None
        with calls:
            try:
                other.save(link)
            except OSError as raised:
                error = raised.with_traceback(None)
        assert error is None or (error.errno, error.filename) == (errno.EIO, str(link))
        assert path.read_bytes() == (new if "replace" in calls.done else old), calls.failed
        on_disk = [name for name in calls.done if name in ("fsync", "replace")]
        assert error or on_disk == ["fsync", "replace", "fsync"], calls.failed  # of the file, then of its folder
        assert link.is_symlink(), calls.failed
        assert path.stat().st_mode & 0o7777 == 0o640, calls.failed
        for left in {*os.listdir(tmp_path)} - {"state", "link"}:
            assert "unlink" in calls.failed
            (tmp_path / left).unlink()
        assert len(os.listdir("/dev/fd")) <= descriptors, calls.failed
    path.write_bytes(old)
    for calls in every_failure():
        with calls, contextlib.suppress(OSError):
            cache.restore(link)
        assert everything(cache) == before
        assert len(os.listdir("/dev/fd")) <= descriptors, calls.failed


@pytest.mark.skipif(os.name != "posix", reason="no FIFOs and devices")
def test_only_regular_files_are_replaced(saved, tmp_path):
    cache, _ = saved
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    for name in ("/dev/full", os.fsencode(tmp_path / "fifo"), tmp_path / "link", tmp_path):
        with pytest.raises(OSError, match="is not a regular file, and is not replaced") as raised:
            cache.save(name)
        assert raised.value.filename == os.fspath(name)
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "link").is_fifo()
    with pytest.raises(IsADirectoryError):
        cache.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link", "state"]


@pytest.mark.skipif(os.name != "posix", reason="no FIFOs and devices")
def test_what_is_no_file_is_neither_read_nor_waited_for(saved, tmp_path, monkeypatch):
    cache, _ = saved
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    writer = threading.Thread(target=(tmp_path / "fifo").write_bytes, args=[b"to another reader"])
    writer.start()
    for path in (tmp_path / "fifo", "link", "socket", "/dev/zero"):
        for read in (kvcache.KVCache.load, cache.restore, kvcache.state.inspect):
            with pytest.raises(kvcache.StateFormatError, match=rf"^{path}: is not a regular file$"):
                read(path)
    assert (tmp_path / "fifo").read_bytes() == b"to another reader"
    writer.join()
    with pytest.raises(IsADirectoryError):
        kvcache.KVCache.load(tmp_path)
    found = os.stat(saved[1])
    monkeypatch.setattr(os, "stat", lambda path: found)  # a FIFO comes in place of a file
    with pytest.raises(kvcache.StateFormatError, match="is not a regular file"):
        cache.restore("fifo")


@pytest.mark.skipif(os.name != "posix", reason="names are limited by their characters")
@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, b"\xc3" * 255])
def test_names_as_long_as_a_file_system_takes(saved, tmp_path, name):
    """The temporary file has a name that fits, too."""
    cache, _ = saved
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    try:
        with open(path, "wb"):
            pass
    except OSError:
        pytest.skip("the file system does not take the name")
    cache.save(path)
    assert kvcache.KVCache.load(path).sequences == cache.sequences
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.skipif(os.name != "posix", reason="no modes")
def test_a_new_file_is_its_owners_alone(saved, tmp_path):
    umask = os.umask(0o002)
    try:
        saved[0].save(tmp_path / "new")
    finally:
        os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o600


def test_a_path_is_needed(saved, tmp_path):
    """Not the number of an open file: 0 would wait for standard input. Errors do not name the temporary file."""
    cache, _ = saved
    for call in (cache.save, cache.restore, kvcache.KVCache.load, state.inspect):
        for wrong in (None, 0, 3.5, True, [b"x"]):
            with pytest.raises(TypeError, match=r"path=.*: the name of a file is needed"):
                call(wrong)
        for wrong, words in (("", "path='': it names no file"), ("a\0b", r"path='a.*b': a null byte")):
            with pytest.raises(ValueError, match=words):
                call(wrong)
        with pytest.raises(FileNotFoundError) as raised:
            call(tmp_path / "no folder" / "state")
        assert os.fspath(raised.value.filename) == f"{tmp_path}/no folder/state"


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is open cannot be cut there")
@pytest.mark.parametrize(
    ("read", "where", "name", "length"),
    [
        (lambda cache, path: state.inspect(path, verify=True), _core, "verify", 5000),
        (lambda cache, path: kvcache.KVCache.load(path), _core, "restore", 5000),
        (lambda cache, path: cache.restore(path, secret=SECRET), _core, "restore", 5000),
        (lambda cache, path: state.inspect(path), json, "loads", 8),
    ],
    ids=["inspect all", "load", "restore", "inspect"],
)
def test_a_file_that_becomes_shorter_while_it_is_read(saved, monkeypatch, read, where, name, length):
    """A copy over a file makes the file shorter first."""
    cache, path = saved
    cache.save(path, secret=SECRET)
    call, before = getattr(where, name), everything(cache)
    monkeypatch.setattr(where, name, lambda *arguments: (os.truncate(path, length), call(*arguments))[1])
    with pytest.raises(kvcache.StateFormatError, match=f"^{path}: became shorter while it was read$"):
        read(cache, path)
    assert everything(cache) == before


SAVE_FOR_EVER = """
import sys
from support.saved_states import varied_cache
caches = [varied_cache(), varied_cache()]
caches[1].clear(0)
caches[0].save(sys.argv[1])
print("ready", flush=True)
while True:
    for cache in caches:
        cache.save(sys.argv[1])
"""


def test_killed_while_it_saves(tmp_path):
    path = tmp_path / "state"
    environment = os.environ | {"PYTHONPATH": str(STATES.parents[1]), "PYTHONSAFEPATH": "1"}
    rng = np.random.default_rng(0)
    for _ in range(5):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0.01, 0.1))
            process.kill()
        assert kvcache.KVCache.load(path).sequences in ([-3, 0, 7], [-3, 7])


# ---- meanwhile


def test_a_cache_that_is_being_saved_is_not_closed(saved, tmp_path, monkeypatch):
    cache, _ = saved
    errors = []

    def write(self, data):
        for call, error in ((cache.close, kvcache.CacheBusyError), (cache.compact, BufferError)):
            with pytest.raises(error):
                call()
        errors.append(len(data))
        raise ZeroDivisionError

    monkeypatch.setattr(state.Writer, "write", write)
    with pytest.raises(ZeroDivisionError):
        cache.save(tmp_path / "never")
    assert len(errors) == 1
    assert not (tmp_path / "never").exists()
    cache.compact()


READ_APART = """
import sys
import kvcache, kvcache.state

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM"))

cache, before = kvcache.KVCache(1, 1, 2, 8), peak()
for read in (kvcache.KVCache.load, cache.restore, kvcache.state.inspect):
    try:
        read(sys.argv[1])
    except kvcache.StateFormatError as error:
        print(str(error).removeprefix(f"{sys.argv[1]}: "))
assert peak() - before < 50, f"{peak() - before} MiB"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("behind", "num_layers"),
    [
        ("", 2**60),
        (',"a":["",[[]]]', 100_000),
        *(
            pytest.param(behind, num_layers, marks=pytest.mark.full)
            for behind in ("", " ", "\0", ',"a":{}', ',"a":["",[[]]]')
            for num_layers in (0, 4, 100_000, 2**60)
        ),
    ],
)
def test_a_header_that_claims_to_be_long_takes_no_memory(tmp_path, behind, num_layers):
    """Whether it is there, or the file has a hole in its place; and one in place of the layers that it would be for."""
    path, length = tmp_path / "long", 99_999_992
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b'{"__metadata__":{"format":"kvcache","version":"1"}')
        piece = behind.encode() * 10_000
        while piece and file.tell() < length - len(piece):
            file.write(piece)
        file.truncate(8 + length)
        file.seek(8 + length)
        file.write(num_layers.to_bytes(8, "little"))
        file.truncate(2 * length)
    said = refusals(path)
    if num_layers == 2**60:
        assert said == {f"truncated or altered: {num_layers} layers do not fit in {2 * length} bytes"}
    else:
        assert said == {f"altered: a header of {length} bytes is too long for 0 layers"}


def claim_rows(table, shape):
    """Return a change of a file: a table claims many rows of nothing."""

    def change(header, rows):
        begin, _ = header[table]["data_offsets"]
        header[table] = {"dtype": "I64", "shape": shape, "data_offsets": [begin, begin]}

    return change


def append(header, rows, name, table):
    place = [len(rows), len(rows) + table.nbytes]
    header[name] = {"dtype": "F64" if table.dtype == float else "I64", "shape": table.shape, "data_offsets": place}
    rows += table.tobytes()


def overlap_frequencies(header, rows, num_freqs=20_000, num_layers=500):
    """Let each layer name nearly all frequencies, from another place on."""
    begin = header["layers"]["data_offsets"][0]
    layers = np.frombuffer(rows, "<i8", num_layers * 24, begin).reshape(num_layers, 24).copy()
    layers[:, 1:3], layers[:, 16:20], layers[:, 20] = 2 * num_freqs, (2, 0, 0, num_freqs - 500), np.arange(num_layers)
    append(header, rows, "layers", layers)
    append(header, rows, "inv_freq", np.ones(num_freqs))


def share(counted):
    """Return a change of a file: by a negative count, each second sequence goes back to the rows of the one before."""

    def change(header, rows, num_sequences=2_000, num=50_000):
        sequences, holdings = np.zeros((num_sequences, 2), "<i8"), np.zeros((num_sequences, 1, 5), "<i8")
        counts = sequences[:, 1] if counted == "tokens" else holdings[:, 0, 0]
        counts[::2], counts[1::2] = num, -num
        its = np.zeros(num if counted == "tokens" else (num, 4), "<i8")
        for name, table in (("sequences", sequences), ("holdings", holdings), (counted, its)):
            append(header, rows, name, table)

    return change


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "change",
    [
        *map(claim_rows, ("layers", "sequences", "holdings"), ([10**7, 0], [10**7, 0], [1, 10**7, 0])),
        overlap_frequencies,
        *map(share, ("tokens", "runs")),
    ],
)
def test_tables_that_claim_what_is_not_there_take_no_memory(tmp_path, change):
    path, like = tmp_path / "state", kvcache.Layer(1, 2)
    kvcache.KVCache([like, *[replace(like, share=0)] * (499 * (change is overlap_frequencies))], max_seq_len=8).save(
        path
    )
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header, rows = json.loads(data[8:begin]), bytearray(data[begin:])
    change(header, rows)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + rows)
    assert refusals(path) == {"altered: its header or its tables cannot be read"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sequences_take_no_memory_for_each_layer(tmp_path):
    path, ids = tmp_path / "state", range(3_000)
    like = kvcache.Layer(1, 2)
    cache = kvcache.KVCache([like, *[replace(like, share=0)] * 2_999], max_seq_len=None, max_sequences=None)
    with cache.batch(positions=[0] * len(ids), seq_ids=ids) as batch:
        batch.put(0, *np.ones((2, len(ids), 1, 2), np.float32))
    cache.save(path)
    cut = path.read_bytes()
    path.write_bytes(cut[:-40] + b"\1" + cut[-39:])  # padding in front of the MAC
    assert "altered: checksums.padding is not all zeros" in refusals(path)


def refusals(path):
    """Return what a process says that reads a file, and takes little memory for it."""
    run = subprocess.run([sys.executable, "-c", READ_APART, path], capture_output=True, text=True, timeout=60)
    assert not run.returncode, run.stderr
    return set(run.stdout.splitlines())
