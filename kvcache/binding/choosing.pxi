"""Choices of rows: the arguments of Batch.choose(), and of Batch.attend() to chosen rows."""

# The arguments that choose() passes to C, and descriptions of its arrays.
cdef struct Choosing:
    kvc_plan_args plan
    kvc_choose_args args
    Array q
    Array weights


cdef object read_weights(object x, int layout, Choosing *a):
    """Describe an array of one f32 number per token and query head; return the object that keeps its memory."""
    cdef Array *to = &a.weights
    cdef int i
    owner = read_array(x, "weights", a.q.ndim - 1, to)
    if to.type != KVC_F32:
        raise TypeError("weights: one float32 number per token and query head is needed; convert weights to float32")
    shape, wanted = [to.shape[i] for i in range(to.ndim)], [a.q.shape[i] for i in range(to.ndim)]
    if shape != wanted:
        raise ValueError(f"weights: an array of shape {(*shape,)}, where q has {show_tokens(&a.q, layout)} tokens of "
                         f"{a.plan.num_heads} heads: {(*wanted,)} is needed")
    owner = make_readable(to, owner)
    a.args.weights, a.args.weights_batch_stride = <const float *>to.data, to.strides[0]
    a.args.weights_token_stride = to.strides[TOKEN_AXIS[layout]]
    a.args.weights_head_stride = to.strides[HEAD_AXIS[layout]]
    return owner


cdef cnp.ndarray read_among(object entries, Choosing *a):
    """Describe the entries that may be chosen; return the array that C reads."""
    cdef cnp.ndarray array = to_entries(entries, "among", a.plan.num_tokens, a.args.num_choices)
    a.args.among_width = <int32_t>cnp.PyArray_DIM(array, array.ndim - 1)
    if array.size < <int64_t>a.plan.num_tokens * a.args.num_choices * a.args.among_width:  # one list for all choices
        array = np.repeat(array.reshape(a.plan.num_tokens, 1, a.args.among_width), a.args.num_choices, axis=1)
    a.args.among = <const int32_t *>cnp.PyArray_DATA(array)
    return array


cdef tuple read_choosing(Batch self, object q, object first, object width, bint wants_scores,
                         dict options, int layout, Choosing *a):
    """Describe a choice in the plan's layer; return the objects that keep its memory, the results first."""
    cdef int token = TOKEN_AXIS[layout], head = HEAD_AXIS[layout]
    cdef kvc_layer *shape = &self.cache.layers[a.plan.layer]
    cdef kvc_choose_args *args = &a.args
    cdef cnp.ndarray chosen, scores = None, flags
    q_owner = read_rows(q, "q", shape.num_kv_heads, True, shape.k_dim, layout, &a.q)
    a.plan.first = self.to_first(first, count_tokens(&a.q, layout))
    q_owner = make_readable(&a.q, q_owner)
    a.plan.num_tokens, a.plan.num_heads = <int32_t>count_tokens(&a.q, layout), <int32_t>a.q.shape[head]
    args.q, args.q_type = a.q.data, a.q.type
    args.q_token_stride, args.q_head_stride = a.q.strides[token], a.q.strides[head]
    weights = None if options["weights"] is None else read_weights(options["weights"], layout, a)
    if options["scale"] is not None:
        args.scale = to_factor(options["scale"], "scale", False)
    args.relu = flag(options["relu"], "relu")
    args.width = <int32_t>to_int(width, "width", 1, _INT32_MAX)
    args.num_choices = <int32_t>to_int(options["num_choices"], "num_choices", 1, a.plan.num_heads)
    args.block = <int32_t>to_int(options["block"], "block", 1, _INT32_MAX)
    args.num_first = <int32_t>to_int(options["num_first"], "num_first", 0, _INT32_MAX)
    args.num_local = <int32_t>to_int(options["num_local"], "num_local", 0, _INT32_MAX)
    among = None if options["among"] is None else read_among(options["among"], a)
    flags = to_flags(options["non_causal"], a.plan.first, a.plan.num_tokens, self.num_tokens)
    if flags is not None:
        a.plan.non_causal = <const uint8_t *>cnp.PyArray_DATA(flags)
    ranges = to_masked(options["masked"], &a.plan.masked, &a.plan.masked_size, &a.plan.num_masked)
    chosen = np.empty((a.plan.num_tokens, args.num_choices, args.width), np.int32)
    args.chosen = <int32_t *>cnp.PyArray_DATA(chosen)
    if wants_scores:
        scores = np.empty((a.plan.num_tokens, args.num_choices, args.width), np.float32)
        args.scores = <float *>cnp.PyArray_DATA(scores)
    if layout == BHTD:  # entries come in the order of the batch
        args.tokens_per_sequence, args.q_batch_stride = <int32_t>a.q.shape[token], a.q.strides[0]
    return chosen, scores, q_owner, weights, among, flags, ranges


cdef cnp.ndarray read_chosen(Batch self, object entries, object block, object tail, Query *query):
    """Describe the rows that tokens choose; return the array that C reads."""
    cdef kvc_chosen *chosen = &query.chosen
    cdef int64_t tokens = query.plan.num_tokens, heads = self.cache.layers[query.plan.layer].num_kv_heads
    cdef cnp.ndarray array = to_entries(entries, "chosen", tokens, heads)
    chosen.struct_size = sizeof(kvc_chosen)
    chosen.positions = <const int32_t *>cnp.PyArray_DATA(array)
    chosen.width = <int32_t>to_int(cnp.PyArray_DIM(array, array.ndim - 1), "the width of chosen", 1, _INT32_MAX)
    chosen.num_choices = <int32_t>cnp.PyArray_DIM(array, 1) if array.ndim == 3 else 1
    chosen.block = <int32_t>to_int(block, "chosen_block", 1, _INT32_MAX)
    chosen.tail = flag(tail, "chosen_tail")
    query.args.chosen = chosen
    return array
