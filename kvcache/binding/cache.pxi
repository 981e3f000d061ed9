"""The cache: sequences, edits, memory and copies of rows, each a call of the C core."""


@cython.final
@cython.no_gc_clear  # __dealloc__ frees the core's cache, which may call `callbacks` until then
cdef class Cache(_CallCounter):
    cdef kvc_cache *handle  # NULL: the cache is closed
    cdef kvc_layer *layers
    cdef readonly int32_t num_layers
    cdef Callbacks callbacks

    def __cinit__(self, list layers, int64_t max_seq_len, int64_t max_sequences, int64_t capacity, int64_t max_bytes,
                  int32_t block_size, int32_t num_threads, Cache original=None):
        """Make a new cache, or a copy of `original`, which was made with the same arguments."""
        cdef kvc_cache *other
        cdef kvc_config config
        cdef kvc_status status
        cdef int32_t i
        cdef dict frequencies = {}
        self.num_layers = len(layers)
        self.callbacks = Callbacks(self.num_layers) if original is None else original.callbacks
        self.layers = <kvc_layer *>PyMem_Calloc(self.num_layers, sizeof(kvc_layer))
        if self.layers == NULL:
            raise MemoryError
        for i in range(self.num_layers):
            self.read_layer(i, layers[i], frequencies)
        memset(&config, 0, sizeof(config))
        config.struct_size = sizeof(kvc_config)
        config.layers = self.layers
        config.layer_size = sizeof(kvc_layer)
        config.num_layers = self.num_layers
        config.block_size = block_size
        config.max_seq_len = max_seq_len
        config.max_sequences = max_sequences
        config.capacity = capacity
        config.max_bytes = max_bytes
        config.num_threads = num_threads
        config.poll, config.poll_user = handle_signals, <void *>self.callbacks
        if original is None:
            with nogil:
                status = kvc_cache_new(&config, &self.handle)
        else:
            other = original.enter()
            with nogil:
                status = kvc_cache_clone(other, &self.handle)
            original.leave()
        check(status)
        for i in range(self.num_layers):
            self.layers[i].rope.inv_freq = NULL  # the core has copied the frequencies

    cdef int read_layer(self, int32_t i, tuple description, dict kept) except -1:
        """Fill in a layer from its tuple (see _core.pyi); keep the frequencies of each rope, once for its layers."""
        cdef kvc_layer *layer = &self.layers[i]
        cdef double[::1] frequencies
        shapes, types, transforms, layer.value_in_key, layer.share, layer.sketch_bits, policy, rope = description
        layer.num_kv_heads, layer.k_dim, layer.v_dim = shapes
        layer.k_type, layer.v_type = types
        layer.k_transform, layer.v_transform = transforms
        layer.policy.kind, layer.policy.window, layer.policy.num_sink_tokens = policy[:3]
        layer.policy.attention_chunk_size, layer.policy.resume_window, layer.policy.max_len = policy[3:6]
        layer.policy.stride = policy[6]
        if rope is None:
            layer.rope.kind = KVC_ROPE_UNKNOWN
        elif rope is False:
            layer.rope.kind = KVC_ROPE_NONE
        elif callable(rope):
            self.callbacks.by_layer[i] = rope
            layer.rope.kind, layer.rope.shift = KVC_ROPE_FUNCTION, shift_keys
            layer.rope.user = <void *>self.callbacks
        else:
            layer.rope.kind = KVC_ROPE_FREQUENCIES
            inv_freq, layer.rope.interleaved, layer.rope.first_dim = rope
            if id(inv_freq) not in kept:
                kept[id(inv_freq)] = np.array(inv_freq, np.float64)
            frequencies = kept[id(inv_freq)]
            layer.rope.num_freqs, layer.rope.inv_freq = <int32_t>frequencies.shape[0], &frequencies[0]
        return 0

    def __dealloc__(self):
        with nogil:
            kvc_cache_free(self.handle)  # no batch or hold is left: it would have kept this object alive
        PyMem_Free(self.layers)

    cpdef int check_open(self) except -1:
        """Raise if the cache is closed. Call it before arguments are read, so that its error comes first."""
        with cython.critical_section(self):
            self.locked_check()
        return 0

    cdef int locked_check(self) except -1:
        if self.handle == NULL:
            raise ValueError("the cache is closed")
        if self.ending:
            raise CacheBusyError("another thread is closing the cache: close it when its other calls have returned")
        return 0

    cdef kvc_cache *enter(self) except NULL:
        """Return the handle, which is valid until leave() or finish(); _core.pyx says what may be done in between."""
        with cython.critical_section(self):
            self.locked_check()
            self.locked_count()
            return self.handle

    cdef bint try_enter(self) noexcept:
        """Count a call, as enter() does, unless the cache is closed; return whether it is open."""
        with cython.critical_section(self):
            if self.handle == NULL or self.ending:
                return False
            self.locked_count()
            return True

    cdef int finish(self, kvc_status status) except -1:
        """End a call, and raise for its status."""
        self.leave()
        return self.callbacks.check(status)

    cdef int finish_edit(self, kvc_status status, object edits, object seq_id, object source, bint is_whole) except -1:
        """End a call, and raise for its status; append what it did to the follower's list (kvcache.follower), if any.

        Here, and not in Python, because a signal's handler that raises would come between the two.
        """
        self.finish(status)
        if edits is not None:
            edits.append((seq_id, source, is_whole))
        return 0

    def close(self):
        cdef kvc_cache *handle
        cdef kvc_status status
        with cython.critical_section(self):
            if self.locked_in_use():
                raise CacheBusyError("a call in another thread is using the cache; close it when that has returned")
            self.ending = True
            handle = self.handle
        with nogil:
            status = kvc_cache_free(handle)
        with cython.critical_section(self):
            self.ending = False
            if status == KVC_OK:
                self.handle = NULL
        check(status)

    @property
    def closed(self):
        with cython.critical_section(self):
            return self.handle == NULL

    # ---- inspecting sequences

    cdef int64_t count_rows(self, int64_t seq_id, int32_t layer) except -1:
        cdef int64_t rows
        cdef kvc_cache *cache = self.enter()
        with nogil:
            rows = kvc_seq_len(cache, seq_id, layer)
        self.leave()
        return rows

    cdef int32_t find_next(self, int64_t seq_id) except -1:
        cdef int32_t position
        cdef kvc_cache *cache = self.enter()
        with nogil:
            position = kvc_next_position(cache, seq_id)
        self.leave()
        return position

    def seq_len(self, seq_id, layer):
        cdef int64_t seq = to_seq_id(seq_id)
        return self.count_rows(seq, -1 if layer is None else to_layer(layer, self.num_layers))

    def position_range(self, seq_id, layer):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = -1 if layer is None else to_layer(layer, self.num_layers), first = -1, last = -1
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_position_range(cache, seq, at, &first, &last)
        self.finish(status)
        return first, last

    def next_position(self, seq_id):
        return self.find_next(to_seq_id(seq_id))

    def can_resume(self, seq_id, position):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = to_position(position, "position"), can
        cdef kvc_cache *cache = self.enter()
        with nogil:
            can = kvc_can_resume(cache, seq, at)
        self.leave()
        return can != 0

    def exact_to(self, seq_id):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t position
        cdef kvc_cache *cache = self.enter()
        with nogil:
            position = kvc_exact_to(cache, seq)
        self.leave()
        return position

    def mark_inexact(self, seq_id, position):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = to_position(position, "position")
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_mark_inexact(cache, seq, at)
        self.finish(status)

    def sequences(self):
        cdef int64_t max_ids = -1, count = 0
        cdef kvc_cache *cache
        cdef int64_t[::1] ids
        cdef int64_t *to
        while max_ids < count:
            max_ids = max(count, 8)
            found = np.empty(max_ids, np.int64)
            ids = found
            to = &ids[0]
            cache = self.enter()
            with nogil:
                count = kvc_sequences(cache, to, max_ids)
            self.leave()
        return found[:count].tolist()

    def positions(self, seq_id, layer):
        cdef int64_t seq = to_seq_id(seq_id), max_positions = -1, count = 0
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef kvc_cache *cache
        cdef int32_t[::1] positions
        cdef int32_t *to
        while max_positions < count:
            max_positions = max(count, 8)
            found = np.empty(max_positions, np.int32)
            positions = found
            to = &positions[0]
            cache = self.enter()
            with nogil:
                count = kvc_positions(cache, seq, at, to, max_positions)
            self.leave()
        return found[:count]

    # ---- editing sequences

    def clear(self, seq_id, edits=None):
        cdef bint every = seq_id is None
        cdef int64_t seq = 0 if every else to_seq_id(seq_id)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_clear(cache) if every else kvc_clear_sequence(cache, seq)
        self.finish_edit(status, edits, None if every else seq, None, True)

    def keep(self, seq_id, edits=None):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_keep(cache, seq)
        self.finish_edit(status, edits, None, seq, False)

    def copy_prefix(self, src, dst, length, edits=None):
        cdef int64_t source = to_seq_id(src, "src"), target = to_seq_id(dst, "dst")
        cdef int32_t end = to_position(length, "length")
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_copy_prefix(cache, source, target, end)
        self.finish_edit(status, edits, target, source, True)

    def fork(self, src, dst, edits=None):
        cdef int64_t source = to_seq_id(src, "src"), target = to_seq_id(dst, "dst")
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_fork(cache, source, target)
        self.finish_edit(status, edits, target, source, True)

    def share_range(self, src, dst, begin, end, edits=None):
        cdef int64_t source = to_seq_id(src, "src"), target = to_seq_id(dst, "dst")
        cdef int32_t low = to_position(begin, "begin"), high = to_end(end, low)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_share(cache, source, target, low, high)
        self.finish_edit(status, edits, target, source, False)

    def remove(self, seq_id, begin, end, shift, edits=None):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t low = to_position(begin, "begin"), high = to_end(end, low)
        cdef bint shifts = flag(shift, "shift")
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_remove(cache, seq, low, high, shifts)
        self.finish_edit(status, edits, seq, None, False)

    def keep_positions(self, seq_id, positions, edits=None):
        """Keep these positions, in any order, also given twice."""
        cdef int64_t seq = to_seq_id(seq_id)
        cdef cnp.ndarray kept = to_int_array(positions, "positions", cnp.NPY_INT32, 0, _MAX_POSITION, 0)
        cdef const int32_t *listed
        cdef int64_t number
        cdef kvc_status status
        cdef kvc_cache *cache
        if not (kept[1:] > kept[:-1]).all():
            kept = np.unique(kept)
        listed, number = <const int32_t *>cnp.PyArray_DATA(kept), cnp.PyArray_DIM(kept, 0)
        cache = self.enter()
        with nogil:
            status = kvc_keep_positions(cache, seq, listed, number)
        self.finish_edit(status, edits, seq, None, number == 0)

    def shift(self, seq_id, begin, end, delta, edits=None):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t low = to_position(begin, "begin"), high = to_end(end, low)
        cdef int32_t by = <int32_t>to_int(delta, "delta", -_INT32_MAX - 1, _INT32_MAX)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_shift(cache, seq, low, high, by)
        self.finish_edit(status, edits, seq, None, False)

    def divide(self, seq_id, begin, end, divisor, edits=None):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t low = to_position(begin, "begin"), high = to_end(end, low)
        cdef int32_t by = <int32_t>to_int(divisor, "divisor", 1, _INT32_MAX)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_divide(cache, seq, low, high, by)
        self.finish_edit(status, edits, seq, None, False)

    def truncate(self, seq_id, length, edits=None):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t end = to_position(length, "length")
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_truncate(cache, seq, end)
        self.finish_edit(status, edits, seq, None, end == 0)

    def reserve(self, num_tokens, seq_id):
        cdef int64_t number = to_int(num_tokens, "num_tokens", 1, _INT64_MAX), seq = to_seq_id(seq_id)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_reserve(cache, seq, number)
        self.finish(status)

    def room(self, seq_id):
        cdef int64_t number = 0, seq = to_seq_id(seq_id)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_room(cache, seq, &number)
        self.finish(status)
        return number

    def compact(self):
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_compact(cache)
        self.finish(status)

    def inject(self, seq_id, layer, begin, k, v, skip_missing, edits=None):
        cdef int64_t seq = to_seq_id(seq_id), num_replaced = 0
        cdef int32_t at = to_layer(layer, self.num_layers), low = to_position(begin, "begin"), high = 0
        cdef kvc_rows_in rows
        cdef kvc_cache *cache
        cdef kvc_status status
        _owners = read_replacement(&self.layers[at], k, v, low, &rows, &high)
        rows.skip_missing, rows.num_replaced = flag(skip_missing, "skip_missing"), &num_replaced
        cache = self.enter()
        with nogil:
            status = kvc_inject(cache, seq, at, low, high, &rows)
        self.finish_edit(status, edits, seq, None, False)
        return num_replaced

    # ---- memory

    def stats(self):
        cdef kvc_stats s
        cdef kvc_cache *cache
        memset(&s, 0, sizeof(s))
        cache = self.enter()
        with nogil:
            kvc_get_stats(cache, &s, sizeof(s))
        self.leave()
        return {
            "batches": s.batches, "aborted": s.aborted, "tokens": s.tokens, "rows_expired": s.rows_expired,
            "rows_moved": s.rows_moved, "rows_copied": s.rows_copied, "compactions": s.compactions,
            "blocks_opened": s.blocks_opened, "blocks_reused": s.blocks_reused, "blocks_returned": s.blocks_returned,
            "live_slots": s.live_slots, "wasted_slots": s.wasted_slots, "blocks_in_use": s.blocks_in_use,
            "blocks_free": s.blocks_free, "rows_evicted": s.rows_evicted, "retained": s.retained,
            "evictable_slots": s.evictable_slots,
        }

    def blocks(self, layer):
        """Return a list of blocks and a list of runs, as tuples; a run's begins with its block and its sequence.

        That is None for rows that a prefix keeps.
        """
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef int64_t num_blocks = 0, num_runs = 0, max_blocks = -1, max_runs = -1, i
        cdef cnp.ndarray block_bytes = None, run_bytes = None
        cdef kvc_block_info *b = NULL
        cdef kvc_run_info *r = NULL
        cdef kvc_status status
        cdef kvc_cache *cache
        while max_blocks < num_blocks or max_runs < num_runs:
            max_blocks, max_runs = num_blocks, num_runs
            block_bytes = np.empty(max_blocks * sizeof(kvc_block_info), np.uint8)
            run_bytes = np.empty(max_runs * sizeof(kvc_run_info), np.uint8)
            b, r = <kvc_block_info *>cnp.PyArray_DATA(block_bytes), <kvc_run_info *>cnp.PyArray_DATA(run_bytes)
            cache = self.enter()
            with nogil:
                status = kvc_blocks(cache, at, b, sizeof(kvc_block_info), max_blocks, &num_blocks,
                                    r, sizeof(kvc_run_info), max_runs, &num_runs)
            self.finish(status)
        return (
            [(b[i].num_slots, b[i].filled, b[i].live, b[i].references, b[i].resident, b[i].is_held != 0, b[i].bytes)
             for i in range(num_blocks)],
            [(r[i].block, None if r[i].is_kept else r[i].seq_id, r[i].slot, r[i].count, r[i].position, r[i].delta,
              r[i].in_batch != 0) for i in range(num_runs)],
        )

    def nbytes(self):
        cdef int64_t size
        cdef kvc_cache *cache = self.enter()
        with nogil:
            size = kvc_nbytes(cache)
        self.leave()
        return size

    def block_size(self):
        cdef int32_t slots = kvc_block_size(self.enter())
        self.leave()
        return slots

    def capacity(self):
        cdef int64_t slots = kvc_capacity(self.enter())
        self.leave()
        return None if slots < 0 else slots

    def capacity_bytes(self):
        cdef int64_t size = kvc_capacity_bytes(self.enter())
        self.leave()
        return None if size < 0 else size

    def utilization(self):
        cdef double part
        cdef kvc_cache *cache = self.enter()
        with nogil:
            part = kvc_utilization(cache)
        self.leave()
        return part

    def validate(self):
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_validate(cache)
        self.finish(status)

    # ---- reading rows

    cdef tuple copy_rows(self, Batch batch, int32_t layer, int64_t seq_id, object first, int32_t type, bint raw,
                         bint want_k, bint want_v):
        """Copy the rows from `first` on, including an open batch's. Copy again if their number changed meanwhile."""
        cdef kvc_status status = KVC_OK
        cdef kvc_rows_out out
        cdef int64_t stored = self.count_rows(seq_id, layer), rows = -1, begin = 0
        while rows != stored - begin:
            begin = to_int(first, "first", 0, stored)
            rows = stored - begin
            arrays = new_rows(&self.layers[layer], rows, type, raw, want_k, want_v, &out)
            out.num_stored = &stored
            status = self.copy_to(batch, layer, seq_id, begin, rows, &out)
        check(status)
        return arrays

    cdef kvc_status copy_to(self, Batch batch, int32_t layer, int64_t seq_id, int64_t first, int64_t rows,
                            kvc_rows_out *out) except? KVC_OK:
        cdef kvc_status status
        cdef kvc_cache *cache = enter_both(self, batch, &out.batch)
        with nogil:
            status = kvc_gather(cache, seq_id, layer, first, rows, out)
        leave_both(self, batch)
        return status

    def get(self, seq_id, layer, position):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = to_layer(layer, self.num_layers), found = -1
        cdef int32_t where = to_position(position, "position")
        cdef kvc_cache *cache
        cdef kvc_status status
        cdef kvc_rows_out out
        k, v = new_rows(&self.layers[at], 1, KVC_F32, False, True, True, &out)
        out.positions = &found
        cache = self.enter()
        with nogil:
            status = kvc_extract(cache, seq, at, where, where + (where <= _MAX_POSITION), &out)
        self.finish(status)
        return None if found < 0 else (k[:, 0], v[:, 0])

    def gather(self, seq_id, layer, first, dtype, out, raw):
        cdef int64_t seq = to_seq_id(seq_id), begin, rows
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef kvc_rows_out to
        if out is None:
            return self.copy_rows(None, at, seq, first, TYPES["f32" if dtype is None else dtype], raw, True, True)
        if dtype is not None:
            raise ValueError(f"dtype={dtype!r}: rows are converted to the type of out; leave it out")
        rows = self.count_rows(seq, at)
        begin = to_int(first, "first", 0, rows)
        _owner = read_rows_out(&self.layers[at], out, rows - begin, raw, &rows, &to)
        check(self.copy_to(None, at, seq, begin, rows, &to))
        return out

    def extract(self, seq_id, layer, begin, end, raw):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef int32_t low = to_position(begin, "begin"), high = to_position(end, "end", low)
        cdef kvc_cache *cache
        cdef kvc_status status
        cdef kvc_rows_out out
        self.check_open()
        arrays = new_rows(&self.layers[at], rows_below(&self.layers[at], high) - rows_below(&self.layers[at], low),
                          KVC_F32, flag(raw, "raw"), True, True, &out)
        cache = self.enter()
        with nogil:
            status = kvc_extract(cache, seq, at, low, high, &out)
        self.finish(status)
        return arrays

    # ---- a forward pass

    cdef cnp.ndarray find_positions(self, cnp.ndarray seq_ids):
        """Return the positions at which tokens of these sequences would go on now."""
        positions = np.empty(len(seq_ids), np.int32)
        for seq_id in set(seq_ids.tolist()):
            tokens = np.flatnonzero(seq_ids == seq_id)
            positions[tokens] = self.find_next(seq_id) + np.arange(len(tokens))
        return positions

    cdef cnp.ndarray flag_layers(self, object layers, str name):
        """Return an array that flags the layers of a list."""
        cdef cnp.ndarray given = to_int_array(layers, name, cnp.NPY_INT32, -_INT32_MAX - 1, _INT32_MAX)
        flags = np.zeros(self.num_layers, np.uint8)
        for i, layer in enumerate(given.tolist()):
            if not 0 <= layer < self.num_layers:
                raise IndexError(f"{name}[{i}]={layer}: the layers are 0 to {self.num_layers - 1}")
            flags[layer] = 1
        return flags

    def begin(self, n, positions, seq_ids, parents, timeout, decide, replaced):
        """Begin a batch. `decide` returns for each token whether its sequence is unstored; None: all are stored."""
        cdef Batch batch = Batch.__new__(Batch)
        cdef kvc_begin_args args
        cdef kvc_status status
        cdef kvc_cache *cache
        cdef void *found
        cdef cnp.ndarray unstored = None, replaced_layers = None
        self.check_open()
        batch.cache = self
        _owner = batch.read_tokens(n, positions, seq_ids, parents, &args)
        if replaced is not None:
            replaced_layers = self.flag_layers(replaced, "replaced")
            args.replaced = <const uint8_t *>cnp.PyArray_DATA(replaced_layers)
        args.timeout_ms = to_timeout(timeout)
        if decide is not None:
            if n is not None:  # decide with the probable positions: other threads may still edit the sequences
                batch.positions[:] = self.find_positions(batch.get_seq_ids())
            unstored = decide(batch.positions, batch.get_seq_ids())
        if unstored is not None:
            args.unstored = <const uint8_t *>cnp.PyArray_DATA(unstored)
        found = cnp.PyArray_DATA(batch.positions)
        cache = self.enter()
        with nogil:
            status = kvc_begin_with(cache, &args, &batch.handle)
            if status == KVC_OK and args.positions == NULL:
                memcpy(found, kvc_batch_positions(batch.handle), args.num_tokens * sizeof(int32_t))
        self.finish(status)
        cnp.PyArray_CLEARFLAGS(batch.positions, cnp.NPY_ARRAY_WRITEABLE)
        return batch
