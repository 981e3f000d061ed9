"""Prefixes: prompts that begin alike.  Each method is one call of the C core."""


@cython.final
@cython.no_gc_clear  # __dealloc__ needs the cache
cdef class Prefix:
    """A kvc_prefix, as long as its cache is open. Tokens are an array of int64, and an array of digests or None."""

    cdef Cache cache
    cdef kvc_prefix *handle
    cdef kvc_prefix_stats latest

    def __cinit__(self, Cache cache not None, bytes salt not None, bytes identity not None, bytes secret, int64_t quota,
                  int64_t ttl_ms, int32_t reuse_min_tokens, bint collects_new, int64_t state_bytes,
                  int64_t max_checkpoint_bytes, int32_t max_events):
        cdef kvc_prefix_config config
        cdef kvc_cache *handle
        cdef kvc_status status
        self.cache = cache
        memset(&config, 0, sizeof(config))
        config.struct_size = sizeof(config)
        if salt:
            config.salt, config.salt_size = <const char *>salt, len(salt)
        config.identity, config.identity_size = <const char *>identity, len(identity)
        if secret:
            config.secret, config.secret_size = <const char *>secret, len(secret)
        config.quota, config.ttl_ms = quota, ttl_ms
        config.reuse_min_tokens, config.collects_new = reuse_min_tokens, collects_new
        config.user = <void *>self
        config.state_bytes, config.max_checkpoint_bytes = state_bytes, max_checkpoint_bytes
        config.max_events = max_events
        handle = cache.enter()
        with nogil:
            status = kvc_prefix_new(handle, &config, &self.handle)
        cache.finish(status)

    def __dealloc__(self):
        if self.handle != NULL and self.cache is not None and self.cache.try_enter():
            with nogil:
                kvc_prefix_free(self.handle)
            self.cache.leave()

    @property
    def user(self):
        """The name by which `take_new_blocks` calls this prefix."""
        return <size_t><void *>self

    def acquire(self, const int64_t[::1] ids, const uint8_t[:, ::1] digests, int64_t max_matched):
        cdef kvc_tokens tokens = describe(ids, digests)
        cdef int64_t seq_id = 0
        cdef int32_t matched = 0
        cdef kvc_status status
        self.cache.enter()
        with nogil:
            status = kvc_prefix_acquire(self.handle, &tokens, max_matched, &seq_id, &matched)
            kvc_prefix_get_stats(self.handle, &self.latest, sizeof(self.latest))
        self.cache.finish(status)
        try:
            PyErr_CheckSignals()  # those that came meanwhile: later, nobody would know of the sequence
        except BaseException:
            self.cache.clear(seq_id)
            raise
        return seq_id, matched

    def release(self, seq_id, const int64_t[::1] ids, const uint8_t[:, ::1] digests):
        cdef kvc_tokens tokens = describe(ids, digests)
        cdef int64_t seq = to_seq_id(seq_id)
        cdef kvc_status status
        self.cache.enter()
        with nogil:
            status = kvc_prefix_release(self.handle, seq, &tokens)
        self.cache.finish(status)

    def checkpoint(self, seq_id, const int64_t[::1] ids, const uint8_t[:, ::1] digests, const uint8_t[::1] state):
        cdef kvc_tokens tokens = describe(ids, digests)
        cdef int64_t seq = to_seq_id(seq_id), size = state.shape[0]
        cdef const uint8_t *data = &state[0] if size else NULL
        cdef kvc_status status
        self.cache.enter()
        with nogil:
            status = kvc_prefix_checkpoint(self.handle, seq, &tokens, data, size)
        self.cache.finish(status)

    def state(self, seq_id):
        """Return the state that a sequence continues from; None if it has no state."""
        cdef int64_t seq = to_seq_id(seq_id), size = 0
        cdef kvc_status status
        cdef cnp.ndarray state
        cdef void *data
        self.cache.enter()
        kvc_prefix_state(self.handle, seq, NULL, 0, &size)
        try:
            state = np.empty(size, np.uint8)
        except BaseException:
            self.cache.leave()
            raise
        data = cnp.PyArray_DATA(state)
        with nogil:
            status = kvc_prefix_state(self.handle, seq, data, size, &size)
        self.cache.finish(status)
        return memoryview(state)[:size] if size else None

    def lookup(self, const int64_t[::1] ids, const uint8_t[:, ::1] digests):
        """Return how many of the first tokens are known, and how many have rows."""
        cdef kvc_tokens tokens = describe(ids, digests)
        cdef int32_t matched = 0, with_rows = 0
        cdef kvc_status status
        self.cache.enter()
        with nogil:
            status = kvc_prefix_lookup(self.handle, &tokens, &matched, &with_rows)
        self.cache.finish(status)
        return matched, with_rows

    def pin(self, const int64_t[::1] ids, const uint8_t[:, ::1] digests):
        cdef kvc_tokens tokens = describe(ids, digests)
        cdef int32_t kept = 0
        cdef kvc_status status
        self.cache.enter()
        with nogil:
            status = kvc_prefix_pin(self.handle, &tokens, &kept)
        self.cache.finish(status)
        return kept

    def unpin(self, const int64_t[::1] ids, const uint8_t[:, ::1] digests):
        cdef kvc_tokens tokens = describe(ids, digests)
        cdef kvc_status status
        self.cache.enter()
        with nogil:
            status = kvc_prefix_unpin(self.handle, &tokens)
        self.cache.finish(status)

    def evict(self, num_tokens):
        cdef int64_t wanted = to_int(num_tokens, "num_tokens", 0, _INT64_MAX), num = 0
        cdef kvc_status status
        self.cache.enter()
        with nogil:
            status = kvc_prefix_evict(self.handle, wanted, &num)
        self.cache.finish(status)
        return num

    def clear(self):
        cdef kvc_status status
        self.cache.enter()
        with nogil:
            status = kvc_prefix_clear(self.handle)
        self.cache.finish(status)

    def forget(self, const int64_t[::1] ids, const uint8_t[:, ::1] digests, found):
        """Return how many tokens were dropped. Append arrays of the names of their full blocks to a deque.

        The last rows of the arrays are zeros. An array is in the deque before its blocks are dropped, so that neither a
        signal's handler that raises nor a lack of memory loses a name. It has room for the names of all blocks, because
        names of blocks that others drop between two calls would be lost.

        Fetches go on at once: `Doomed` of the store's client keeps what was forgotten from being added.
        """
        cdef kvc_tokens tokens = describe(ids, digests)
        cdef uint8_t[:, ::1] names
        cdef kvc_prefix_stats stats
        cdef int64_t most = 0, num_names = 0, num = 0, dropped = 0
        cdef kvc_status status
        while num_names == most:
            self.cache.enter()
            with nogil:
                kvc_prefix_get_stats(self.handle, &stats, sizeof(stats))
            self.cache.finish(KVC_OK)
            most = stats.blocks + 256
            names = np.zeros((most, KVC_NAME_BYTES), np.uint8)
            found.append(names.base)
            self.cache.enter()
            with nogil:
                status = kvc_prefix_forget(self.handle, &tokens, &names[0, 0], most, &num_names, &num)
                if status == KVC_OK:
                    status = kvc_prefix_end_forget(self.handle)
            self.cache.finish(status)
            dropped += num
        return dropped

    def end_forgets(self):
        """End what other threads were forgetting; for a forked child, which does not have them."""
        cdef kvc_status status = KVC_OK
        if self.cache.try_enter():
            with nogil:
                while status == KVC_OK:
                    status = kvc_prefix_end_forget(self.handle)
            self.cache.leave()

    def names(self, const int64_t[::1] ids, const uint8_t[:, ::1] digests):
        cdef kvc_tokens tokens = describe(ids, digests)
        cdef int64_t most = tokens.num_tokens // self.cache.block_size(), num = 0
        cdef cnp.ndarray names = np.empty((most, KVC_NAME_BYTES), np.uint8)
        cdef uint8_t *out = <uint8_t *>cnp.PyArray_DATA(names)
        cdef kvc_status status
        self.cache.enter()
        with nogil:
            status = kvc_prefix_names(self.handle, &tokens, out, most, &num)
        self.cache.finish(status)
        return [names[i].tobytes().hex() for i in range(num)]

    def take_events(self):
        """Return the kind, position and name of each event since the last call, and how many before them were lost."""
        cdef kvc_prefix_event events[64]
        cdef int64_t num = 64, num_lost = 0, lost = 0, i
        found = []
        self.cache.enter()
        try:
            while num == 64:
                with nogil:
                    kvc_prefix_take_events(self.handle, events, sizeof(kvc_prefix_event), 64, &num, &num_lost)
                lost += num_lost
                for i in range(num):
                    found.append((events[i].kind, events[i].begin, events[i].name[:KVC_NAME_BYTES].hex()))
        finally:
            self.cache.leave()
        return found, lost

    def fetch(self, const int64_t[::1] ids, const uint8_t[:, ::1] digests, int64_t max_matched, bytes names not None,
              list values not None):
        """Add blocks from the values that a store has of them.

        Return the number of tokens that they brought, how many values were looked at, and why the last of these was
        refused; None: it was not.
        """
        cdef kvc_tokens tokens = describe(ids, digests)
        cdef AtHand hand
        cdef int32_t fetched = 0
        cdef kvc_status status
        places, written = np.empty((len(values) + 1, 2), np.uintp), []
        put_at_hand(&hand, names, values, places, written)
        self.cache.enter()
        with nogil:
            status = kvc_prefix_fetch(self.handle, &tokens, max_matched, &hand.store, &fetched)
        self.cache.finish(KVC_OK if status == KVC_ERR_FORMAT else status)
        return fetched, hand.next, kvc_last_error().decode() if status == KVC_ERR_FORMAT else None

    def stats(self):
        """Return the fields of kvc_prefix_stats; of a closed cache, what was counted."""
        cdef kvc_prefix_stats *s = &self.latest
        if self.cache.try_enter():
            with nogil:
                kvc_prefix_get_stats(self.handle, s, sizeof(kvc_prefix_stats))
            self.cache.leave()
        else:
            s.blocks = s.sequences = s.checkpoints = s.checkpoint_bytes = 0
        return {
            "requests": s.requests, "hits": s.hits, "tokens": s.tokens, "matched": s.matched, "reused": s.reused,
            "blocks": s.blocks, "sequences": s.sequences, "checkpoints": s.checkpoints,
            "checkpoint_bytes": s.checkpoint_bytes,
        }


cdef kvc_tokens describe(const int64_t[::1] ids, const uint8_t[:, ::1] digests) noexcept:
    cdef kvc_tokens tokens
    tokens.struct_size = sizeof(tokens)
    tokens.num_tokens = ids.shape[0]
    tokens.ids = &ids[0] if ids.shape[0] else NULL
    tokens.digests = &digests[0, 0] if digests is not None and ids.shape[0] else NULL
    return tokens


def identity(Cache cache not None, bytes fingerprint not None):
    """Return what names of blocks stand for besides tokens and tenants."""
    cdef uint8_t found[KVC_NAME_BYTES]
    cdef kvc_status status = kvc_prefix_identity(cache.enter(), <const char *>fingerprint, len(fingerprint), found)
    cache.finish(status)
    return found[:KVC_NAME_BYTES]


def new_sequence(Cache cache not None):
    """Return an id that names nothing."""
    cdef int64_t seq_id
    cdef kvc_cache *handle = cache.enter()
    with nogil:
        seq_id = kvc_new_sequence(handle)
    cache.leave()
    return seq_id


def take_new_blocks(Cache cache not None, found):
    """Append the prefix (`Prefix.user`), name and id of each block that is new to stores to a deque.

    Here, and not in Python, because a signal's handler that raises would come between the two.
    """
    cdef kvc_new_block blocks[64]
    cdef int64_t num = 64, i
    cdef kvc_cache *handle = cache.enter()
    try:
        while num == 64:
            with nogil:
                kvc_take_new_blocks(handle, blocks, sizeof(kvc_new_block), 64, &num)
            for i in range(num):
                found.append((<size_t>blocks[i].user, blocks[i].name[:KVC_NAME_BYTES].hex(), blocks[i].id))
    finally:
        cache.leave()


def pack_block(Cache cache not None, int64_t block_id, bytes name not None, bytes stored):
    """Return the value of a block, joined with its stored value. `stored` is None if the store has no value.

    Return b"" if the stored value has all of it, and None if the block is gone.
    """
    cdef AtHand hand
    cdef kvc_cache *handle
    cdef int64_t size = 0
    cdef kvc_status status
    values, written = [] if stored is None else [stored], []
    places = np.empty((2, 2), np.uintp)
    put_at_hand(&hand, name if values else b"", values, places, written)
    handle = cache.enter()
    with nogil:
        status = kvc_store_block(handle, block_id, &hand.store, &size)
    cache.finish(status)
    return written[0] if written else b"" if size else None
