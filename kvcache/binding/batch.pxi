"""The batch: the tokens of a forward pass, whose rows are put and attended over layer by layer."""

# The arguments that put() passes to C, and descriptions of its arrays.
cdef struct PutRows:
    kvc_put_args args
    Array k
    Array v


@cython.final
@cython.no_gc_clear  # __dealloc__ needs the cache
cdef class Batch(_CallCounter):
    cdef readonly Cache cache
    cdef kvc_batch *handle  # NULL: the batch has ended
    cdef bint committed
    cdef readonly int32_t num_tokens
    cdef readonly cnp.ndarray positions
    cdef cnp.ndarray seq_ids  # None: all tokens are of sequence 0
    cdef list writable  # weak references to writable views of the batch's slots

    def __cinit__(self):
        self.writable = []

    def __dealloc__(self):
        # `ending` here means that the process forked while another thread was ending the batch: the handle may be free.
        if self.handle != NULL and not self.ending:
            self.cache.count_call()
            with nogil:
                kvc_abort(self.handle)
            self.cache.leave()

    cdef int check_open(self) except -1:
        """Raise if the batch has ended. Call it before arguments are read, so that its error comes first."""
        with cython.critical_section(self):
            self.locked_check()
        return 0

    cdef int locked_check(self) except -1:
        if self.handle == NULL:
            what = "committed: read its rows from the KVCache, and" if self.committed else "aborted:"
            raise ValueError(f"the batch has ended: it was {what} begin another with KVCache.batch()")
        if self.ending:
            raise CacheBusyError("another thread is ending the batch: end it when its other calls have returned")
        return 0

    cdef kvc_batch *enter(self) except NULL:
        """Return the handle, which is valid until leave() or finish(); _core.pyx says what may be done in between."""
        with cython.critical_section(self):
            self.locked_check()
            self.locked_count()
            return self.handle

    cdef int finish(self, kvc_status status) except -1:
        """End a call, and raise for its status."""
        self.leave()
        return self.cache.callbacks.check(status)

    cdef kvc_batch *begin_ending(self) except? NULL:
        """Return the handle, which is this call's until end(); raise if another uses it. NULL: the batch has ended."""
        with cython.critical_section(self):
            if self.handle == NULL:
                return NULL
            if self.locked_in_use():
                raise CacheBusyError("a call in another thread is using the batch; end it when that has returned")
            self.ending = True
            return self.handle

    cdef int end(self, kvc_status status, bint committed) except -1:
        """Raise for the status of the call that was to end the batch, or note that it has ended."""
        with cython.critical_section(self):
            self.ending = False
            if status == KVC_OK:
                self.handle = NULL
                self.committed = committed
        check(status)
        return self.end_writing()

    cdef bint has_ended(self) noexcept:
        with cython.critical_section(self):
            return self.handle == NULL

    cdef object read_tokens(self, object n, object positions, object seq_ids, object parents, kvc_begin_args *args):
        """Describe the new tokens; return the array of parents, which C reads. The batch keeps the other arrays."""
        cdef cnp.npy_intp size
        cdef cnp.ndarray parent_tokens = None
        memset(args, 0, sizeof(kvc_begin_args))
        args.struct_size = sizeof(kvc_begin_args)
        if seq_ids is not None:
            self.seq_ids = to_int_array(seq_ids, "seq_ids", cnp.NPY_INT64, _INT64_MIN, _INT64_MAX)
            args.seq_ids = <const int64_t *>cnp.PyArray_DATA(self.seq_ids)
        if n is not None:
            size = to_int(n, "n", 1, KVC_MAX_BATCH)
            if seq_ids is not None and cnp.PyArray_DIM(self.seq_ids, 0) != size:
                raise ValueError(f"len(seq_ids)={len(self.seq_ids)}: must be n, which is {size}")
            self.positions = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT32, 0)
        else:
            self.positions = to_int_array(positions, "positions", cnp.NPY_INT32, 0, _MAX_POSITION)
            args.positions = <const int32_t *>cnp.PyArray_DATA(self.positions)
            to_int(cnp.PyArray_DIM(self.positions, 0), "len(positions)", 1, KVC_MAX_BATCH)
        size = cnp.PyArray_DIM(self.positions, 0)
        if seq_ids is not None and cnp.PyArray_DIM(self.seq_ids, 0) != size:
            raise ValueError(f"len(seq_ids)={len(self.seq_ids)}: must be len(positions), which is {size}")
        if parents is not None:
            parent_tokens = to_int_array(parents, "parents", cnp.NPY_INT32, -1, _INT32_MAX)
            if cnp.PyArray_DIM(parent_tokens, 0) != size:
                raise ValueError(f"len(parents)={len(parent_tokens)}: must be one for each token, and there are {size}")
            args.parents = <const int32_t *>cnp.PyArray_DATA(parent_tokens)
        args.num_tokens = self.num_tokens = <int32_t>size
        return parent_tokens

    def get_seq_ids(self):
        if self.seq_ids is not None:
            return self.seq_ids
        zeros = np.zeros(self.num_tokens, np.int64)
        zeros.flags.writeable = False
        return zeros

    @property
    def ended(self):
        return self.has_ended()

    cdef int32_t to_first(self, object first, int64_t tokens) except -1:
        """Convert the index of the first of `tokens` tokens of the batch, and check that the batch has them."""
        cdef int64_t number
        if is_plain(first, 0, self.num_tokens - tokens, &number):
            return <int32_t>number
        first = to_index(first, "first")
        if 0 <= first <= self.num_tokens - tokens:
            return first
        raise IndexError(f"first={show(first)} with {tokens} tokens: the batch has {self.num_tokens}")

    cdef int64_t only_sequence(self) except? -1:
        """Return the sequence of the batch, or raise if there are several."""
        if self.seq_ids is None:
            return 0
        seq_ids = set(self.seq_ids.tolist())
        if len(seq_ids) > 1:
            raise ValueError(f"seq_id=None: the batch has {len(seq_ids)} sequences; give put the seq_id of the one "
                             "whose rows these are")
        return self.seq_ids[0]

    cdef int read_cross(self, int32_t layer, object first, object seq_id, int layout, PutRows *rows) except -1:
        """Check rows for a cross-attention layer, which belong to a sequence and to no token of the batch."""
        cdef int64_t number, tokens = count_tokens(&rows.k, layout)
        if not is_plain(first, 0, 0, &number) and to_index(first, "first") != 0:
            raise ValueError(f"first={show(first)}: must be 0 in layer {layer}, whose policy is CrossAttention: what "
                             "is put there is all that the sequence has")
        if layout == BHTD and rows.k.shape[0] != 1:
            raise ValueError(f"k: of {rows.k.shape[0]} sequences, where layer {layer}, whose policy is CrossAttention, "
                             "takes the rows of one at a time; call put() for each, with its seq_id")
        if tokens > _INT32_MAX:
            raise ValueError(f"k: {tokens} rows, where {_INT32_MAX} are the most there may be")
        rows.args.seq_id = self.only_sequence() if seq_id is None else to_seq_id(seq_id)
        return 0

    cdef int read_strided(self, int32_t layer, object first, int64_t tokens, int layout, PutRows *rows) except -1:
        """Find the tokens of the rows of a layer with a stride: `tokens` of them, or as many as there are rows for.

        The second is meant by -1. In lock step, these are all tokens up to the end of the batch.
        """
        cdef int32_t stride = self.cache.layers[layer].policy.stride, left, inner, i
        cdef int64_t given = count_tokens(&rows.k, layout), sequences = rows.k.shape[0] if layout == BHTD else 1
        rows.args.first = self.to_first(first, max(tokens, 0))
        left = self.num_tokens - rows.args.first
        cdef const int32_t *positions = <const int32_t *>cnp.PyArray_DATA(self.positions) + rows.args.first
        if tokens < 0:
            tokens = left if layout == BHTD else kvc_tokens_with_rows(positions, left, stride, given)
        if sequences == 0 or tokens % sequences:
            raise ValueError(f"k: of {sequences} sequences, and there are {tokens} tokens")
        inner = <int32_t>(tokens // sequences)
        expected = [kvc_count_rows_at(positions + i * inner, inner, stride) for i in range(sequences)]
        if any(num != given // sequences for num in expected):
            raise ValueError(f"k: of {show_tokens(&rows.k, layout)} rows, where layer {layer}, of stride {stride}, "
                             f"takes one for each position p with (p + 1) % {stride} == 0: "
                             f"{', '.join(map(str, expected[:8]))}")
        rows.args.num_tokens = <int32_t>tokens
        if layout == BHTD:
            rows.args.tokens_per_sequence = inner
        return 0

    cdef tuple read_put(self, int32_t layer, object k, object v, object first, object seq_id, int layout,
                        PutRows *rows, int64_t tokens=-1):
        """Describe new rows of some tokens; return the objects that keep their memory.

        tokens: their number; -1: as many as there are rows for.
        """
        cdef kvc_layer *shape = &self.cache.layers[layer]
        cdef kvc_put_args *args = &rows.args
        if shape.policy.kind == KVC_CROSS and layout == THD:
            k, v = fold_encoder_rows(k, v, shape)
        cdef int token = TOKEN_AXIS[layout], head = HEAD_AXIS[layout]
        owners = read_pair(shape, k, v, layout, &rows.k, &rows.v)
        memset(args, 0, sizeof(kvc_put_args))
        args.struct_size = sizeof(kvc_put_args)
        if shape.policy.kind == KVC_CROSS:
            self.read_cross(layer, first, seq_id, layout, rows)
        elif seq_id is not None:
            raise ValueError(f"seq_id={show(seq_id)}: is for CrossAttention, and layer {layer} has another policy: "
                             "whose tokens these are, the batch says")
        elif shape.policy.stride > 1:
            self.read_strided(layer, first, tokens, layout, rows)
        else:
            args.first = self.to_first(first, count_tokens(&rows.k, layout))
        if shape.policy.stride <= 1:
            args.num_tokens = <int32_t>count_tokens(&rows.k, layout)
        owners = make_pair_readable(&rows.k, &rows.v, owners)
        args.k, args.k_type = rows.k.data, rows.k.type
        args.k_token_stride, args.k_head_stride = rows.k.strides[token], rows.k.strides[head]
        if stores_values(shape):
            args.v, args.v_type = rows.v.data, rows.v.type
            args.v_token_stride, args.v_head_stride = rows.v.strides[token], rows.v.strides[head]
        if layout == BHTD:
            if shape.policy.stride <= 1:
                args.tokens_per_sequence = <int32_t>rows.k.shape[token]
            args.k_batch_stride = rows.k.strides[0]
            if stores_values(shape):
                args.v_batch_stride = rows.v.strides[0]
        return owners

    def put(self, layer, k, v, first, seq_id, str layout):
        self.check_open()
        cdef int32_t at = to_layer(layer, self.cache.num_layers)
        cdef PutRows rows
        cdef kvc_batch *batch
        cdef kvc_status status
        _owners = self.read_put(at, k, v, first, seq_id, to_layout(layout), &rows)
        if not rows.args.num_tokens:
            return  # no token gets a row
        batch = self.enter()
        with nogil:
            status = kvc_put(batch, at, &rows.args)
        self.finish(status)

    def slots(self, layer, first):
        self.check_open()
        cdef int32_t at = to_layer(layer, self.cache.num_layers)
        cdef int32_t token = self.to_first(first, 1)
        cdef Slots slots = Slots.__new__(Slots)
        cdef kvc_status status
        cdef kvc_batch *batch
        cdef kvc_layer *shape = &self.cache.layers[at]
        slots.cache = self.cache
        batch = self.enter()
        with nogil:
            status = kvc_slots(batch, at, token, &slots.span, sizeof(kvc_span), &slots.handle)
        self.finish(status)
        if slots.span.k_scales or slots.span.v_scales:
            name = type_name(shape.k_type if slots.span.k_scales else shape.v_type)
            raise NotSupportedError(f"layer {at} stores {name}, whose scales lie apart: put() the rows")
        views = (view_rows(shape, &slots.span, slots.span.num_rows, False, True, slots),
                 view_rows(shape, &slots.span, slots.span.num_rows, True, True, slots))
        self.writable.extend([weakref.ref(view, self.writable.remove) for view in views])
        if self.has_ended():  # another thread ended the batch while the views were made
            self.end_writing()
        return views

    def written(self, layer, first, num_tokens):
        self.check_open()
        cdef int32_t at = to_layer(layer, self.cache.num_layers)
        cdef int32_t tokens = <int32_t>to_int(num_tokens, "num_tokens", 1, _INT32_MAX)
        cdef int32_t token = self.to_first(first, tokens)
        cdef kvc_status status
        cdef kvc_batch *batch = self.enter()
        with nogil:
            status = kvc_written(batch, at, token, tokens)
        self.finish(status)

    cdef tuple read_query(self, int32_t layer, object q, object first, object scale, object softcap, object sinks,
                          object alibi, object non_causal, object masked, object select, object precision,
                          object prior, int layout, object out, Query *query):
        """Describe a query; return the objects that keep the memory it points to, the result's last."""
        cdef kvc_layer *shape = &self.cache.layers[layer]
        cdef kvc_plan_args *plan = &query.plan
        cdef kvc_attend_args *args = &query.args
        cdef int token = TOKEN_AXIS[layout], head = HEAD_AXIS[layout]
        cdef cnp.ndarray flags = None, ranges
        memset(query, 0, sizeof(Query))
        plan.struct_size, args.struct_size = sizeof(kvc_plan_args), sizeof(kvc_attend_args)
        q_owner = read_rows(q, "q", shape.num_kv_heads, True, shape.k_dim, layout, &query.q)
        plan.first = self.to_first(first, count_tokens(&query.q, layout))
        q_owner = make_readable(&query.q, q_owner)
        plan.layer, plan.num_tokens = layer, <int32_t>count_tokens(&query.q, layout)
        plan.num_heads = <int32_t>query.q.shape[head]
        args.q, args.q_type = query.q.data, query.q.type
        args.q_token_stride, args.q_head_stride = query.q.strides[token], query.q.strides[head]
        args.scale = to_scale(scale, layer, shape)
        if softcap is not None:
            args.softcap = to_factor(softcap, "softcap", True)
        if sinks is not None:
            sinks = read_factors(sinks, "sinks", plan.num_heads, &query.sinks)
            args.sinks = <const float *>query.sinks.data
        if alibi is not None:
            alibi = read_factors(alibi, "alibi", plan.num_heads, &query.alibi)
            args.alibi = <const float *>query.alibi.data
        if non_causal is not None:
            flags = to_flags(non_causal, plan.first, plan.num_tokens, self.num_tokens)
            if flags is not None:
                plan.non_causal = <const uint8_t *>cnp.PyArray_DATA(flags)
        ranges = to_masked(masked, &plan.masked, &plan.masked_size, &plan.num_masked)
        if select is not None:
            plan.select_rows = <int32_t>to_int(select, "select", 1, _INT32_MAX)
            if not shape.sketch_bits:
                raise NotSupportedError(f"select={select}: layer {layer} has no sketches: make it with sketch=True")
        plan.precision = to_precision(precision)
        before = read_prior(prior, shape.v_dim, layout, query)
        out = read_out(out, q, query.prior_out.type if before else query.q.type, shape.v_dim, layout, &query.q,
                       &query.out)
        args.out, args.out_is_f32 = query.out.data, query.out.type == KVC_F32
        args.out_token_stride, args.out_head_stride = query.out.strides[token], query.out.strides[head]
        if layout == BHTD:
            args.tokens_per_sequence = <int32_t>query.q.shape[2]
            args.q_batch_stride, args.out_batch_stride = query.q.strides[0], query.out.strides[0]
        return q_owner, sinks, alibi, flags, ranges, before, out

    def attend(self, layer, q, k, v, first, scale, softcap, sinks, alibi, non_causal, masked, chosen, chosen_block,
               chosen_tail, select, precision, prior, str layout, out, return_lse):
        self.check_open()
        cdef bint wants_lse = flag(return_lse, "return_lse")
        cdef int32_t at = to_layer(layer, self.cache.num_layers)
        cdef int axes = to_layout(layout)
        cdef bint store = k is not None or v is not None
        cdef bint cross = self.cache.layers[at].policy.kind == KVC_CROSS
        cdef kvc_batch *batch
        cdef kvc_status status
        cdef PutRows rows
        cdef Query query
        cdef kvc_dense_args none
        if not self.cache.layers[at].v_dim:
            memset(&none, 0, sizeof(none))
            self.count_dense(at, &none)  # which fails: nothing attends in such a layer
        query_owners = self.read_query(at, q, first, scale, softcap, sinks, alibi, non_causal, masked, select,
                                       precision, prior, axes, out, &query)
        if chosen is not None and select is not None:
            raise ValueError(f"select={select}, and chosen is given: rows are chosen or selected, not both")
        if chosen is not None:
            _entries = read_chosen(self, chosen, chosen_block, chosen_tail, &query)
        elif to_int(chosen_block, "chosen_block", 1, _INT32_MAX) != 1 or flag(chosen_tail, "chosen_tail"):
            raise ValueError(f"chosen_block={chosen_block}, chosen_tail={chosen_tail}: chosen, which these describe, "
                             "must be given, too")
        if store:
            # Rows for a cross-attention layer are no tokens of the batch: `first` is for the queries only.
            _put_owners = self.read_put(at, k, v, 0 if cross else first, None, axes, &rows, query.plan.num_tokens)
            if self.cache.layers[at].policy.stride > 1:
                matches = axes != BHTD or query.q.shape[0] == rows.k.shape[0]  # read_put has counted the rows
            else:
                matches = cross or same_tokens(&query.q, &rows.k, axes)
            if not matches:
                raise ValueError(f"q and k: of {show_tokens(&query.q, axes)} and {show_tokens(&rows.k, axes)} tokens, "
                                 "where they must match")
        if out is None:
            out = query_owners[-1]
        else:
            check_apart(&query.out, &query.q, "q")
            check_apart(&query.out, &query.sinks, "sinks")
            check_apart(&query.out, &query.alibi, "alibi")
            if store:
                check_apart(&query.out, &rows.k, "k")
                check_apart(&query.out, &rows.v, "v")
        if wants_lse:
            sums = new_result(q, KVC_F32, query.q.ndim - 1, query.q.shape[0], query.q.shape[1], query.q.shape[2])
            read_array(sums, "lse", query.q.ndim - 1, &query.lse)
            query.args.lse = <float *>query.lse.data
            set_lse_strides(&query.lse, axes, &query)
        if prior is not None:
            join_prior(axes, &query)
        if store:
            query.args.put = &rows.args
        batch = self.enter()
        with nogil:
            status = kvc_attend(batch, &query.plan, &query.args)
        self.finish(status)
        return (out, sums) if wants_lse else out

    def choose(self, layer, q, first, width, options, str layout, return_scores):
        self.check_open()
        cdef int axes = to_layout(layout)
        cdef int32_t at = to_layer(layer, self.cache.num_layers)
        cdef bint wants_scores = flag(return_scores, "return_scores")
        cdef Choosing a
        cdef kvc_batch *batch
        cdef kvc_status status
        memset(&a, 0, sizeof(Choosing))
        a.plan.struct_size, a.args.struct_size, a.plan.layer = sizeof(kvc_plan_args), sizeof(kvc_choose_args), at
        if not self.cache.layers[at].v_dim:  # else kvc_choose says that nothing chooses by such a layer
            owners = read_choosing(self, q, first, width, wants_scores, options, axes, &a)
        batch = self.enter()
        with nogil:
            status = kvc_choose(batch, &a.plan, &a.args)
        self.finish(status)
        return owners[:2] if wants_scores else owners[0]

    cdef object dense_rows(self, object out, str name, int32_t type, int layout, int64_t heads, int64_t dim,
                           Array *like, Array *a):
        """Describe `out`, or a new array if that is None, for the sequences and rows of `like`.

        Return the object that keeps the array's memory.
        """
        cdef int64_t sequences = like.shape[0], rows = like.shape[TOKEN_AXIS[layout]]
        if out is None:
            if layout == BHTD:
                out = new_array(type, 4, sequences, heads, rows, dim)
            elif layout == HTD:
                out = new_array(type, 3, heads, rows, dim)
            else:
                out = new_array(type, 3, rows, heads, dim)
            read_numpy(out, name, NUM_AXES[layout], a)
            return out
        owner = read_array(out, name, NUM_AXES[layout], a, write=True)
        if not same_tokens(a, like, layout) or a.shape[HEAD_AXIS[layout]] != heads or a.shape[a.ndim - 1] != dim:
            wrong_shape(name, a, layout, heads, dim, like)
        check_writable(a, name)
        return owner

    cdef cnp.ndarray dense_mask(self, object out, str kind, tuple shape, Array *k, Array *v):
        """Return an array for the mask: `out` after checks, or a new array."""
        cdef cnp.ndarray mask
        cdef char *end
        dtype = np.dtype(np.float32 if kind == "f32" else np.bool_)
        if out is None:
            return np.empty(shape, dtype)
        if not isinstance(out, np.ndarray) and hasattr(out, "__dlpack__"):
            check_tensor(out, "out[2]")
            try:
                out = np.from_dlpack(out)
            except (BufferError, RuntimeError):
                pass  # then it is no array on the CPU
        if not isinstance(out, np.ndarray) or out.dtype != dtype:
            raise TypeError(f"out[2]: an array of {dtype} is needed, where mask={kind!r}, not "
                            f"{getattr(out, 'dtype', type(out).__name__)}")
        if out.shape != shape:
            raise ValueError(f"out[2]: an array of shape {out.shape}, where {shape} is needed")
        if not out.flags.c_contiguous or not out.flags.aligned or not out.flags.writeable:
            raise ValueError("out[2]: must be contiguous, and may not be read-only")
        mask = out
        end = cnp.PyArray_BYTES(mask) + cnp.PyArray_NBYTES(mask)
        if (begin_of(k) < end and cnp.PyArray_BYTES(mask) < end_of(k)) or (
                begin_of(v) < end and cnp.PyArray_BYTES(mask) < end_of(v)):
            raise ValueError("out: the mask overlaps keys or values; give it memory of its own")
        return mask

    cdef tuple read_dense_out(self, object out, bint want_mask):
        """Return the caller's arrays for keys, values and mask; None in the place of an array that was not given."""
        if out is None:
            return None, None, None
        given = tuple(out) if isinstance(out, (tuple, list)) else ()
        if not 2 <= len(given) <= 2 + want_mask or any(to is None for to in given):
            raise TypeError("out: a tuple of arrays for keys, values and, where there is one, the mask is needed")
        return given if len(given) == 3 else (*given, None)

    cdef int32_t count_dense(self, int32_t layer, kvc_dense_args *args) except -1:
        """Set `args.num_rows` to the rows of a layer's dense arrays; return the number of sequences in them."""
        cdef int32_t sequences = 1
        cdef kvc_status status
        cdef kvc_batch *batch = self.enter()
        with nogil:
            if args.by_sequence:
                status = kvc_dense_sequences(batch, layer, &sequences, &args.num_rows)
            else:
                status = kvc_dense_rows(batch, layer, &args.num_rows)
        self.finish(status)
        return sequences

    def dense(self, layer, non_causal, masked, dtype, str layout, mask, out):
        self.check_open()
        cdef int32_t at = to_layer(layer, self.cache.num_layers), sequences, type
        cdef int axes = to_layout(layout)
        cdef kvc_layer *shape = &self.cache.layers[at]
        cdef cnp.ndarray flags = to_flags(non_causal, 0, self.num_tokens, self.num_tokens), masks = None
        cdef kvc_batch *batch
        cdef Array k, v, like
        cdef kvc_dense_args args
        cdef kvc_rows_out rows
        cdef kvc_status status
        k_out, v_out, mask_out = self.read_dense_out(out, mask is not None)
        memset(&args, 0, sizeof(args))
        args.struct_size = sizeof(args)
        _ranges = to_masked(masked, &args.masked, &args.masked_size, &args.num_masked)
        args.by_sequence = axes == BHTD
        sequences = self.count_dense(at, &args)
        type = TYPES["f32" if dtype is None else dtype]
        like.shape[0] = sequences
        like.shape[TOKEN_AXIS[axes]] = args.num_rows
        key_owner = self.dense_rows(k_out, "out[0]", type, axes, shape.num_kv_heads, shape.k_dim, &like, &k)
        value_owner = self.dense_rows(v_out, "out[1]", type, axes, shape.num_kv_heads, shape.v_dim, &like, &v)
        if out is not None:
            if v.type != k.type:
                raise TypeError(f"out: both must be of one type, not {dtype_of(k.type)} and {dtype_of(v.type)}")
            check_apart(&k, &v, "out[1]")
        if mask is not None:
            lengths = [self.num_tokens, args.num_rows]
            if args.by_sequence:
                lengths[:1] = [sequences, self.num_tokens // sequences]
            masks = self.dense_mask(mask_out, mask, tuple(lengths), &k, &v)
        fill_rows_out(&rows, &k, &v, axes)
        args.rows = &rows
        args.k_batch_stride, args.v_batch_stride = k.strides[0], v.strides[0]
        if masks is not None and mask == "f32":
            args.mask = <float *>cnp.PyArray_DATA(masks)
        elif masks is not None:
            args.seen = <uint8_t *>cnp.PyArray_DATA(masks)
        if flags is not None:
            args.non_causal = <const uint8_t *>cnp.PyArray_DATA(flags)
        batch = self.enter()
        with nogil:
            status = kvc_dense(batch, at, &args)
        self.finish(status)
        if out is None:
            return key_owner, value_owner, masks
        return k_out, v_out, masks if mask_out is None else mask_out

    cdef cnp.ndarray to_kept(self, object keep):
        """Convert and check the tokens to keep."""
        cdef cnp.ndarray kept = to_int_array(keep, "keep", cnp.NPY_INT32, -_INT32_MAX - 1, _INT32_MAX, least=0)
        seen = set()
        for i, token in enumerate(kept.tolist()):
            if not 0 <= token < self.num_tokens:
                raise IndexError(f"keep[{i}]={token}: the batch has {self.num_tokens} tokens")
            if token in seen:
                raise ValueError(f"keep[{i}]={token}: was given before")
            seen.add(token)
        return kept

    def commit(self, keep, edits=None, restored=()):
        """Commit the tokens to keep (None: all). Return False if the batch had ended before.

        Note in `edits`, if it is not None, what the batch restored.
        """
        cdef const int32_t[::1] kept
        cdef const int32_t *tokens = NULL
        cdef bint every = keep is None
        cdef int32_t num_kept = 0
        cdef kvc_batch *batch
        cdef kvc_status status
        if self.has_ended():
            return False
        if keep is not None:
            kept = self.to_kept(keep)
            num_kept = <int32_t>kept.shape[0]
        if num_kept:
            tokens = &kept[0]
        batch = self.begin_ending()
        if batch == NULL:  # converting `keep` ran code that ended the batch, or another thread did
            return False
        with nogil:
            status = kvc_commit(batch) if every else kvc_commit_kept(batch, tokens, num_kept)
        if status == KVC_OK and edits is not None:
            edits.extend(restored)
        self.end(status, True)
        return True

    def abort(self):
        cdef kvc_batch *batch = self.begin_ending()
        if batch == NULL:
            return
        with nogil:
            kvc_abort(batch)
        self.end(KVC_OK, False)

    cdef int end_writing(self) except -1:
        """Make views of the batch's slots read-only."""
        for ref in tuple(self.writable):  # a copy: the list shrinks when a view dies
            view = ref()
            if view is not None:
                view.flags.writeable = False
        return 0


def enter_batch(batch):
    """Return a `kvcache.Batch` at the beginning of its ``with``.

    Neither this nor `exit_batch` is written in Python. There a signal's handler may raise at the beginning of a
    function, and leave the batch open.
    """
    return batch


def exit_batch(batch, kind, value, trace):
    """End a `kvcache.Batch` at the end of its ``with``: commit it; or abort it, after an exception or if that fails."""
    cdef Batch core = batch._core
    try:
        if kind is None:
            batch.commit()
    finally:
        core.abort()
