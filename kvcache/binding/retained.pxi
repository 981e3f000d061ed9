"""Retained sequences, whose rows wait to be used again: what `PrefixCache` is made of."""


def retain(Cache cache not None, src, seq_id, begin, end):
    cdef int64_t source = to_seq_id(src, "src"), seq = to_seq_id(seq_id)
    cdef int32_t low = to_position(begin, "begin"), high = to_end(end, low)
    cdef kvc_status status
    cdef kvc_cache *handle = cache.enter()
    with nogil:
        status = kvc_retain(handle, source, seq, low, high)
    cache.finish(status)


def retain_new(Cache cache not None, seq_id, begin, end, layers):
    cdef int64_t seq = to_seq_id(seq_id)
    cdef int32_t low = to_position(begin, "begin"), high = to_end(end, low)
    cdef cnp.ndarray chosen = cache.flag_layers(layers, "layers")
    cdef const uint8_t *flags = <const uint8_t *>chosen.data
    cdef kvc_status status
    cdef kvc_cache *handle = cache.enter()
    with nogil:
        status = kvc_retain_new(handle, seq, low, high, flags)
    cache.finish(status)


def attach(Cache cache not None, seq_ids, dst, length):
    cdef cnp.ndarray given = to_int_array(seq_ids, "seq_ids", cnp.NPY_INT64, _INT64_MIN, _INT64_MAX, 0)
    cdef const int64_t *ids = <const int64_t *>given.data
    cdef int32_t num = given.shape[0], end = to_position(length, "length"), matched = 0
    cdef int64_t target = to_seq_id(dst, "dst")
    cdef kvc_status status
    cdef kvc_cache *handle = cache.enter()
    with nogil:
        status = kvc_attach(handle, ids, num, target, end, &matched)
    cache.finish(status)
    return matched


def touch(Cache cache not None, seq_ids):
    cdef cnp.ndarray given = to_int_array(seq_ids, "seq_ids", cnp.NPY_INT64, _INT64_MIN, _INT64_MAX, 0)
    cdef const int64_t *ids = <const int64_t *>given.data
    cdef int32_t num = given.shape[0]
    cdef kvc_cache *handle = cache.enter()
    with nogil:
        kvc_touch(handle, ids, num)
    cache.leave()


def pin(Cache cache not None, seq_ids, bint pinned):
    cdef cnp.ndarray given = to_int_array(seq_ids, "seq_ids", cnp.NPY_INT64, _INT64_MIN, _INT64_MAX, 0)
    cdef const int64_t *ids = <const int64_t *>given.data
    cdef int32_t num = given.shape[0]
    cdef kvc_cache *handle = cache.enter()
    with nogil:
        kvc_pin(handle, ids, num, 1 if pinned else -1)
    cache.leave()


def retained(Cache cache not None):
    return cache.list_ids(True)
