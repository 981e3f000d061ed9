"""Call stores of the C interface from Python."""

import ctypes

import kvcache

_library = ctypes.CDLL(kvcache.get_library())
_library.kvc_last_error.restype = ctypes.c_char_p
READ = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
)
WRITE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
REMOVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)


class _Store(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("user", ctypes.c_void_p),
        ("read", READ),
        ("write", WRITE),
        ("remove", REMOVE),
    )


class StoreError(Exception):
    """A function of a store failed."""


def check(status):
    if status:
        raise StoreError(_library.kvc_last_error().decode())


class CStore:
    """A kvc_store that `make` sets through a pointer, freed by the function `free` of the same library."""

    def __init__(self, make, free):
        self._free, self._store = free, ctypes.POINTER(_Store)()
        check(make(ctypes.byref(self._store)))

    def read(self, name, max_bytes):
        """Return a value; None if the store has none; its size alone if the size is above max_bytes."""
        room, size = ctypes.create_string_buffer(max(max_bytes, 1)), ctypes.c_int64(-1)
        store = self._store.contents
        check(store.read(store.user, bytes.fromhex(name), room, max_bytes, ctypes.byref(size)))
        if size.value > max_bytes:
            return size.value
        return room.raw[: size.value] if size.value else None

    def write(self, name, value):
        store = self._store.contents
        check(store.write(store.user, bytes.fromhex(name), value, len(value)))

    def remove(self, name):
        store = self._store.contents
        check(store.remove(store.user, bytes.fromhex(name)))

    def close(self):
        self._free(self._store)
