"""Make arrays for results, and describe the caller's arrays that results are written to."""

cdef object make_array(object subtype, cnp.dtype descr, int ndim, cnp.npy_intp *shape, cnp.npy_intp *strides,
                       void *data, int flags=0):
    """Return an array over `data`, read-only unless the flags say otherwise; over new memory if `data` is NULL."""
    Py_INCREF(descr)  # the next call steals a reference
    return PyArray_NewFromDescr(<PyTypeObject *>subtype, descr, ndim, shape, strides, data, flags, NULL)


cdef cnp.dtype dtype_of(int32_t type):
    if type == KVC_BF16:
        return find_bf16()
    return cnp.PyArray_DescrFromType(cnp.NPY_FLOAT32 if type == KVC_F32 else cnp.NPY_FLOAT16)


cpdef int64_t bytes_of_row(int32_t type, int64_t dim) noexcept:
    """Return the bytes of `dim` elements of a kvc_type."""
    return dim // 32 * BLOCK_SIZE[type - KVC_Q8_0] if type >= KVC_Q8_0 else dim * ITEM_SIZE[type]


cdef cnp.ndarray new_array(int32_t type, int ndim, int64_t a, int64_t b, int64_t c=0, int64_t d=0):
    cdef cnp.npy_intp[4] shape = [a, b, c, d]
    if type == KVC_F32:
        return cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT32, 0)
    if type == KVC_F16:
        return cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT16, 0)
    return make_array(BFloat16Array, find_bf16(), ndim, shape, NULL, NULL)


cdef tuple new_rows(kvc_layer *shape, int64_t rows, int32_t type, bint want_k, bint want_v, kvc_rows_out *to):
    """Make arrays for keys and values, [num_kv_heads, rows, dim], where wanted; describe and return them."""
    cdef cnp.ndarray k = None, v = None
    memset(to, 0, sizeof(kvc_rows_out))
    to.struct_size = sizeof(kvc_rows_out)
    to.type = type
    if want_k:
        k = new_array(type, 3, shape.num_kv_heads, rows, shape.k_dim)
        to.k = cnp.PyArray_DATA(k)
        to.k_row_stride = shape.k_dim * ITEM_SIZE[type]
        to.k_head_stride = rows * to.k_row_stride
    if want_v:
        v = new_array(type, 3, shape.num_kv_heads, rows, shape.v_dim)
        to.v = cnp.PyArray_DATA(v)
        to.v_row_stride = shape.v_dim * ITEM_SIZE[type]
        to.v_head_stride = rows * to.v_row_stride
    return k, v


cdef void fill_rows_out(kvc_rows_out *to, Array *k, Array *v, int layout) noexcept:
    cdef int head = HEAD_AXIS[layout], row = TOKEN_AXIS[layout]
    memset(to, 0, sizeof(kvc_rows_out))
    to.struct_size = sizeof(kvc_rows_out)
    to.type, to.k, to.v = k.type, k.data, v.data
    to.k_head_stride, to.k_row_stride = k.strides[head], k.strides[row]
    to.v_head_stride, to.v_row_stride = v.strides[head], v.strides[row]


cdef object read_rows_out(kvc_layer *shape, object out, int64_t most, int64_t *rows, kvc_rows_out *to):
    """Describe the caller's arrays for at most `most` rows of keys and values, and set `rows` to their number.

    Return the objects that keep the arrays' memory.
    """
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
