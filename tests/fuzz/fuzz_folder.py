"""A folder of a `DirectoryStore` that somebody else writes to: nothing outside it is read, written or removed.

An input is a list of steps, each a byte and what it needs: calls of the store, and what somebody else does to the
folder between two calls.
"""

import contextlib
import hashlib
import os
import shutil
import socket
import stat
import struct
import tempfile
from pathlib import Path

from kvcache.stores import DirectoryStore

KEYS = [64 * letter for letter in "abcd"]
WORDS = ["kvcstore"]
HIDDEN = b"of somebody else"  # the value of a file outside, which looks like one of the store's
NAMES = [f"{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}.kv" for key in KEYS]
NAMES += ["usage.lock", "0" * 32 + ".tmp", "1" * 40 + ".kv", "notes.txt"]
SIZES = [0, 1, 7, 8, 9, 19, 20, 21, 100, 4096]


def a_value(key, value):
    return struct.pack("<8sIQ", b"kvcstore", len(key), len(value)) + key.encode() + value


class Input:
    """Bytes that are taken from the beginning; zeros follow the last."""

    def __init__(self, data):
        self.data = data

    def byte(self):
        byte, self.data = self.data[:1], self.data[1:]
        return byte[0] if byte else 0

    def pick(self, values):
        return values[self.byte() % len(values)]

    def bytes(self):
        size = self.byte()
        taken, self.data = self.data[:size], self.data[size:]
        return taken


# ---- what somebody else does to a file of the folder


def write(path, outside, rest):
    path.write_bytes(rest.bytes())


def write_value(path, outside, rest):
    """A file that looks like a file of the store, with sizes that may be wrong."""
    data = bytearray(a_value(rest.pick(KEYS), rest.bytes()))
    at, number = 8 + rest.byte() % 12, rest.byte()
    data[at] = (data[at] + number) % 256
    path.write_bytes(data)


def write_usage(path, outside, rest):
    path.write_bytes(rest.pick([b"", b"\xff", b"\xff" * 8, b"\xff" * 7 + b"\x7f", bytes(8), b"\xff" * 100]))


def alter(path, outside, rest):
    data = bytearray(path.read_bytes())
    data[rest.byte() % len(data) if data else 0 : 1] = rest.bytes()
    path.write_bytes(data)


def resize(path, outside, rest):
    os.truncate(path, rest.pick(SIZES))


def link(path, outside, rest):
    path.unlink(missing_ok=True)
    path.symlink_to(rest.pick([outside / path.name, outside, outside / "none", path, path.parent, "/dev/zero"]))


def link_hard(path, outside, rest):
    path.unlink(missing_ok=True)
    path.hardlink_to(outside / "file")


def make_other(path, outside, rest):
    path.unlink(missing_ok=True)
    rest.pick([os.mkfifo, os.mkdir, bind])(path)


def bind(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def rename(path, outside, rest):
    path.rename(path.parent / rest.pick(NAMES))


def unlink(path, outside, rest):
    path.unlink()


def renew(path, outside, rest):
    """Take the folder away; often there is another one then."""
    shutil.rmtree(path.parent)
    if rest.byte() % 4:
        path.parent.mkdir()


WRITING = [write, write_value, write_usage, alter, resize]
DEEDS = [*WRITING, link, link_hard, make_other, rename, unlink, renew]

# ---- what the store does


def put(store, rest):
    key = rest.pick(KEYS)
    store[key] = rest.bytes() * 10


def get(store, rest):
    value = store[rest.pick(KEYS)]
    assert type(value) is bytes
    assert HIDDEN not in value


def delete(store, rest):
    del store[rest.pick(KEYS)]


def contains(store, rest):
    assert (rest.pick(KEYS) in store) in (False, True)


def all_keys(store, rest):
    assert all(type(key) is str for key in store)
    assert HIDDEN.decode() not in store
    assert len(store) >= 0


def count(store, rest):
    assert store.nbytes >= 0


def clear(store, rest):
    store.clear()


def open_again(store, rest):
    DirectoryStore(store.path, max_bytes=rest.pick([None, 1000, 200, 1]))


CALLS = [put, put, put, get, get, delete, contains, all_keys, count, clear, open_again]
# ---- a run


def seeds():
    """Each call of the store after each deed."""
    for call in range(2, len(CALLS)):
        for deed in range(len(DEEDS)):
            name, limit = (call + deed) % len(NAMES), call % 2
            act = bytes([200 + deed, name, 4, deed, 1, 2, 3])
            yield bytes([10, limit, 0, 0, 1, 65, 0, 1, 1, 65]) + act + bytes([call, 0, 1, 66, 0, 0, 1, 67])


def tree_of(outside):
    return {
        str(path): stat.S_IFMT(path.lstat().st_mode) if path.is_symlink() or not path.is_file() else path.read_bytes()
        for path in sorted(outside.rglob("*"))
    }


def is_own(path):
    """Whether who writes to a path writes to the folder alone."""
    return not path.is_symlink() and not (path.is_file() and path.stat().st_nlink > 1)


def attempt(act, path, outside, rest):
    with contextlib.suppress(OSError):
        if act not in WRITING or is_own(path):
            act(path, outside, rest)


def run(data):
    with tempfile.TemporaryDirectory(prefix="kvcache-fuzz-") as root:
        folder, outside = Path(root) / "folder", Path(root) / "outside"
        outside.mkdir()
        for key in KEYS:
            (outside / NAMES[KEYS.index(key)]).write_bytes(a_value(key, HIDDEN))
        for name in ("file", *NAMES[len(KEYS) :]):
            (outside / name).write_bytes(HIDDEN)
        before, store, rest = tree_of(outside), DirectoryStore(folder, max_bytes=1000), Input(data)
        num_files = len(os.listdir("/dev/fd"))
        while rest.data:
            step(store, outside, rest)
            assert tree_of(outside) == before
        assert len(os.listdir("/dev/fd")) == num_files


def step(store, outside, rest):
    number = rest.byte()
    if number < 200:
        call(store, CALLS[number % len(CALLS)], rest)
    else:
        path = store.path / rest.pick(NAMES)
        attempt(DEEDS[(number - 200) % len(DEEDS)], path, outside, Input(rest.bytes()))


def call(store, act, rest):
    """Call the store, which may raise what its documentation says of this call, and nothing else."""
    own = {get: KeyError, delete: KeyError, put: ValueError}
    with contextlib.suppress(OSError, own.get(act, OSError)):
        act(store, rest)
