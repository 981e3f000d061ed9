"""Stores: in a folder, by one or two calls of the C core each; and of values that Python has at hand."""


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


# ---- values at hand


cdef struct AtHand:
    # A store of values that were read before the core asks for them, and that keeps what the core writes.  So no call
    # of the core waits for a mapping of the user's, which may raise, hang, fork, or close the cache.
    kvc_store store
    const uint8_t *names  # [num][KVC_NAME_BYTES]
    size_t *places        # [num] address and size of each value
    int64_t num, next     # next: behind the value that was handed out last
    PyObject *written     # a list


cdef int put_at_hand(AtHand *hand, bytes names, list values, size_t[:, ::1] places, list written) except -1:
    """Fill in a store of bytes, which the caller keeps alive, with the rest."""
    cdef Py_ssize_t i
    if len(names) != len(values) * KVC_NAME_BYTES:
        raise ValueError(f"{len(names)} bytes are not the names of {len(values)} values")
    memset(hand, 0, sizeof(AtHand))
    hand.store.struct_size, hand.store.user = sizeof(kvc_store), hand
    hand.store.read, hand.store.write = hand_out, take_in
    hand.names, hand.num, hand.written = <const uint8_t *><const char *>names, len(values), <PyObject *>written
    hand.places = &places[0, 0]
    for i in range(len(values)):
        value = <bytes?>values[i]
        places[i, 0], places[i, 1] = <size_t><const char *><bytes>value, len(<bytes>value)
    return 0


cdef kvc_status hand_out(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size) noexcept nogil:
    """Copy the value of a name. The core asks for names in their order."""
    cdef AtHand *hand = <AtHand *>user
    cdef int64_t i
    size[0] = 0
    for i in range(hand.next, hand.num):
        if memcmp(name, hand.names + i * KVC_NAME_BYTES, KVC_NAME_BYTES) == 0:
            size[0] = <int64_t>hand.places[2 * i + 1]
            memcpy(value, <const void *>hand.places[2 * i], <size_t>min(size[0], max_bytes))
            hand.next = i + 1
            break
    return KVC_OK


cdef kvc_status take_in(void *user, const uint8_t *name, const void *value, int64_t size) noexcept with gil:
    try:
        (<list>(<AtHand *>user).written).append(PyBytes_FromStringAndSize(<const char *>value, size))
        return KVC_OK
    except BaseException:
        kvc_set_last_error("out of memory for a value of %lld bytes", <long long>size)
        return KVC_ERR_NOMEM
