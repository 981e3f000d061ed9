"""DirectoryStore: a mapping over the C core's store in a folder, whose promises tests/c/store holds."""

import contextlib
import copy
import hashlib
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import pytest

from kvcache import _core
from kvcache.stores import DirectoryStore

HEADER = 84  # bytes of a file before the value
A, B = (hashlib.blake2b(bytes([i]), digest_size=32).hexdigest() for i in range(2))


@pytest.mark.parametrize("value", [bytearray(b"value"), memoryview(b"value")])
def test_other_buffers(tmp_path, value):
    store = DirectoryStore(tmp_path)
    store[A] = value
    assert store[A] == b"value"
    assert type(store[A]) is bytes


def test_a_path_of_bytes(tmp_path):
    DirectoryStore(tmp_path)[A] = b"value"
    assert DirectoryStore(os.fsencode(tmp_path))[A] == b"value"


def test_bad_input(tmp_path):
    for max_bytes in (0, -1):
        with pytest.raises(ValueError, match=f"max_bytes={max_bytes}: must be at least 1"):
            DirectoryStore(tmp_path / "new", max_bytes=max_bytes)
    assert not (tmp_path / "new").exists()
    store = DirectoryStore(tmp_path, max_bytes=100)
    with pytest.raises(TypeError, match="key=5: a str is needed, not int"):
        store[5] = b"value"
    for key in ("", "a", A.upper(), A + "0", A[:-1] + "\n"):
        with pytest.raises(ValueError, match=r"key='.*': the name of a block is needed, 64 hexadecimal digits"):
            store[key] = b"value"
        assert key not in store
        with pytest.raises(KeyError):
            store[key]
        with pytest.raises(KeyError):
            del store[key]
    for value in ("value", 5, None):
        with pytest.raises(TypeError, match=f"value is a {type(value).__name__}: bytes are needed"):
            store[A] = value
    for size in (0, 17):
        with pytest.raises(ValueError, match=f"a value of {size} bytes takes {HEADER + size}: .* max_bytes=100"):
            store[A] = bytes(size)
    assert 5 not in store
    assert [*tmp_path.glob("*.*")] == [tmp_path / "usage.lock"]
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(OSError, match=rf"the store .*/{path} cannot (make|open) its folder: Not a directory"):
            DirectoryStore(tmp_path / path)
    for path in (5, None):
        with pytest.raises(TypeError, match=f"path={path!r}: the name of a folder is needed"):
            DirectoryStore(path)
    for path in ("a\0b", ""):
        with pytest.raises(ValueError, match=r"path='.*': .* folder"):
            DirectoryStore(path)


def test_a_value_is_read_in_part(tmp_path):
    store = DirectoryStore(tmp_path)
    store[A] = b"some value"
    assert [store.read(A, most) for most in (1, 4, 10, 11)] == [b"s", b"some", b"some value", b"some value"]
    assert store.read_many([A, B, "no name"], 4) == {A: b"some"}


def test_a_name_of_another_length(tmp_path):
    store = _core.FolderStore(os.fsencode(tmp_path), 0)
    for call in (lambda: store.read(b"abc", 1), lambda: store.size(b"abc"), lambda: store.remove(b"abc")):
        with pytest.raises(ValueError, match="a name has 32 bytes, not 3"):
            call()


def test_a_folder_that_is_gone_and_comes_back(tmp_path):
    store = DirectoryStore(tmp_path / "folder", max_bytes=1000)
    store[A] = b"value"
    os.rename(tmp_path / "folder", tmp_path / "other")
    for call in (lambda: store[A], lambda: store.__setitem__(A, b"1"), lambda: A in store, lambda: list(store)):
        with pytest.raises(OSError, match="No such file or directory"):
            call()
    os.rename(tmp_path / "other", tmp_path / "folder")
    assert store[A] == b"value"


def test_a_relative_folder_stays_where_it_is(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / "folder").mkdir(parents=True)
    with contextlib.chdir(tmp_path / "one"):
        store = DirectoryStore("folder")
    with contextlib.chdir(tmp_path / "other"):
        store[A] = b"value"
    assert [*(tmp_path / "one/folder").glob("*.kv")]
    assert not [*(tmp_path / "other/folder").iterdir()]
    assert dict(store) == {A: b"value"}


def make_link(file, outside):
    file.symlink_to(outside)


def make_pipe(file, outside):
    os.mkfifo(file)


@pytest.mark.parametrize("make_other", [make_link, make_pipe])
def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path, make_other):
    store, outside = DirectoryStore(tmp_path / "store"), tmp_path / "outside"
    store[A] = b"some value"
    (file,) = store.path.glob("*.kv")
    file.rename(outside)
    make_other(file, outside)
    assert store.nbytes == 0
    assert list(store) == []
    with contextlib.suppress(OSError):
        assert store.get(A) is None
    with contextlib.suppress(OSError):
        store[A] = b"new"
        assert store[A] == b"new"
    store.clear()
    assert outside.read_bytes().endswith(b"some value")


def test_a_file_that_is_none_of_the_store_is_not_listed(tmp_path):
    store = DirectoryStore(tmp_path)
    store[A] = b"value"
    (file,) = tmp_path.glob("*.kv")
    for data in (b"", b"x" * 1000, file.read_bytes()[:-1], file.read_bytes()):  # the last one is under another name
        (tmp_path / ("0" * 40 + ".kv")).write_bytes(data)
        assert list(store) == [A]
        assert len(store) == 1


# ---- several processes and threads

WRITER = """
import sys
sys.path[:] = {path!r}
from kvcache.stores import DirectoryStore
store = DirectoryStore({folder!r}, max_bytes=200_000)
print("ready", flush=True)
i = 0
while True:
    key = f"{{i % 20:064x}}"
    store[key] = key.encode() * 80
    key = f"{{(i * 7) % 20:064x}}"
    assert store.get(key) in (None, key.encode() * 80), "torn"
    i += 1
"""


@contextlib.contextmanager
def writer(folder):
    code = WRITER.format(path=sys.path, folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_killed_writers(tmp_path):
    """Whenever writers are killed, values are whole, the limit holds, and leftovers go when the folder is opened."""
    chance = random.Random(0)
    for _ in range(3):
        with writer(tmp_path) as one, writer(tmp_path) as other:
            time.sleep(chance.uniform(0, 0.1))
            assert one.poll() is other.poll() is None
        store = DirectoryStore(tmp_path, max_bytes=200_000)
        assert not [*tmp_path.glob("*.tmp")]
        assert store.nbytes <= 200_000
        for key, value in store.items():
            assert value == key.encode() * 80
    assert int.from_bytes((tmp_path / "usage.lock").read_bytes(), "little") == store.nbytes


def test_a_stopped_process_holds_up_no_reader(tmp_path):
    store = DirectoryStore(tmp_path)  # which needs the folder's lock
    with writer(tmp_path) as process:
        time.sleep(0.05)
        process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        for key in store:
            store.get(key)
        assert time.monotonic() - begin < 60


@pytest.mark.parametrize("size", [3, 60, 100])
@pytest.mark.parametrize("call", ["delete", "clear"])
def test_a_torn_file_is_removed(tmp_path, size, call):
    """A power cut may tear it; it counts as missing, and has rows of somebody's prompt."""
    store = DirectoryStore(tmp_path)
    store[A] = bytes(1000)
    (file,) = tmp_path.glob("*.kv")
    os.truncate(file, size)
    assert A not in store
    if call == "delete":
        with pytest.raises(KeyError):
            del store[A]
    else:
        store.clear()
    assert not file.exists()


@pytest.mark.parametrize("most", [0, -1, 2**70, "3", 1.5])
def test_most_is_a_number_of_bytes(tmp_path, most):
    store = DirectoryStore(tmp_path)
    for call in (lambda: store.read(A, most), lambda: store.read_many([A], most)):
        with pytest.raises((TypeError, ValueError), match="most"):
            call()


def test_copies_and_pickles(tmp_path):
    store = DirectoryStore(tmp_path, max_bytes=10**6)
    store[A] = b"value"
    for other in (copy.copy(store), copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert (other[A], other.path, other.max_bytes) == (b"value", store.path, 10**6)
        other[B] = b"another"
        assert store.pop(B) == b"another"
