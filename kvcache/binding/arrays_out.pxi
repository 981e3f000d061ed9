"""Arrays that go out, and those that are filled in."""

cdef object make_array(object subtype, cnp.dtype descr, int ndim, cnp.npy_intp *shape, cnp.npy_intp *strides,
                       void *data, int flags=0):
    """An array of new memory, or one over what somebody else keeps: read-only, if the flags do not say otherwise."""
    Py_INCREF(descr)  # which the next line gives away
    return PyArray_NewFromDescr(<PyTypeObject *>subtype, descr, ndim, shape, strides, data, flags, NULL)


cdef cnp.dtype dtype_of(int32_t type):
    if type == KVC_BF16:
        return find_bf16()
    return cnp.PyArray_DescrFromType(cnp.NPY_FLOAT32 if type == KVC_F32 else cnp.NPY_FLOAT16)


cdef int64_t row_bytes(int32_t type, int64_t dim) noexcept:
    return dim // 32 * BLOCK_SIZE[type - KVC_Q8_0] if type >= KVC_Q8_0 else dim * ITEM_SIZE[type]


def bytes_of_row(int32_t type, int64_t dim):
    return row_bytes(type, dim)


cdef cnp.ndarray new_array(int32_t type, int ndim, int64_t a, int64_t b, int64_t c=0, int64_t d=0):
    cdef cnp.npy_intp[4] shape = [a, b, c, d]
    if type == KVC_F32:
        return cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT32, 0)
    if type == KVC_F16:
        return cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT16, 0)
    return make_array(BFloat16Array, find_bf16(), ndim, shape, NULL, NULL)


cdef void fill_rows_out(kvc_rows_out *to, Array *k, Array *v, int layout) noexcept:
    cdef int head = HEAD_AXIS[layout], row = TOKEN_AXIS[layout]
    memset(to, 0, sizeof(kvc_rows_out))
    to.struct_size = sizeof(kvc_rows_out)
    to.type, to.k, to.v = k.type, k.data, v.data
    to.k_head_stride, to.k_row_stride = k.strides[head], k.strides[row]
    to.v_head_stride, to.v_row_stride = v.strides[head], v.strides[row]


cdef object read_rows_out(kvc_layer *shape, object out, int64_t most, int64_t *rows, kvc_rows_out *to):
    """Where keys and values go, at most so many rows; returns what keeps the arrays."""
    cdef Array k, v
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out: a pair of arrays is needed, for keys and values, not {type(out).__name__}")
    owners = read_array(out[0], "out[0]", 3, &k, write=True), read_array(out[1], "out[1]", 3, &v, write=True)
    if v.type != k.type:
        raise TypeError(f"out: both must be of one type, not {dtype_of(k.type)} and {dtype_of(v.type)}")
    if k.shape[0] != shape.num_kv_heads or k.shape[2] != shape.k_dim:
        wrong_shape("out[0]", &k, HTD, shape.num_kv_heads, shape.k_dim)
    if v.shape[0] != shape.num_kv_heads or v.shape[1] != k.shape[1] or v.shape[2] != shape.v_dim:
        wrong_shape("out[1]", &v, HTD, shape.num_kv_heads, shape.v_dim, &k)
    if k.shape[1] > most:
        raise ValueError(f"out: for {k.shape[1]} rows, where the sequence has {most} from first on")
    check_writable(&k, "out[0]")
    check_writable(&v, "out[1]")
    check_apart(&k, &v, "out[1]")
    rows[0] = k.shape[1]
    fill_rows_out(to, &k, &v, HTD)
    return owners
