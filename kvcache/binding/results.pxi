"""The results of attention: arrays that it writes, and results of an earlier call."""

# The arguments that attend() passes to C beside the rows to put, and descriptions of its arrays.
cdef struct Query:
    kvc_plan_args plan
    kvc_attend_args args
    kvc_chosen chosen
    Array q
    Array out
    Array lse
    Array prior_out
    Array prior_lse
    Array sinks
    Array alibi


cdef int check_result(Array *a, str name, int64_t dim, int layout, Array *q) except -1:
    """Raise unless an array has a type and the shape of the result for queries."""
    cdef int head = HEAD_AXIS[layout]
    if a.type != q.type and a.type != KVC_F32:
        raise TypeError(f"{name}: must be {dtype_of(q.type)}, as q is, or float32, not {dtype_of(a.type)}")
    if not same_tokens(a, q, layout) or a.shape[head] != q.shape[head] or a.shape[a.ndim - 1] != dim:
        wrong_shape(name, a, layout, f"{q.shape[head]}", dim, q)
    return 0


cdef int check_strides(Array *a, Array *result, str name) except -1:
    """Raise unless an array lies in memory as the result does."""
    cdef int i
    cdef bint alike = is_readable(a)
    for i in range(a.ndim):
        if a.shape[i] > 1 and a.strides[i] != result.strides[i]:
            alike = False
    if not alike:
        raise ValueError(f"{name}: has other strides than the result; pass what attend returned, and as out the "
                         "same array or one with its strides")
    return 0


cdef void set_lse_strides(Array *lse, int layout, Query *query) noexcept:
    query.args.lse_token_stride = lse.strides[TOKEN_AXIS[layout]]
    query.args.lse_head_stride = lse.strides[HEAD_AXIS[layout]]
    query.args.lse_batch_stride = lse.strides[0]


cdef object read_out(object out, object like, int32_t type, int64_t dim, int layout, Array *q, Array *a):
    """Describe `out`, or a new array of a type if that is None, for the result.

    Return the object that keeps its memory: the result itself, if it is new. `like` is the queries' object.
    """
    if out is None:
        if layout == BHTD:
            out = new_result(like, type, 4, q.shape[0], q.shape[1], q.shape[2], dim)
        else:
            out = new_result(like, type, 3, q.shape[0], q.shape[1], dim)
        read_array(out, "out", q.ndim, a)
        return out
    owner = read_array(out, "out", q.ndim, a, write=True)
    check_result(a, "out", dim, layout, q)
    check_writable(a, "out")
    return owner


cdef tuple read_prior(object prior, int64_t dim, int layout, Query *query):
    """Describe what attention to other rows gave the queries; return the objects that keep its memory."""
    cdef Array *out = &query.prior_out
    cdef Array *lse = &query.prior_lse
    cdef int i
    if prior is None:
        return ()
    if not isinstance(prior, tuple) or len(prior) != 2:
        given = f"a tuple of {len(prior)}" if isinstance(prior, tuple) else type(prior).__name__
        raise TypeError(f"prior: must be a tuple of a result and its log-sum-exp, not {given}")
    owners = read_array(prior[0], "prior[0]", query.q.ndim, out), read_array(
        prior[1], "prior[1]", query.q.ndim - 1, lse)
    check_result(out, "prior[0]", dim, layout, &query.q)
    if lse.type != KVC_F32:
        raise TypeError(f"prior[1]: must be float32, not {dtype_of(lse.type)}")
    for i in range(lse.ndim):
        if lse.shape[i] != query.q.shape[i]:
            raise ValueError(f"prior[1]: axis {i} is {lse.shape[i]} long, where q's is {query.q.shape[i]}")
    return owners


cdef int join_prior(int layout, Query *query) except -1:
    """Check that such a result lies as this call's does, and hand it to C."""
    cdef Array *out = &query.prior_out
    cdef Array *lse = &query.prior_lse
    if out.type != query.out.type:
        raise TypeError(f"prior[0]: must be {dtype_of(query.out.type)}, as out is, not {dtype_of(out.type)}")
    check_strides(out, &query.out, "prior[0]")
    check_strides(lse, &query.lse if query.args.lse != NULL else lse, "prior[1]")
    if out.data != query.out.data:
        check_apart(&query.out, out, "prior[0]")
    check_apart(&query.out, lse, "prior[1]")
    query.args.prior_out, query.args.prior_lse = out.data, <const float *>lse.data
    set_lse_strides(lse, layout, query)
    return 0
