"""Stores in a folder.  Each method is one or two calls of the C core."""


@cython.final
cdef class FolderStore:
    """A store of kvc_dir_store_new. Names have KVC_NAME_BYTES bytes. Every failure is an OSError."""

    cdef kvc_store *store

    def __cinit__(self, bytes path not None, int64_t max_bytes):
        cdef const char *at = path
        cdef kvc_status status
        with nogil:
            status = kvc_dir_store_new(at, max_bytes, &self.store)
        check(status)

    def __dealloc__(self):
        kvc_dir_store_free(self.store)

    def read(self, const uint8_t[::1] name not None, int64_t most):
        """Return a value, or its first `most` bytes; None if it is missing."""
        cdef int64_t size = 0, room = 0
        cdef bytes value = b""
        cdef char *to = NULL
        cdef kvc_status status
        check_name(name)
        while True:
            with nogil:
                status = self.store.read(self.store.user, &name[0], to, room, &size)
            check(status)
            if size == 0:
                return None
            if size <= room or room == most:
                return value if size >= room else value[:size]
            room = min(size, most)
            value = PyBytes_FromStringAndSize(NULL, room)
            to = value

    def size(self, const uint8_t[::1] name not None):
        """Return the bytes of a value; 0 if it is missing."""
        cdef int64_t size = 0
        cdef kvc_status status
        check_name(name)
        with nogil:
            status = self.store.read(self.store.user, &name[0], NULL, 0, &size)
        check(status)
        return size

    def write(self, const uint8_t[::1] name not None, const uint8_t[::1] value not None):
        cdef kvc_status status
        check_name(name)
        with nogil:
            status = self.store.write(self.store.user, &name[0], &value[0], value.shape[0])
        check(status)

    def remove(self, const uint8_t[::1] name not None):
        cdef kvc_status status
        check_name(name)
        with nogil:
            status = self.store.remove(self.store.user, &name[0])
        check(status)


cdef int check_name(const uint8_t[::1] name) except -1:
    if name.shape[0] != KVC_NAME_BYTES:
        raise ValueError(f"a name has 32 bytes, not {name.shape[0]}")
    return 0
