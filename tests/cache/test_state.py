"""Saved states: what they hold, how they replace a file, and what is refused."""

import contextlib
import errno
import json
import os
import resource
import signal
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
from kvcache import state


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
    other = kvcache.KVCache.load(tmp_path / "state")
    for _ in range(2):  # into new memory, then into memory that was used before
        np.testing.assert_array_equal(other.gather(1), cache.gather(1))
        other.restore(tmp_path / "state")
    other.validate()


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
    cache.save(tmp_path / "two", [7, -3, 7])
    assert kvcache.KVCache.load(tmp_path / "two").sequences == [-3, 7]
    cache.save(tmp_path / "none", [])
    assert kvcache.KVCache.load(tmp_path / "none").sequences == []
    with pytest.raises(ValueError, match="tokens: of sequence 0, which is not in seq_ids"):
        cache.save(tmp_path / "three", [7], tokens={0: [1]})
    for wrong, words in (([1.5], r"seq_ids\[0\]=1.5: an integer"), (0, "seq_ids=0: a sequence of integers is needed")):
        with pytest.raises(TypeError, match=words):
            cache.save(tmp_path / "three", wrong)
    with pytest.raises(ValueError, match=r"seq_ids: sequence 5 holds nothing; the cache's are \[-3, 0, 7\]"):
        cache.save(tmp_path / "three", [7, 5])
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        ([1, 2], TypeError, r"tokens=\[1, 2\]: a mapping of sequences to tokens is needed"),
        ({"a": [1]}, TypeError, "key of tokens='a': an integer is needed"),
        ({0: 5}, TypeError, r"tokens\[0\]=5: a sequence of integers is needed"),
        ({0: [1], 7: [1, 2.5]}, TypeError, r"tokens\[7\]\[1\]=2.5: an integer is needed"),
        ({9: [1]}, ValueError, "tokens: of sequence 9, which holds nothing"),
    ],
)
def test_wrong_tokens_are_refused(saved, tmp_path, tokens, error, words):
    cache, _ = saved
    with pytest.raises(error, match=words):
        cache.save(tmp_path / "three", tokens=tokens)
    assert os.listdir(tmp_path) == ["state"]


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


def test_overrides(saved):
    _, path = saved
    other = kvcache.KVCache.load(path, block_size=3, max_sequences=9, num_threads=2, capacity=100, max_bytes=1 << 20)
    assert (other.block_size, other.max_sequences, other.capacity, other.max_bytes) == (3, 9, 100, 1 << 20)
    with pytest.raises(kvcache.CacheFullError, match="capacity is 5"):
        kvcache.KVCache.load(path, capacity=5)
    with pytest.raises(TypeError, match=r"^dtype is no argument of KVCache\.load: the file holds it, leave dtype out$"):
        kvcache.KVCache.load(path, dtype="f32")
    with pytest.raises(ValueError, match="num_threads=-1"):
        kvcache.KVCache.load(path, num_threads=-1)


def test_blocks_that_max_bytes_does_not_hold(tmp_path):
    cache = kvcache.KVCache(1, 1, 4, 4096)
    feed(cache, 0, 5)
    cache.save(tmp_path / "state")
    for max_bytes, block_size in ((10**6, 4096), (10**4, 64), (4000, 16)):
        other = kvcache.KVCache.load(tmp_path / "state", max_bytes=max_bytes)
        assert (other.block_size, other.max_bytes) == (block_size, max_bytes)
        assert np.array_equal(other.keys(0), cache.keys(0))
    for options in ({"max_bytes": 1}, {"max_bytes": 10**4, "block_size": 4096}):
        with pytest.raises(ValueError, match=rf"^max_bytes is {options['max_bytes']}: it must be at least \d+, which"):
            kvcache.KVCache.load(tmp_path / "state", **options)


def test_functions_that_move_keys_are_handed_in(tmp_path):
    cache = kvcache.KVCache(1, 1, 4, 64, rope=lambda layer, keys, delta: keys + delta)
    feed(cache, 0, 5)
    cache.save(tmp_path / "state")
    with pytest.raises(ValueError, match="rope=None: a function moves the keys of layer 0"):
        kvcache.KVCache.load(tmp_path / "state")
    other = kvcache.KVCache.load(tmp_path / "state", rope=lambda layer, keys, delta: keys - delta)
    keys = other.keys(0).copy()
    other.shift(0, None, 2)
    np.testing.assert_array_equal(other.keys(0), keys - 2)


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
    path = tmp_path / "secret"
    cache.save(path, secret=SECRET)
    assert everything(kvcache.KVCache.load(path, secret=SECRET)) == everything(cache)
    assert everything(kvcache.KVCache.load(path)) == everything(cache)
    with pytest.raises(kvcache.StateFormatError, match="secret: its MAC is another one"):
        kvcache.KVCache.load(path, secret=b"another")
    cache.save(tmp_path / "long", secret=bytes(63) + b"1")  # as long as one may be
    assert kvcache.KVCache.load(tmp_path / "long", secret=bytes(63) + b"1")
    with pytest.raises(kvcache.StateFormatError, match="long: its MAC is another one"):
        kvcache.KVCache.load(tmp_path / "long", secret=bytes(63) + b"2")
    with pytest.raises(kvcache.StateFormatError, match="it was saved without a secret"):
        kvcache.KVCache.load(plain, secret=SECRET)
    other = varied_cache()
    other.remove(0, 1, seq_id=0)
    other.save(plain)  # a whole file, with other content
    path.write_bytes(plain.read_bytes()[:-32] + path.read_bytes()[-32:])
    assert kvcache.KVCache.load(path)
    before = everything(cache)
    with pytest.raises(kvcache.StateFormatError, match="altered, or saved with another secret"):
        cache.restore(path, secret=SECRET)
    assert everything(cache) == before
    for wrong, error in (("text", TypeError), (b"", ValueError), (bytes(65), ValueError)):
        with pytest.raises(error, match="secret"):
            cache.save(tmp_path / "never", secret=wrong)
        with pytest.raises(error, match="secret"):
            kvcache.KVCache.load(path, secret=wrong)
    assert not (tmp_path / "never").exists()


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


def test_flipped_bytes(saved, tmp_path):
    """tests/c/lifetime/test_saved.c flips every bit, and cuts at every byte."""
    cache, path = saved
    data, reasons = path.read_bytes(), set()
    before = everything(cache)
    for at in range(0, len(data), 211):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        reason = refused(tmp_path / "damaged", damaged)
        assert reason or at >= len(data) - 32, at
        if reason:
            reasons.add(reason.split(" ")[0])
        else:
            assert everything(kvcache.KVCache.load(tmp_path / "damaged")) == before
    assert reasons >= {"altered:", "no"}


def test_lengths_that_are_cut(saved, tmp_path):
    data = saved[1].read_bytes()
    for length in range(0, len(data), 499):
        reason = refused(tmp_path / "short", data[:length])
        assert reason, length
        assert "truncated" in reason or "altered" in reason
    assert "more than its header says" in refused(tmp_path / "long", data + b"\0")
    with pytest.raises(kvcache.StateFormatError, match="altered: it has 1 bytes more than its header says"):
        state.inspect(tmp_path / "long")


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 40, 1000])
def test_what_is_no_saved_state_is_not_called_truncated(tmp_path, size):
    for data in (b"hello\nworld\n" * 90, b"{}" * 500, b"\x50" + bytes(999), bytes(range(1, 251)) * 4):
        (tmp_path / "text").write_bytes(data[:size])
        for verify in (False, True):
            with pytest.raises(
                kvcache.StateFormatError, match="text: no saved state: the file does not begin like one"
            ):
                state.inspect(tmp_path / "text", verify=verify)
        with pytest.raises(kvcache.StateFormatError, match="no saved state"):
            kvcache.KVCache.load(tmp_path / "text")


def test_the_reason_names_what_is_wrong(saved, tmp_path):
    cache, path = saved
    data = bytearray(path.read_bytes())
    found = {tensor.name: tensor for tensor in state.inspect(path).tensors}
    data[found["layer.3.v"].begin] ^= 1
    assert "altered: tensor layer.3.v does not match its checksum" in refused(tmp_path / "damaged", data)
    newer = path.read_bytes().replace(b'"version":"1"', b'"version":"3"')
    assert "of a newer format: version 3" in refused(tmp_path / "newer", newer)
    assert "no saved state" in refused(tmp_path / "text", b"any other file, that is no saved state at all" * 9)
    with pytest.raises(
        kvcache.StateFormatError, match='of another model: its fingerprint is "golden 1", not "golden 2"'
    ):
        cache.restore(path, fingerprint="golden 2")
    smaller = kvcache.KVCache(1, 1, 4, 64)
    with pytest.raises(kvcache.StateFormatError, match="of another shape: the file has 7 layers, the cache 1"):
        smaller.restore(path)
    smaller.save(tmp_path / "small")
    with pytest.raises(
        kvcache.StateFormatError, match="of another shape: k_dtype of layer 0 is 'f16' in the file, and 'f32' in"
    ):
        kvcache.KVCache(1, 1, 4, 64, dtype="f32").restore(tmp_path / "small")
    for options, words in (
        (
            {"policy": kvcache.SlidingWindow(4)},
            r"policy of layer 0 is FullAttention\(\) in the file, and SlidingWindow",
        ),
        ({"rope": lambda layer, keys, delta: keys}, "rope of layer 0 is None in the file, and a function in the cache"),
        ({"rope": False}, "rope of layer 0 is None in the file, and False in the cache"),
        ({"v_head_dim": 8}, "v_head_dim of layer 0 is 4 in the file, and 8 in the cache"),
    ):
        with pytest.raises(kvcache.StateFormatError, match=f"small: of another shape: {words}"):
            kvcache.KVCache(1, 1, 4, 64, **options).restore(tmp_path / "small")
    near = [kvcache.KVCache(1, 1, 8, 64, rope=kvcache.Rope([1, x, 0.1])) for x in (0.5, 0.6)]
    near[0].save(tmp_path / "small")
    with pytest.raises(kvcache.StateFormatError, match=r"of another shape: layers\[0\].rope differs"):
        near[1].restore(tmp_path / "small")
    with pytest.raises(FileNotFoundError):
        kvcache.KVCache.load(tmp_path / "nothing")


# ---- files


def test_a_failed_save_leaves_the_old_file(saved, tmp_path, monkeypatch):
    cache, path = saved
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "no folder" / "state")
    with pytest.raises(ValueError, match="fingerprint"):
        cache.save(path, fingerprint='"')
    assert path.read_bytes() == before


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


@pytest.mark.parametrize("fingerprint", ["model\0 of another", "\ud800", "modèle"])
def test_a_fingerprint_is_ascii(saved, fingerprint):
    """Also in the places where a string of C would end."""
    cache, path = saved
    before = path.read_bytes()
    for call in (cache.save, kvcache.KVCache.load, cache.restore):
        with pytest.raises(ValueError, match=r"fingerprint=.*: printable ASCII characters are needed"):
            call(path, fingerprint=fingerprint)
    assert path.read_bytes() == before


def test_a_link_stays_one(saved, tmp_path):
    cache, path = saved
    (tmp_path / "link").symlink_to(path)
    cache.clear(0)
    cache.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert kvcache.KVCache.load(path).sequences == [-3, 7]


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


@pytest.mark.skipif(os.name != "posix", reason="no FIFOs and devices")
def test_a_fifo_that_comes_in_place_of_a_file_is_not_waited_for(saved, tmp_path, monkeypatch):
    cache, path = saved
    os.mkfifo(tmp_path / "fifo")
    found = os.stat(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path: found)
        with pytest.raises(kvcache.StateFormatError, match="is not a regular file"):
            cache.restore(tmp_path / "fifo")


def test_errors_name_the_file_that_was_given(saved, tmp_path):
    """Not the temporary one."""
    cache, _ = saved
    with pytest.raises(FileNotFoundError) as raised:
        cache.save(tmp_path / "no folder" / "state")
    assert raised.value.filename == f"{tmp_path}/no folder/state"


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
    cache, path = saved
    umask = os.umask(0o002)
    try:
        cache.save(tmp_path / "new")
        for mode in (0o640, 0o644, 0o400):
            path.chmod(mode)
            cache.save(path)
            assert path.stat().st_mode & 0o7777 == mode
        (tmp_path / "link").symlink_to(path)
        cache.save(tmp_path / "link")
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o7777 == 0o400
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize("wrong", [None, 0, 3.5, True, [b"x"]])
def test_a_path_is_needed(saved, wrong):
    """Not the number of an open file: 0 would wait for standard input."""
    cache, _ = saved
    for call in (cache.save, kvcache.KVCache.load):
        with pytest.raises(ValueError, match="path='': it names no file"):
            call("")
        with pytest.raises(ValueError, match=r"path='a.*b': a null byte"):
            call("a\0b")
    calls = (cache.save, cache.restore, kvcache.KVCache.load, state.inspect)
    for call in calls:
        with pytest.raises(TypeError, match=r"path=.*: the name of a file is needed"):
            call(wrong)


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


def test_inspect_shows_no_rows_of_a_json_bomb(tmp_path):
    header = b"[" * 100_024
    (tmp_path / "bomb").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(kvcache.StateFormatError, match="no saved state"):
        state.inspect(tmp_path / "bomb")
    header = b'{"__metadata__":{"format":"kvcache","version":"1"},"state":3}'.ljust(120)
    (tmp_path / "bomb").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(kvcache.StateFormatError, match="altered: its header or its tables cannot be read"):
        kvcache.KVCache.load(tmp_path / "bomb")


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("table", "shape"), [("layers", [10**7, 0]), ("sequences", [10**7, 0]), ("holdings", [1, 10**7, 0])]
)
def test_a_table_that_claims_many_rows_of_nothing_takes_no_memory(tmp_path, table, shape):
    path = tmp_path / "state"
    cache = kvcache.KVCache(1, 1, 2, 8)
    feed(cache, 0, 1)
    cache.save(path)
    header, rows = parts_of(path)
    begin, _ = header[table]["data_offsets"]
    write_parts(path, header | {table: {"dtype": "I64", "shape": shape, "data_offsets": [begin, begin]}}, rows)
    assert refusals(path) == {"altered: its header or its tables cannot be read"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("step", [0, 1])
def test_layers_that_name_the_same_frequencies_take_no_memory_for_each(tmp_path, step):
    path, num_freqs = tmp_path / "state", 20_000
    like = kvcache.Layer(1, 2)
    kvcache.KVCache([like, *[replace(like, share=0)] * 499], max_seq_len=8).save(path)
    header, rows = parts_of(path)
    layers = np.frombuffer(rows, "<i8", 500 * 24, header["layers"]["data_offsets"][0]).reshape(500, 24)
    layers[:, 1:3] = 2 * num_freqs
    layers[:, 16:20] = 2, 0, 0, num_freqs - 500
    layers[:, 20] = step * np.arange(500)
    place = [len(rows), len(rows) + 8 * num_freqs]
    header["inv_freq"] = {"dtype": "F64", "shape": [num_freqs], "data_offsets": place}
    write_parts(path, header, rows + np.ones(num_freqs).tobytes())
    said = refusals(path)
    assert said == {"altered: its header or its tables cannot be read"} if step else len(said) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("counted", ["tokens", "runs"])
def test_sequences_have_no_tokens_and_runs_in_common(tmp_path, counted):
    """A negative count would go back to the rows of the sequence before."""
    path, num_sequences, num = tmp_path / "state", 2_000, 50_000
    kvcache.KVCache(1, 1, 2, 8).save(path)
    header, rows = parts_of(path)
    sequences, holdings = np.zeros((num_sequences, 2), "<i8"), np.zeros((num_sequences, 1, 5), "<i8")
    counts = sequences[:, 1] if counted == "tokens" else holdings[:, 0, 0]
    counts[::2], counts[1::2] = num, -num
    its = np.zeros(num if counted == "tokens" else (num, 4), "<i8")
    for name, table in (("sequences", sequences), ("holdings", holdings), (counted, its)):
        place = [len(rows), len(rows) + table.nbytes]
        header[name] = {"dtype": "I64", "shape": table.shape, "data_offsets": place}
        rows += table.tobytes()
    write_parts(path, header, rows)
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


def parts_of(path):
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:begin]), bytearray(data[begin:])


def write_parts(path, header, rows):
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + rows)


def refusals(path):
    """Return what a process says that reads a file, and takes little memory for it."""
    run = subprocess.run([sys.executable, "-c", READ_APART, path], capture_output=True, text=True, timeout=60)
    assert not run.returncode, run.stderr
    return set(run.stdout.splitlines())
