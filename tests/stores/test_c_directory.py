"""kvc_dir_store_new and DirectoryStore on one folder: each reads, replaces, counts and evicts what the other wrote."""

import hashlib
import os
import threading

import pytest
from support import c_stores

from kvcache.stores import DirectoryStore

NAMES = [hashlib.blake2b(bytes([i]), digest_size=32).hexdigest() for i in range(40)]
FILE = 84  # bytes of a file besides the value


@pytest.fixture
def both(tmp_path):
    """Return a function that makes a store in C and one in Python on one folder."""
    made = []

    def make(max_bytes=None):
        made.append(c_stores.directory(tmp_path / "a folder/b", max_bytes or 0))
        return made[-1], DirectoryStore(tmp_path / "a folder/b", max_bytes=max_bytes)

    yield make
    for store in made:
        store.close()


def counted(python):
    return int.from_bytes((python.path / "usage.lock").read_bytes(), "little")


def test_the_same_files(both):
    ours, python = both()
    ours.write(NAMES[0], b"from C")
    python[NAMES[1]] = b"from Python"
    assert python[NAMES[0]] == b"from C"
    assert ours.read(NAMES[1], 100) == b"from Python"
    assert ours.read(NAMES[1], 10) == 11
    assert ours.read(NAMES[2], 100) is None
    assert {*python} == {*NAMES[:2]}
    assert counted(python) == python.nbytes == 2 * FILE + 6 + 11
    files = {path.name: path.read_bytes() for path in python.path.glob("*.kv")}
    ours.write(NAMES[1], b"from Python")
    python[NAMES[0]] = b"from C"
    assert files == {path.name: path.read_bytes() for path in python.path.glob("*.kv")}
    assert {path.stat().st_mode & 0o777 for path in python.path.iterdir()} == {0o600}
    del python[NAMES[0]]
    assert ours.read(NAMES[0], 100) is None
    ours.write(NAMES[1], b"longer than before")
    assert counted(python) == python.nbytes == FILE + 18


def test_what_cannot_take_its_name_does_not_count(both):
    ours, python = both()
    python[NAMES[0]] = b"a value"
    (path,) = python.path.glob("*.kv")
    del python[NAMES[0]]
    path.mkdir()
    python[NAMES[1]] = b"another"
    for write in (ours.write, python.__setitem__):
        for _ in range(3):
            with pytest.raises((OSError, c_stores.StoreError), match=r"irectory"):
                write(NAMES[0], bytes(400))
            assert counted(python) == python.nbytes == FILE + 7
    assert len(list(python.path.iterdir())) == 3


def test_both_evict_by_last_use(both):
    size = 16 * (FILE + 100)
    ours, python = both(size)
    for i in range(0, 16, 2):
        ours.write(NAMES[i], b"x" * 100)
        python[NAMES[i + 1]] = b"y" * 100
    assert ours.read(NAMES[1], 100) == python[NAMES[1]]
    assert python[NAMES[0]] == ours.read(NAMES[0], 100)
    ours.write(NAMES[16], b"x" * 100)  # 2 and 3 go
    assert {*python} == {*NAMES[:17]} - {NAMES[2], NAMES[3]}
    for i in range(17, 19):
        python[NAMES[i]] = b"y" * 100
    assert {*python} == {*NAMES[:19]} - {*NAMES[2:6]}  # 4 and 5 as well
    assert counted(python) == python.nbytes <= size


def test_a_file_that_was_torn_is_missing_for_both(both):
    ours, python = both()
    for number, write in enumerate((ours.write, python.__setitem__)):
        write(NAMES[number], b"a value")
        (path,) = set(python.path.glob("*.kv")) - {python.path / "torn.kv"}
        for size in range(path.stat().st_size):
            os.truncate(path, size)
            assert ours.read(NAMES[number], 100) is None
            assert NAMES[number] not in python
            write(NAMES[number], b"a value")
        path.unlink()


def test_at_the_same_time(both):
    """Threads write, read and evict by both; each value is one that somebody wrote, and the count is right."""
    ours, python = both(12 * (FILE + 200))
    failures = []

    def work(write, read):
        try:
            for i in range(300):
                name = NAMES[i * 7 % 40]
                write(name, name.encode() * (1 + i % 3))
                value = read(NAMES[i * 3 % 40])
                assert value in (None, *(NAMES[i * 3 % 40].encode() * n for n in (1, 2, 3)))
        except Exception as error:
            failures.append(error)

    workers = [
        threading.Thread(target=work, args=arguments)
        for arguments in 2 * [(ours.write, lambda name: ours.read(name, 300)), (python.__setitem__, python.get)]
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert counted(python) == python.nbytes <= 12 * (FILE + 200)
    assert not [*python.path.glob("*.tmp")]
