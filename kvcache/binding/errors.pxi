"""Raise the C core's statuses as exceptions."""

cdef dict ERRORS = {
    KVC_ERR_INVALID: ValueError,
    KVC_ERR_INDEX: IndexError,
    KVC_ERR_FULL: CacheFullError,
    KVC_ERR_NOMEM: MemoryError,
    KVC_ERR_UNSUPPORTED: NotSupportedError,
    KVC_ERR_BUSY: CacheBusyError,
    KVC_ERR_HELD: BufferError,
    KVC_ERR_GONE: RowsGoneError,
    KVC_ERR_FORMAT: StateFormatError,
    KVC_ERR_STORE: OSError,
}


cdef int check(kvc_status status) except -1:
    """Raise the exception of a status, unless that is KVC_OK."""
    if status != KVC_OK:
        # Read at once: the next call that fails in this thread replaces it. It may quote bytes of any kind.
        message = kvc_last_error().decode(errors="replace")
        raise ERRORS.get(status, KVCacheError)(message)
    return 0
