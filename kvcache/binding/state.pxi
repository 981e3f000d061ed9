"""Saved states: written and read through functions of Python's."""


@cython.final
cdef class _File:
    """A function that writes or reads a part of a file, and where its exceptions are kept."""
    cdef object function
    cdef Callbacks callbacks

    def __cinit__(self, function, Callbacks callbacks):
        self.function = function
        self.callbacks = callbacks


cdef int32_t write_part(void *user, const void *data, size_t size) noexcept with gil:
    cdef _File file = <_File>user
    try:
        file.function(PyMemoryView_FromMemory(<char *>data, <Py_ssize_t>size, PyBUF_READ))
        return 0
    except BaseException as error:
        file.callbacks.keep_error(error)
    return 1


cdef int32_t read_part(void *user, void *data, size_t size) noexcept with gil:
    cdef _File file = <_File>user
    try:
        file.function(PyMemoryView_FromMemory(<char *>data, <Py_ssize_t>size, PyBUF_WRITE))
        return 0
    except BaseException as error:
        file.callbacks.keep_error(error)
    return 1


def save(Cache cache not None, write, seq_ids, tokens, str fingerprint not None):
    """Save sequences, by rising id (None: all), with the tokens of each (None: without)."""
    cdef kvc_save_args args
    cdef kvc_status status
    cdef kvc_cache *handle
    cdef cnp.ndarray ids, ints, counts
    cdef bytes name = fingerprint.encode()
    cdef _File file = _File(write, cache.callbacks)
    memset(&args, 0, sizeof(args))
    args.struct_size = sizeof(kvc_save_args)
    args.write, args.user, args.fingerprint = write_part, <void *>file, name
    if seq_ids is not None:
        ids = to_int_array(seq_ids, "seq_ids", cnp.NPY_INT64, _INT64_MIN, _INT64_MAX, 0)
        args.seq_ids, args.num_sequences = <const int64_t *>ids.data, ids.shape[0]
    if tokens is not None:
        held = [to_int_array(its, f"tokens[{seq_id}]", cnp.NPY_INT64, _INT64_MIN, _INT64_MAX, 0)
                for seq_id, its in zip(seq_ids, tokens)]
        counts = np.array([len(its) for its in held], np.int64)
        ints = np.concatenate([counts[:0], *held])
        args.tokens, args.num_tokens = <const int64_t *>ints.data, <const int64_t *>counts.data
    handle = cache.enter()
    with nogil:
        status = kvc_save(handle, &args)
    cache.finish(status)


cdef class _Source:
    """The arguments for loading, and what they point to."""
    cdef kvc_load_args args
    cdef object kept

    def __cinit__(self, read, int64_t size, fingerprint, seq_ids, to_ids, Callbacks callbacks):
        cdef _File file = _File(read, callbacks)
        cdef cnp.ndarray ids, targets
        cdef bytes name
        memset(&self.args, 0, sizeof(self.args))
        self.args.struct_size = sizeof(kvc_load_args)
        self.args.size = size
        self.args.read, self.args.user = read_part, <void *>file
        self.kept = [file]
        if fingerprint is not None:
            name = fingerprint.encode()
            self.args.fingerprint = name
            self.kept.append(name)
        if seq_ids is not None:
            ids = to_int_array(seq_ids, "seq_ids", cnp.NPY_INT64, _INT64_MIN, _INT64_MAX, 0)
            targets = to_int_array(to_ids, "to_ids", cnp.NPY_INT64, _INT64_MIN, _INT64_MAX, 0)
            self.args.seq_ids, self.args.num_sequences = <const int64_t *>ids.data, ids.shape[0]
            self.args.to_ids = <const int64_t *>targets.data
            self.kept += ids, targets


def restore(Cache cache not None, read, int64_t size, fingerprint, seq_ids, to_ids, edits, restored):
    """Restore sequences, by rising id (None: all), of a state of so many bytes that a function reads.

    If `edits` is not None, append the edits that `restored` lists to it.
    """
    cdef _Source source = _Source(read, size, fingerprint, seq_ids, to_ids, cache.callbacks)
    cdef kvc_status status
    cdef kvc_cache *handle = cache.enter()
    with nogil:
        status = kvc_restore(handle, &source.args)
    cache.finish(status)
    if edits is not None:
        edits.extend(restored)


def verify(read, int64_t size):
    """Check a saved state of so many bytes that a function reads."""
    cdef Callbacks callbacks = Callbacks(0)
    cdef _Source source = _Source(read, size, None, None, None, callbacks)
    cdef kvc_status status
    with nogil:
        status = kvc_load(&source.args, NULL)
    callbacks.check(status)
