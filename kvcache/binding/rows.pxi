"""Rows in their stored type, of a cache or also of its open batch: views where there can be any, else copies."""

cdef kvc_cache *enter_both(Cache cache, Batch batch, kvc_batch **handle) except NULL:
    """Enter a cache, and its open batch unless that is None; set `handle` to the batch's."""
    cdef kvc_cache *entered
    handle[0] = NULL if batch is None else batch.enter()
    try:
        entered = cache.enter()
    except BaseException:
        if batch is not None:
            batch.leave()
        raise
    return entered


cdef int leave_both(Cache cache, Batch batch) noexcept:
    cache.leave()
    if batch is not None:
        batch.leave()
    return 0


cdef int check_viewable(Batch batch, kvc_layer *shape, int32_t layer, int32_t type) except -1:
    if type >= KVC_Q8_0:
        if batch is None:
            decodes = "gather() decodes it, or copies its bytes with raw=True"
        elif shape.v_dim:
            decodes = "dense() decodes it"
        else:
            decodes = "once the batch is committed, KVCache.gather() decodes it"
        raise ValueError(f"layer {layer} stores {type_name(type)}, which no array can show: {decodes}")
    return 0


cdef int64_t to_sequence(Batch batch, object seq_id) except? -1:
    """Convert a sequence's id; None: the only sequence of the batch."""
    return to_seq_id(seq_id) if seq_id is not None or batch is None else batch.only_sequence()


def rows(Cache cache not None, Batch batch, seq_id, layer, copy, bint values):
    """Return keys or values in their stored type: a view or a copy, see `KVCache.keys` and `Batch.keys`."""
    cdef int64_t seq = to_sequence(batch, seq_id)
    cdef int32_t at = to_layer(layer, cache.num_layers)
    cdef kvc_layer *shape = &cache.layers[at]
    cdef int32_t type = shape.v_type if values else shape.k_type, delta = 0
    cdef kvc_rows_out none
    cdef Hold hold
    if copy is not None and not isinstance(copy, (bool, np.bool_)):
        raise TypeError(f"copy={show(copy)}: must be True, False or None")
    check_viewable(batch, shape, at, type)
    if not copy:
        hold = Hold(cache, batch, at, seq)
        if not hold.num_spans:
            array = new_rows(shape, 0, type, False, not values, values, &none)[1 if values else 0]
            array.flags.writeable = False  # like a view
            return array
        if not values and shape.rope.kind == KVC_ROPE_FREQUENCIES:
            delta = hold.pending_delta()
        if not delta and hold.in_one_piece():
            return hold.view(shape, 0, hold.num_spans, values)
        if copy is not None and delta:
            raise ValueError(f"copy=False: keys that were moved, by {delta}, are rotated only in a copy: copy=None "
                             "makes one")
        if copy is not None:
            raise ValueError(f"copy=False: the rows lie in {hold.num_spans} pieces, so that there is no view of "
                             "them all; spans() has one of each, copy=None copies")
    return cache.copy_rows(batch, at, seq, 0, type, False, not values, values)[1 if values else 0]


def spans(Cache cache not None, Batch batch, seq_id, layer):
    """Return a list of (k, v, position of the first row, number of rows, positions from row to row, delta)."""
    cdef int64_t seq = to_sequence(batch, seq_id), i
    cdef int32_t at = to_layer(layer, cache.num_layers)
    cdef kvc_layer *shape = &cache.layers[at]
    cdef Hold hold
    check_viewable(batch, shape, at, max(shape.k_type, shape.v_type))
    hold = Hold(cache, batch, at, seq)
    return [
        (hold.view(shape, i, 1, False), hold.view(shape, i, 1, True), hold.spans[i].position,
         hold.spans[i].num_rows, max(shape.policy.stride, 1), hold.spans[i].delta)
        for i in range(hold.num_spans)
    ]
