"""Weights of rows: KVCache.weights()."""


def weigh_rows(Cache cache not None, layer, q, positions, seq_id, reduce, rotate, scale, softcap, sinks):
    """Return the weights that queries give to the rows of a sequence, f32 [num_kv_heads, rows]."""
    cache.check_open()
    cdef int32_t at = to_layer(layer, cache.num_layers)
    cdef int64_t seq = to_seq_id(seq_id)
    cdef kvc_layer *shape = &cache.layers[at]
    cdef Array queries, factors
    cdef kvc_weights_args args
    cdef cnp.ndarray listed = None, found
    cdef kvc_cache *handle
    cdef kvc_status status
    memset(&args, 0, sizeof(args))
    args.struct_size = sizeof(args)
    _q = read_rows(q, "q", shape.num_kv_heads, True, shape.k_dim, THD, &queries)
    args.num_queries = <int32_t>to_int(queries.shape[0], "len(q)", 1, _INT32_MAX)
    _q = make_readable(&queries, _q)
    args.num_heads = <int32_t>queries.shape[1]
    args.q, args.q_type = queries.data, queries.type
    args.q_token_stride, args.q_head_stride = queries.strides[0], queries.strides[1]
    if positions is not None:
        listed = to_int_array(positions, "positions", cnp.NPY_INT32, 0, _MAX_POSITION)
        if cnp.PyArray_DIM(listed, 0) != args.num_queries:
            raise ValueError(f"len(positions)={len(listed)}: must be the number of queries, which is "
                             f"{args.num_queries}")
        args.positions = <const int32_t *>cnp.PyArray_DATA(listed)
    if reduce not in ("sum", "max"):
        raise ValueError(f"reduce={show(reduce)}: must be 'sum' or 'max'")
    args.reduction = KVC_REDUCE_SUM if reduce == "sum" else KVC_REDUCE_MAX
    args.rotates = flag(rotate, "rotate")
    args.scale = to_scale(scale, at, shape)
    if softcap is not None:
        args.softcap = to_factor(softcap, "softcap", True)
    _sinks = None if sinks is None else read_factors(sinks, "sinks", args.num_heads, &factors)
    if sinks is not None:
        args.sinks = <const float *>factors.data
    args.num_rows = cache.count_rows(seq, at)
    found = np.empty((shape.num_kv_heads, args.num_rows), np.float32)
    args.weights = <float *>cnp.PyArray_DATA(found)
    handle = cache.enter()
    with nogil:
        status = kvc_weights(handle, seq, at, &args)
    cache.finish(status)
    return found
