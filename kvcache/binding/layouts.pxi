"""Layouts of arrays of rows: which axis the tokens are on, and which the heads."""

cdef enum:
    THD = 0
    HTD = 1
    BHTD = 2  # B sequences of T tokens each: token t of sequence b is token b * T + t of the batch

# These three are indexed by layout.
cdef int[3] NUM_AXES = [3, 3, 4]
cdef int[3] TOKEN_AXIS = [0, 1, 2]
cdef int[3] HEAD_AXIS = [1, 0, 1]


cdef int to_layout(str layout) except -1:
    if layout == "THD":
        return THD
    if layout == "HTD":
        return HTD
    if layout == "BHTD":
        return BHTD
    raise ValueError(f"layout={layout!r}: must be 'THD' (tokens, heads, dim), 'HTD' (heads, tokens, dim) or 'BHTD'")


cdef int to_precision(object precision) except -1:
    if isinstance(precision, str) and precision in ("stored", "int8"):
        return precision == "int8"  # KVC_PRECISION_INT8 is 1
    raise ValueError(f"precision={precision!r}: must be 'stored', as precise as the rows, or 'int8'")


cdef inline int64_t count_tokens(Array *a, int layout) noexcept:
    """Count the tokens in an array of rows; a count beyond int32 stays beyond it, and the product cannot overflow."""
    cdef int64_t tokens = a.shape[TOKEN_AXIS[layout]]
    return min(a.shape[0], _INT32_MAX + 1) * min(tokens, _INT32_MAX + 1) if layout == BHTD else tokens


cdef inline bint same_tokens(Array *a, Array *b, int layout) noexcept:
    """Whether two arrays of one layout have the same number of tokens, and of sequences."""
    cdef int axis = TOKEN_AXIS[layout]
    return a.shape[axis] == b.shape[axis] and (layout != BHTD or a.shape[0] == b.shape[0])


cdef str show_tokens(Array *a, int layout):
    tokens = f"{a.shape[TOKEN_AXIS[layout]]}"
    return f"{a.shape[0]} x {tokens}" if layout == BHTD else tokens


cdef int wrong_shape(str name, Array *a, int layout, object heads, int64_t dim, Array *like=NULL) except -1:
    """Raise for an array of the wrong shape; `like` is an array with the right tokens, NULL if any number is right."""
    shape = ", ".join([str(a.shape[i]) for i in range(a.ndim)])
    tokens = "tokens" if like == NULL else f"{like.shape[TOKEN_AXIS[layout]]}"
    wanted = f"{tokens}, {heads}, {dim}" if layout == THD else f"{heads}, {tokens}, {dim}"
    if layout == BHTD:
        wanted = ("sequences, " if like == NULL else f"{like.shape[0]}, ") + wanted
    advice = f": bytes of rows of {type_name(a.type)}, as they are stored" if a.is_raw else ""
    raise ValueError(f"{name}: an array of shape ({shape}), where ({wanted}) is needed{advice}")
