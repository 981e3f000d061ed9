"""Views of rows in the cache's memory, and the objects that keep the rows in place."""

cdef int free_hold(Cache cache, kvc_hold *hold) noexcept:
    """Free a hold. This counts as a call, so that no other thread closes the cache meanwhile."""
    if hold != NULL:
        cache.count_call()
        with nogil:
            kvc_hold_free(hold)
        cache.leave()
    return 0


cdef object view_rows(kvc_layer *layer, kvc_span *span, int64_t rows, bint values, bint writable, object owner):
    """Return a view of keys or values from a span on, [num_kv_heads, rows, dim]; `owner` keeps their memory.

    Of a quantised type it shows the bytes of the blocks. What a layer of keys alone has of values is of width 0.
    """
    cdef int32_t type = layer.v_type if values else layer.k_type
    cdef int64_t dim = layer.v_dim if values else layer.k_dim
    cdef cnp.npy_intp[3] shape = [layer.num_kv_heads, rows, dim]
    cdef cnp.npy_intp[3] strides = [span.k_head_stride, span.k_row_stride, 1]
    cdef cnp.dtype descr
    if not dim:
        array = new_array(type, 3, layer.num_kv_heads, rows, 0)
        array.flags.writeable = writable
        return array
    if values:
        strides[0], strides[1] = span.v_head_stride, span.v_row_stride
    if type >= KVC_Q8_0:
        shape[2] = bytes_of_row(type, dim)
        descr = cnp.PyArray_DescrFromType(cnp.NPY_UINT8)
    else:
        strides[2] = bytes_of_row(type, 1)
        descr = dtype_of(type)
    array = make_array(BFloat16Array if type == KVC_BF16 else np.ndarray, descr, 3, shape, strides,
                       <void *>(span.v if values else span.k), cnp.NPY_ARRAY_WRITEABLE if writable else 0)
    cnp.set_array_base(array, owner)
    return array


@cython.final
@cython.no_gc_clear  # __dealloc__ needs the cache
cdef class Hold:
    """Keeps the rows of a sequence in a layer unchanged while it lives; views of the rows have it as their base.

    With a batch, which must be open, they include the rows that it was given for the sequence.
    """

    cdef Cache cache
    cdef kvc_hold *handle
    cdef kvc_span *spans
    cdef int64_t num_spans

    def __cinit__(self, Cache cache not None, Batch batch, int32_t layer, int64_t seq_id):
        cdef int64_t max_spans = 0
        cdef void *spans
        cdef kvc_cache *handle
        cdef kvc_batch *open_batch
        cdef kvc_status status
        self.cache = cache
        self.num_spans = 1
        while max_spans < self.num_spans:
            max_spans = self.num_spans
            spans = PyMem_Realloc(self.spans, max_spans * sizeof(kvc_span))
            if spans == NULL:
                raise MemoryError
            self.spans = <kvc_span *>spans
            handle = enter_both(cache, batch, &open_batch)
            with nogil:
                if open_batch == NULL:
                    status = kvc_spans(handle, seq_id, layer, self.spans, sizeof(kvc_span), max_spans, &self.num_spans,
                                       &self.handle)
                else:
                    status = kvc_batch_spans(open_batch, seq_id, layer, self.spans, sizeof(kvc_span), max_spans,
                                             &self.num_spans, &self.handle)
            leave_both(cache, batch)
            check(status)

    def __dealloc__(self):
        free_hold(self.cache, self.handle)
        PyMem_Free(self.spans)

    cdef bint in_one_piece(self) noexcept:
        """Whether each span begins where the span before ends."""
        cdef kvc_span *a
        cdef kvc_span *b
        cdef int64_t i
        for i in range(self.num_spans - 1):
            a, b = &self.spans[i], &self.spans[i + 1]
            if <char *>a.k + a.num_rows * a.k_row_stride != <char *>b.k or a.k_head_stride != b.k_head_stride:
                return False
            if <char *>a.v + a.num_rows * a.v_row_stride != <char *>b.v or a.v_head_stride != b.v_head_stride:
                return False
        return True

    cdef int32_t pending_delta(self) noexcept:
        """Return the first delta that keys are yet to be rotated by; 0: every key is rotated for its position."""
        cdef int64_t i
        for i in range(self.num_spans):
            if self.spans[i].delta:
                return self.spans[i].delta
        return 0

    cdef object view(self, kvc_layer *layer, int64_t first, int64_t num_spans, bint values):
        """Return a read-only view of spans that lie in one piece, [num_kv_heads, rows, dim]."""
        cdef int64_t rows = 0, i
        for i in range(first, first + num_spans):
            rows += self.spans[i].num_rows
        return view_rows(layer, &self.spans[first], rows, values, False, self)


@cython.final
@cython.no_gc_clear  # __dealloc__ needs the cache
cdef class Slots:
    """Keeps the slots of a batch's tokens while it lives; writable views of the slots have it as their base."""

    cdef Cache cache
    cdef kvc_hold *handle
    cdef kvc_span span

    def __dealloc__(self):
        free_hold(self.cache, self.handle)
