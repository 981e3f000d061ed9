"""DirectoryStore: files in one folder, which many processes share."""

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.failing_calls import every_failure
from support.prefixes import BLOCK, make_cache, serve

import kvcache
from kvcache.stores import DirectoryStore, directory

MAX_BYTES = 2000


def size_of(key, value):
    """The bytes of the file of a value."""
    return 20 + len(key.encode(errors="surrogatepass")) + len(value)


class Model(dict):
    """What a store of limited size holds: the first entry was used least recently."""

    def put(self, key, value):
        fits = self.nbytes - self.size(key) + size_of(key, value) <= MAX_BYTES
        self.pop(key, None)
        if not fits:
            while self and self.nbytes + size_of(key, value) > MAX_BYTES - MAX_BYTES // 16:
                del self[next(iter(self))]
        self[key] = value

    def use(self, key):
        self[key] = self.pop(key)

    def size(self, key):
        return size_of(key, self[key]) if key in self else 0

    @property
    def nbytes(self):
        return sum(size_of(key, value) for key, value in self.items())


class Machine(RuleBasedStateMachine):
    """A store and a dictionary do the same, and hold the same; other stores on the same folder, too."""

    keys = st.sampled_from(["a", "A", "..", "../x", "a/b", "a\0b", "x" * 300, "ø\ud800", "", ".", "con"])

    @initialize()
    def begin(self):
        self.folder = contextlib.ExitStack()
        self.path = self.folder.enter_context(tempfile.TemporaryDirectory())
        self.store = DirectoryStore(self.path, max_bytes=MAX_BYTES)
        self.model = Model()

    def teardown(self):
        self.folder.close()

    @rule(key=keys, length=st.integers(0, 900))
    def put(self, key, length):
        self.store[key] = b"x" * length
        self.model.put(key, b"x" * length)

    @rule(key=keys)
    def get(self, key):
        assert self.store.get(key) == self.model.get(key)
        if key in self.model:
            self.model.use(key)

    @rule(key=keys)
    def delete(self, key):
        if key in self.model:
            del self.store[key]
            del self.model[key]
        else:
            with pytest.raises(KeyError):
                del self.store[key]

    @rule()
    def open_again(self):
        self.store = DirectoryStore(self.path, max_bytes=MAX_BYTES)

    @rule()
    def clear(self):
        self.store.clear()
        self.model.clear()

    @invariant()
    def same(self):
        assert set(self.store) == self.model.keys()
        assert len(self.store) == len(self.model)
        assert self.store.nbytes == self.model.nbytes <= MAX_BYTES
        assert all((key in self.store) == (key in self.model) for key in ("a", "A", ".."))


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis.settings(max_examples=50, stateful_step_count=30, deadline=None)


def files_of(path):
    return sorted(file for file in os.listdir(path) if file != directory.USAGE_NAME)


@pytest.mark.parametrize("value", [bytearray(b"value"), memoryview(b"value")])
def test_other_buffers(tmp_path, value):
    store = DirectoryStore(tmp_path)
    store["a"] = value
    assert store["a"] == b"value"
    assert type(store["a"]) is bytes


def test_bad_input(tmp_path):
    for max_bytes in (0, -1):
        with pytest.raises(ValueError, match=f"max_bytes={max_bytes}: must be at least 1"):
            DirectoryStore(tmp_path / "new", max_bytes=max_bytes)
    assert not (tmp_path / "new").exists()
    store = DirectoryStore(tmp_path, max_bytes=100)
    with pytest.raises(TypeError, match="key=5: a str is needed, not int"):
        store[5] = b"value"
    for value in ("value", 5, None):
        with pytest.raises(TypeError, match=f"value is a {type(value).__name__}: bytes are needed"):
            store["a"] = value
    with pytest.raises(ValueError, match="a value of 100 bytes takes 121, more than max_bytes=100"):
        store["a"] = bytes(100)
    assert 5 not in store
    assert files_of(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match=r"the folder cannot be made: .*/file'"):
        DirectoryStore(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=r"the folder cannot be made: .*/file/below'"):
        DirectoryStore(tmp_path / "file" / "below")
    for path in (5, None):
        with pytest.raises(TypeError, match=f"path={path!r}: the name of a folder is needed"):
            DirectoryStore(path)
    for path in ("a\0b", ""):
        with pytest.raises(ValueError, match=r"path='.*': .* folder"):
            DirectoryStore(path)


def test_files_are_private(tmp_path):
    store = DirectoryStore(tmp_path / "one" / "two")
    store["a"] = b"value"
    modes = [os.stat(file).st_mode & 0o777 for file in (store.path, *store.path.iterdir())]
    assert modes == [0o700, 0o600, 0o600]


def test_a_folder_that_is_gone_and_comes_back(tmp_path):
    store = DirectoryStore(tmp_path / "folder", max_bytes=1000)
    store["a"] = b"value"
    os.rename(tmp_path / "folder", tmp_path / "other")
    for call in (lambda: store["a"], lambda: store.__setitem__("a", b""), lambda: "a" in store, lambda: list(store)):
        with pytest.raises(FileNotFoundError):
            call()
    os.rename(tmp_path / "other", tmp_path / "folder")
    assert store["a"] == b"value"


def test_a_relative_folder_stays_where_it_is(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / "folder").mkdir(parents=True)
    with contextlib.chdir(tmp_path / "one"):
        store = DirectoryStore("folder")
    with contextlib.chdir(tmp_path / "other"):
        store["a"] = b"value"
    assert files_of(tmp_path / "one/folder")
    assert not files_of(tmp_path / "other/folder")
    assert dict(store) == {"a": b"value"}


def test_a_folder_that_is_there_to_read(tmp_path):
    DirectoryStore(tmp_path)["a"] = b"value"
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    tmp_path.chmod(0o500)
    try:
        store = DirectoryStore(tmp_path)
        assert store["a"] == b"value"
        with pytest.raises(PermissionError):
            store["b"] = b"value"
    finally:
        tmp_path.chmod(0o700)


# ---- damaged files, and those of others


@pytest.fixture
def stored(tmp_path):
    """A store with one value, and its file."""
    store = DirectoryStore(tmp_path / "store", max_bytes=10_000)
    store["a"] = b"some value"
    (name,) = files_of(store.path)
    return store, store.path / name


def test_a_torn_file_is_missing(stored):
    store, file = stored
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert "a" not in store
        assert store.get("a") is None
        assert list(store) == []
    file.write_bytes(whole + b"\0")
    assert store.get("a") is None
    file.write_bytes(whole)
    assert store["a"] == b"some value"


def test_flipped_bits_are_missing_or_in_the_value(stored):
    """The checksum of a value is its user's; the store sees that a file is what its name says, and whole."""
    store, file = stored
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            file.write_bytes(flipped)
            value = store.get("a")
            assert value is None if place < 21 else value == flipped[21:]


def test_a_value_under_the_name_of_another_is_missing(stored):
    store, file = stored
    store["b"] = b"other"
    (other,) = set(store.path.glob("*.kv")) - {file}
    other.write_bytes(file.read_bytes())
    assert store.get("b") is None
    assert set(store) == {"a"}


def test_keys_that_a_file_claims_take_no_memory(stored):
    """Of more than a MiB, which are no key's."""
    store, file = stored
    other = file.with_name("0" * 40 + ".kv")
    with open(other, "wb") as claiming:
        claiming.write(directory.HEADER.pack(directory.MAGIC, 1 << 28, 0))
        claiming.truncate(directory.HEADER.size + (1 << 28))
    tracemalloc.start()
    assert list(store) == ["a"]
    assert len(store) == 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    store, longest = DirectoryStore(store.path), "k" * (1 << 20)
    store[longest] = b"value"
    assert set(store) == {"a", longest}
    with pytest.raises(ValueError, match="a key of 1048577 bytes: the most are 1048576"):
        store[longest + "k"] = b"value"


def make_link(file, outside):
    file.symlink_to(outside)


def make_folder(file, outside):
    file.mkdir()


def make_pipe(file, outside):
    os.mkfifo(file)


def make_socket(file, outside):
    with contextlib.chdir(file.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(file.name)


@pytest.mark.parametrize("make_other", [make_link, make_folder, make_pipe, make_socket])
def test_what_is_no_file_is_neither_followed_nor_waited_for(stored, tmp_path, make_other):
    store, file = stored
    outside = tmp_path / "outside"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    make_other(file, outside)
    assert store.get("a") is None
    assert "a" not in store
    assert list(store) == []
    assert DirectoryStore(store.path).nbytes == 0
    with contextlib.suppress(OSError):
        store["a"] = b"new"
        assert store["a"] == b"new"
    assert int.from_bytes((store.path / directory.USAGE_NAME).read_bytes(), "little") >= store.nbytes
    with contextlib.suppress(OSError):
        store.clear()
    assert outside.read_bytes().endswith(b"some value")


def test_files_of_others_are_left_alone(tmp_path):
    names = [
        "notes.txt",
        "0" * 40,
        "0" * 40 + ".kv.bak",
        "0" * 32 + ".tmp.bak",
        ("0" * 40 + ".kv").upper(),
        "x.tmp",
        ".hidden",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 1000)
    store = DirectoryStore(tmp_path, max_bytes=500)
    for i in range(100):
        store[str(i)] = bytes(100)
    store.clear()
    assert store.nbytes == 0
    assert set(names) == {*files_of(tmp_path)}


def test_the_lock_is_not_followed(tmp_path):
    store = DirectoryStore(tmp_path / "store")
    lock = store.path / directory.USAGE_NAME
    lock.unlink()
    (tmp_path / "outside").write_bytes(b"precious")
    lock.symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic link"):
        store["a"] = b"value"
    assert (tmp_path / "outside").read_bytes() == b"precious"
    assert [name for name in files_of(store.path) if name.endswith(".tmp")] == []


def test_the_lock_of_another_name_is_not_written(tmp_path):
    """A hard link: what is written to it would be written to a file outside."""
    store = DirectoryStore(tmp_path / "store")
    (tmp_path / "outside").write_bytes(b"precious")
    (store.path / directory.USAGE_NAME).unlink()
    (store.path / directory.USAGE_NAME).hardlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=r"usage\.lock is not a file of this folder alone"):
        store["a"] = b"value"
    assert DirectoryStore(store.path).get("a") is None
    assert (tmp_path / "outside").read_bytes() == b"precious"


@pytest.mark.parametrize(("key_size", "size"), [(64, 1 << 40), ((1 << 32) - 1, 10)], ids=["value", "key"])
def test_a_sparse_file_takes_no_memory(tmp_path, monkeypatch, key_size, size):
    """One that is as long as it says, and takes no space on the disk, is refused before it is read."""
    read = os.read

    def read_little(file, size):
        assert size < 1 << 20
        return read(file, size)

    def make_prefix():
        cache = make_cache()
        return cache, kvcache.PrefixCache(cache, store=DirectoryStore(tmp_path), fingerprint="a model", timeout=30)

    cache, prefix = make_prefix()
    serve(prefix, cache, range(BLOCK + 1))
    assert prefix.flush(30)
    (file,) = tmp_path.glob("*.kv")
    key = file.read_bytes()[directory.HEADER.size :][:64]
    file.write_bytes(directory.HEADER.pack(directory.MAGIC, key_size, size) + key)
    os.truncate(file, directory.HEADER.size + key_size + size)
    monkeypatch.setattr(os, "read", read_little)
    cache, prefix = make_prefix()
    assert prefix.acquire(range(BLOCK + 1))[1] == 0
    assert prefix.flush(30)
    is_of_the_key = key_size == 64
    stats = prefix.stats.store
    assert (stats.errors, stats.corrupt, file.exists()) == (0, is_of_the_key, not is_of_the_key)


# ---- full disks, killed writers, many processes


USES = {
    "open": lambda store: DirectoryStore(store.path, max_bytes=1000),
    "set": lambda store: store.__setitem__("new", bytes(100)),
    "replace": lambda store: store.__setitem__("a", bytes(101)),
    "evict": lambda store: store.__setitem__("new", bytes(800)),
    "get": lambda store: store["a"],
    "delete": lambda store: store.__delitem__("a"),
    "pop": lambda store: store.pop("a"),
    "contains": lambda store: "a" in store,
    "list": lambda store: list(store),
    "nbytes": lambda store: store.nbytes,
    "clear": lambda store: store.clear(),
}


@pytest.mark.parametrize("use", USES)
def test_every_call_to_the_system_may_fail(tmp_path, use):
    """Values stay whole, none is lost but what was to go, and their bytes are not counted as fewer than they are."""
    values = {"a": bytes(100), "b": b"b" * 100, "c": b"c" * 100}
    gone = {"evict": {"a", "b", "c"}, "clear": {"a", "b", "c"}, "delete": {"a"}, "pop": {"a"}}.get(use, set())
    for i, calls in enumerate(every_failure()):
        store, descriptors = DirectoryStore(tmp_path / str(i), max_bytes=1000), len(os.listdir("/dev/fd"))
        store.update(values)
        error = None
        with calls:
            try:
                USES[use](store)
            except OSError as raised:
                error = raised.with_traceback(None)
        assert error is None or error.errno == errno.EIO
        assert len(os.listdir("/dev/fd")) <= descriptors, calls.failed
        with directory.files.open_folder(store.path) as folder, directory._Usage(folder) as usage:
            assert usage.total >= store.nbytes, calls.failed
        found = dict(store)
        if use == "pop" and error:
            assert "a" in found or "close" in calls.failed, calls.failed
        for key in values.keys() - gone:
            assert found[key] == values[key] or (use == "replace" and found[key] == bytes(101)), calls.failed
        assert found.keys() - values.keys() <= {"new"}
        left = [name for name in files_of(store.path) if name.endswith(".tmp")]
        assert not left or "unlink" in calls.failed, calls.failed
        with contextlib.suppress(KeyError):
            USES[use](DirectoryStore(store.path, max_bytes=1000))
        assert all(name.endswith(".kv") for name in files_of(store.path))
        with directory.files.open_folder(store.path) as folder, directory._Usage(folder) as usage:
            assert usage.total == store.nbytes


def test_an_interrupted_write_leaves_nothing(stored, monkeypatch):
    store, _ = stored
    before, files = files_of(store.path), len(os.listdir("/dev/fd"))

    def lock(file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(directory.files, "lock", lock)
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                store["a"] = b"new"
    assert len(os.listdir("/dev/fd")) < files + 5  # other threads, and the garbage collector, may close some
    assert files_of(store.path) == before
    assert store["a"] == b"some value"


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_behind_a_rename_counts_too_much_rather_than_too_little(stored, monkeypatch, error):
    """Whatever a handler of a signal raises; else values would take more than max_bytes."""
    store, _ = stored
    rename = os.replace

    def replace(*arguments, **options):
        rename(*arguments, **options)
        raise error

    for i in range(20):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with pytest.raises(error):
                store[str(i)] = bytes(3000)
        assert store.nbytes <= 10_000


def test_a_write_that_fails_is_not_counted(stored):
    store, file = stored
    file.unlink()
    file.mkdir()
    for _ in range(3):
        with pytest.raises(IsADirectoryError):
            store["a"] = b"value"
    with directory.files.open_folder(store.path) as folder, directory._Usage(folder) as usage:
        assert usage.total == size_of("a", b"some value")


def test_a_full_disk_lets_values_go(stored, monkeypatch):
    """Also where the count, which is lost, cannot be written."""
    store, _ = stored
    store["b"] = b"another"

    def write(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (store.path / directory.USAGE_NAME).write_bytes(b"")
    monkeypatch.setattr(os, "write", write)
    assert store.pop("a") == b"some value"
    del store["b"]
    assert list(store) == []


def test_the_count_of_bytes_may_be_lost(stored):
    store, _ = stored
    usage = store.path / directory.USAGE_NAME
    for damage in (b"", b"\xff", b"\xff" * 8, b"\0" * 8):
        usage.write_bytes(damage)
        for i in range(200):
            store[str(i)] = bytes(100)
        assert store.nbytes <= 10_000 or damage == b"\0" * 8  # that is a count, if a wrong one
        usage.write_bytes(damage)
        unlimited = DirectoryStore.__new__(DirectoryStore)  # opened before
        unlimited.path, unlimited.max_bytes = store.path, None
        unlimited["a"] = b"some value"
        del unlimited["a"]
    usage.unlink()
    for i in range(200):
        store[str(i)] = bytes(100)
    assert store.nbytes <= 10_000


def test_a_lock_that_is_not_released_is_an_error(stored, monkeypatch):
    store, _ = stored
    monkeypatch.setattr(directory, "LOCK_WAIT", 0.05)
    with directory.files.open_folder(store.path) as folder, directory._Usage(folder):
        assert store["a"] == b"some value"
        with pytest.raises(TimeoutError, match="another process has locked"):
            store["b"] = b"value"
    store["b"] = b"value"


def test_who_waits_for_a_lock_that_is_removed_locks_the_next_one(stored):
    store, _ = stored
    writer = threading.Thread(target=store.__setitem__, args=("b", b"value"))
    with directory.files.open_folder(store.path) as folder, directory._Usage(folder):
        writer.start()
        while not any(store.path.glob("*.tmp")):
            time.sleep(0.001)
        time.sleep(0.05)  # until it waits
        (store.path / directory.USAGE_NAME).unlink()
        store["c"] = b"value"
    writer.join()
    with directory.files.open_folder(store.path) as folder, directory._Usage(folder) as usage:
        assert usage.total == store.nbytes


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_is_forked_during_a_write_keeps_no_lock(stored, monkeypatch):
    """Nor does it take the lock from its parent, whatever it does with what it got."""
    store, _ = stored
    monkeypatch.setattr(directory, "LOCK_WAIT", 0.1)
    goes_on, go_on = os.pipe()
    told, tell = os.pipe()
    child = 0
    try:
        with (
            directory.files.open_folder(store.path) as folder,
            directory._Temporary(folder) as temporary,
            directory._Usage(folder) as usage,
        ):
            child = os.fork()
            if child == 0:
                files = temporary.file, usage.file
                temporary.close()
                usage.close()
                os.write(tell, b"closed" if files == (-1, -1) else b"open")
                os.read(goes_on, 1)
                os._exit(0)
            said = os.read(told, 9)
            DirectoryStore(store.path)
            assert temporary.name in files_of(store.path), "it was taken for a leftover"
            with pytest.raises(TimeoutError, match="another process has locked"):
                store["b"] = b"value"
        store["b"] = b"value"
        assert said == b"closed"
    finally:
        os.write(go_on, b"!")
        if child:
            os.waitpid(child, 0)
        for file in (goes_on, go_on, told, tell):
            os.close(file)


FORK_AND_DIE = """
import os, sys, time
sys.path[:] = {path!r}
from kvcache.stores import DirectoryStore, directory

child = None
def fork():
    global child
    if child is None:
        child = os.fork()
        if not child:
            time.sleep(60)

def open_file(*arguments, call=directory.files.open_file):
    file = call(*arguments)
    if {when!r} == "opened":
        fork()
    return file

store = DirectoryStore({folder!r})
directory.files.open_file = open_file
with directory.files.open_folder(store.path) as folder, directory._Usage(folder):
    fork()
    print(child, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("when", ["opened", "locked"])
def test_a_child_whose_parent_was_killed_during_a_write_keeps_no_lock(stored, monkeypatch, when):
    store, _ = stored
    monkeypatch.setattr(directory, "LOCK_WAIT", 1)
    code = FORK_AND_DIE.format(path=sys.path, folder=str(store.path), when=when)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        process.wait()
        try:
            store["b"] = b"value"
        finally:
            os.kill(child, signal.SIGKILL)


def test_least_recently_used_go_first(tmp_path):
    store = DirectoryStore(tmp_path, max_bytes=10 * 121)
    for i in range(10):
        store[str(i)] = bytes(100)
    assert len(store) == 10
    assert store["0"]
    DirectoryStore(tmp_path)["1"]
    store["new"] = bytes(90)
    assert {"0", "1", "new"} <= set(store)
    assert "2" not in store


def test_a_lower_limit_holds_before_anything_is_written(tmp_path):
    """As a disk may be full."""
    store = DirectoryStore(tmp_path)
    for i in range(10):
        store[str(i)] = bytes(100)
    assert {*DirectoryStore(tmp_path, max_bytes=4 * 121)} == {"7", "8", "9"}


def test_huge_sparse_files_are_removed(tmp_path):
    for i in range(3):
        with (tmp_path / f"{i:040}.kv").open("wb") as file:
            size = (1 << 63) - 4096
            while True:
                try:
                    file.truncate(size)
                    break
                except OSError:  # too much for the file system
                    size //= 2
    unlimited = DirectoryStore(tmp_path)
    unlimited["a"] = b"value"
    assert unlimited.nbytes > 1 << 32
    store = DirectoryStore(tmp_path, max_bytes=1000)
    store["b"] = b"value"
    assert store.nbytes <= 1000


WRITER = """
import sys
sys.path[:] = {path!r}
from kvcache.stores import DirectoryStore
store = DirectoryStore({folder!r}, max_bytes=200_000)
print("ready", flush=True)
i = 0
while True:
    key = str(i % 20)
    store[key] = key.encode() * 5000
    value = store.get(str((i * 7) % 20))
    assert value is None or value == str((i * 7) % 20).encode() * 5000, "torn"
    i += 1
"""


def start_writer(folder):
    code = WRITER.format(path=sys.path, folder=str(folder))
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "ready\n"
    return writer


def test_killed_writers(tmp_path):
    """Whenever writers are killed, values are whole, the limit holds, and leftovers go when the folder is opened."""
    chance = random.Random(0)
    for _ in range(6):
        writers = [start_writer(tmp_path) for _ in range(2)]
        time.sleep(chance.uniform(0, 0.1))
        for writer in writers:
            assert writer.poll() is None
            writer.kill()
            writer.wait()
            writer.stdout.close()
        store = DirectoryStore(tmp_path, max_bytes=200_000)
        assert all(name.endswith(".kv") for name in files_of(tmp_path))
        assert store.nbytes <= 200_000
        for key in store:
            assert store[key] == key.encode() * 5000
    with directory.files.open_folder(store.path) as folder, directory._Usage(folder) as usage:
        assert usage.total == store.nbytes


def test_a_writer_at_work_keeps_its_file(tmp_path):
    store = DirectoryStore(tmp_path)
    with directory.files.open_folder(store.path) as folder, directory._Temporary(folder) as temporary:
        DirectoryStore(tmp_path)
        assert files_of(tmp_path) == [temporary.name]
    assert files_of(tmp_path) == []


def test_a_stopped_process_holds_up_no_reader(tmp_path):
    writer = start_writer(tmp_path)
    try:
        time.sleep(0.05)
        writer.send_signal(signal.SIGSTOP)
        store = DirectoryStore.__new__(DirectoryStore)
        store.path, store.max_bytes = tmp_path, None
        begin = time.monotonic()
        for key in store:
            store.get(key)
        assert time.monotonic() - begin < 5
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


SOME_WRITES = """
import sys, threading
sys.path[:] = {path!r}
from kvcache.stores import DirectoryStore

def write_some(number):
    store = DirectoryStore({folder!r}, max_bytes=100_000)
    for i in range(100):
        key = f"{{number}} {{i % 30}}"
        store[key] = key.encode() * 200
        value = store.get(key)
        if value not in (None, key.encode() * 200):
            print("wrong", key)
        if i % 3 == 0:
            store.pop(key, None)

threads = [threading.Thread(target=write_some, args=(i,)) for i in range({first}, {first} + 2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_processes_and_threads_keep_one_count(tmp_path):
    codes = [SOME_WRITES.format(path=sys.path, folder=str(tmp_path), first=first) for first in (0, 2, 4)]
    workers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in codes]
    store = DirectoryStore(tmp_path)
    most = 0
    while any(worker.poll() is None for worker in workers):
        most = max(most, store.nbytes)
    for worker in workers:
        assert worker.communicate()[0] == b""
        assert worker.returncode == 0
    most = max(most, store.nbytes)  # they may have ended before this process ran
    assert 0 < most <= 100_000
    with directory.files.open_folder(store.path) as folder, directory._Usage(folder) as usage:
        assert usage.total == store.nbytes


def overtake(monkeypatch, what_others_do):
    """Have others do something before the next call has the folder's lock."""
    enter = directory._Usage.__enter__

    def enter_late(usage):
        monkeypatch.setattr(directory._Usage, "__enter__", enter)
        what_others_do()
        return enter(usage)

    monkeypatch.setattr(directory._Usage, "__enter__", enter_late)


def test_a_value_is_popped_once(tmp_path, monkeypatch):
    store, other = DirectoryStore(tmp_path), DirectoryStore(tmp_path)
    for default in ([], [None]):
        store["key"] = b"value"
        overtake(monkeypatch, lambda: other.pop("key"))
        if default:
            assert store.pop("key", *default) is None
        else:
            with pytest.raises(KeyError):
                store.pop("key")
    store["key"] = b"value"
    overtake(monkeypatch, lambda: other.update(key=b"newer"))
    assert store.pop("key") == b"newer"
    assert store.pop("key", b"default") == b"default"
    with pytest.raises(TypeError, match="key=5: a str is needed"):
        store.pop(5)


def test_what_is_missing_is_popped_without_the_lock(stored, monkeypatch):
    store, _ = stored
    monkeypatch.setattr(directory, "LOCK_WAIT", 0.01)
    with directory.files.open_folder(store.path) as folder, directory._Usage(folder):
        assert store.pop("missing", None) is None
        with pytest.raises(TimeoutError):
            store.pop("a")


def test_a_value_is_popped_once_by_many(tmp_path):
    """Each value that was written is popped, replaced or left: none twice, whoever pops and writes at the same time."""
    store, popped = DirectoryStore(tmp_path, max_bytes=10**6), []

    def write_and_pop(number):
        own = DirectoryStore(tmp_path, max_bytes=10**6)
        for i in range(200):
            own["key"] = f"{number} {i}".encode()
            popped.append(own.pop("key", None))

    threads = [threading.Thread(target=write_and_pop, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [value for value in popped if value is not None]
    assert len(popped) == 800
    assert len(values) == len(set(values))
    assert len(store) == 0
    with directory.files.open_folder(store.path) as folder, directory._Usage(folder) as usage:
        assert usage.total == 0


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("pop", [lambda store: store.pop("a"), DirectoryStore.popitem], ids=["pop", "popitem"])
def test_a_value_that_cannot_be_read_stays(stored, monkeypatch, pop, error):
    store, _ = stored
    read_exactly = directory._read_exactly

    def fail(file, size):
        if size == len(b"some value"):
            raise error
        return read_exactly(file, size)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "_read_exactly", fail)
        with pytest.raises(error):
            pop(store)
    assert dict(store) == {"a": b"some value"}


def test_a_value_is_read_without_the_lock(stored, monkeypatch):
    store, _ = stored
    other, read_exactly = DirectoryStore(store.path), directory._read_exactly

    def written_meanwhile(file, size):
        if size:  # of the value that is popped
            other["b"] = b"another"
        return read_exactly(file, size)

    monkeypatch.setattr(directory, "LOCK_WAIT", 0.01)
    monkeypatch.setattr(directory, "_read_exactly", written_meanwhile)
    assert store.pop("a") == b"some value"
    assert list(store) == ["b"]


def test_items_are_popped_until_the_folder_is_empty(tmp_path, monkeypatch):
    store, other = DirectoryStore(tmp_path), DirectoryStore(tmp_path)

    def replace_all():
        other.clear()
        other["other"] = b"newer"

    store["key"] = b"value"
    overtake(monkeypatch, replace_all)
    assert store.popitem() == ("other", b"newer")
    with pytest.raises(KeyError, match="the folder has no values"):
        store.popitem()


def test_a_call_stays_in_the_folder_that_it_opened(tmp_path, monkeypatch):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    link = tmp_path / "current"
    link.symlink_to("one")
    store = DirectoryStore(link, max_bytes=5000)
    enter = directory._Usage.__enter__

    def enter_and_move(usage):
        entered = enter(usage)
        link.unlink()
        link.symlink_to("other")
        return entered

    with monkeypatch.context() as patch:
        patch.setattr(directory._Usage, "__enter__", enter_and_move)
        store["a"] = b"value"
    assert files_of(tmp_path / "other") == []
    one = DirectoryStore(tmp_path / "one")
    assert dict(one) == {"a": b"value"}
    with directory.files.open_folder(one.path) as folder, directory._Usage(folder) as usage:
        assert usage.total == one.nbytes


def test_a_value_is_deleted_where_the_count_is_lost(stored):
    store, _ = stored
    store["b"] = b"another"
    (store.path / directory.USAGE_NAME).unlink()
    del store["b"]
    with directory.files.open_folder(store.path) as folder, directory._Usage(folder) as usage:
        assert usage.total == store.nbytes


def test_a_value_that_nobody_may_remove_is_kept(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path, max_bytes=1000)
    store["kept"], unlink = bytes(400), directory.files.unlink
    (kept,) = [name for name in files_of(tmp_path) if name.endswith(".kv")]

    def refuse(folder, name):
        if name == kept:
            raise PermissionError(errno.EPERM, "not permitted")
        return unlink(folder, name)

    monkeypatch.setattr(directory.files, "unlink", refuse)
    for key in "abcd":
        store[key] = bytes(300)
    assert {"kept", "d"} <= store.keys()
